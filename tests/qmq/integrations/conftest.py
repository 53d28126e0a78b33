"""A node for the tests of integrations, in a separate process, because task queues start threads
and processes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from support import NodeProcess


@pytest.fixture(scope="package")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """HOST:PORT of a node that all tests of a worker share; each test has its own names."""
    node = NodeProcess(tmp_path_factory.mktemp("node"))
    yield node.start()
    node.kill()


@pytest.fixture
def subject() -> str:
    """A subject that no other test uses."""
    return f"subject-{uuid4().hex}"


@pytest.fixture(params=["memory", "node"])
def place(request: pytest.FixtureRequest) -> Any:
    """Where a case of FastStream runs: in memory, and on the node."""
    from faststream_places import Place

    return Place(None if request.param == "memory" else request.getfixturevalue("address"))


@pytest.fixture
def node(address: str) -> Any:
    """A case of FastStream that runs on the node only."""
    from faststream_places import Place

    return Place(address)


@pytest.fixture
def memory() -> Any:
    """A case of FastStream that runs in memory only."""
    from faststream_places import Place

    return Place(None)


@pytest.fixture(scope="package")
def project(address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The Django project, migrated, in this process; its database: SQLite, unless
    `QMQ_TEST_DATABASE` names another (tests/sql).
    """
    database = os.environ.get("QMQ_TEST_DATABASE") or str(
        tmp_path_factory.mktemp("django") / "shop.sqlite"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent))
        patch.setenv("QMQ_TEST_DATABASE", database)
        patch.setenv("QMQ_SERVER", address)
        import django
        import django_project

        django_project.configure()
        django.setup()
        from django.core.management import call_command

        call_command("migrate", verbosity=0)
        yield database
        from django.db import connections

        from qmq.integrations.django import sending

        sending.close()
        connections.close_all()
