"""Databases for tests: `database` is an empty one on SQLite, PostgreSQL and MariaDB in turn.

A server starts with the first test that needs it, and is shared by all tests of this folder, which
have one xdist group. A test that wants only some kinds says `@pytest.mark.parametrize("database",
["postgresql"], indirect=True)`.
"""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import forms, node_config
from support.databases import Database, DatabaseServer, MariaServer, PostgresServer, sqlite_database

from qmq.node.dev_node import Node

KINDS = ("sqlite", "postgresql") if forms.FORM == "gate" else ("sqlite", "postgresql", "mariadb")
_FORGOTTEN = (
    "ignore:Exception ignored in. <socket.socket fd=[0-9]+, "
    "family=1,:pytest.PytestUnraisableExceptionWarning"
)
_CANCELLED = (
    "ignore:Exception ignored in. <function "
    "Connection.__del__:pytest.PytestUnraisableExceptionWarning"
)
_SERVERS: dict[str, type[DatabaseServer]] = {"postgresql": PostgresServer, "mariadb": MariaServer}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests of this folder run in one worker, one after another: they share the servers."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("sql"))
            # PyMySQL forgets the socket of a connection that is refused, as while a server is away.
            item.add_marker(pytest.mark.filterwarnings(_FORGOTTEN))
            # aiomysql forgets the connection whose attempt is cancelled. The garbage collector
            # finds it in this test or a later one.
            item.add_marker(pytest.mark.filterwarnings(_CANCELLED))


@pytest.fixture(scope="session")
def database_server() -> Iterator[Callable[[str], DatabaseServer]]:
    """Gives the running server of a kind, and starts it if need be."""
    running: dict[str, DatabaseServer] = {}

    def get(kind: str) -> DatabaseServer:
        if kind not in running:
            server = _SERVERS[kind]()
            running[kind] = server  # before it starts: what fails half-way is removed too
            server.create_files()
            server.start()
        return running[kind]

    yield get
    for server in running.values():
        server.remove()


@pytest.fixture(params=KINDS)
def database(
    request: pytest.FixtureRequest, tmp_path: Path, database_server: Callable[[str], DatabaseServer]
) -> Iterator[Database]:
    """A new, empty database."""
    if request.param == "sqlite":
        yield sqlite_database(tmp_path / "business.sqlite")
        return
    server = database_server(request.param)
    server.ensure_started()
    ends = server.ends
    found = server.create_database()
    yield found
    if server.ends != ends:
        server.ensure_started()
        gc.collect()  # what was forgotten is found here, not in another test
    server.drop_database(found)


@pytest.fixture
def node_address(tmp_path: Path) -> Iterator[str]:
    """A node in a separate thread, for tests without asyncio."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def run(work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, loop).result(30)

    node = Node(node_config(tmp_path / "node"))
    run(node.start())
    yield node.address
    run(node.stop())
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
