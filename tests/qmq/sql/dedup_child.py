"""A program that starts processes which handle one message and die at a chosen line.

It reads one JSON object a line from its standard input (see `Life`), and prints for each how the
process ended: its exit status, and the lines that it ran if it did not die. All modules are
imported once; each life is a fork.

The lines are those that run for a message from the listener's `MessageHandling.handle` to the
verdict, in their order: lines of the listener, of the test's handlers, and of the database modules.
(Not those of `dedup_tables.py` and `dialects.py`, which only make text.) One more place to die
comes after them, before the acknowledgement has left.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sqlite3
import sys
import threading
import warnings
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

import dedup_handlers
import psycopg
import pymysql
from dedup_handlers import bill, bill_by_driver, bill_in_thread
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import sessionmaker

import qmq
from qmq.client.consuming.message import Message
from qmq.client.listening import message_handling
from qmq.client.listening.message_handling import MessageHandling
from qmq.sql import SqlDedup, connection, dedup, dedup_records, dedup_transactions

SUBJECT = "orders"
LEASE = timedelta(seconds=1)
DIED = 99
BEHIND = "behind the way"
_DATABASE = (dedup, dedup_transactions, dedup_records, connection)
_FILES = {str(Path(each.__file__ or "")) for each in (message_handling, *_DATABASE, dedup_handlers)}


@dataclass(frozen=True)
class Life:
    """`die_at` counts lines from 1; 0: never."""

    address: str
    way: str
    url: str
    group: str
    die_at: int


class Reaper:
    """Counts the lines of the way, in whichever thread or greenlet, and ends the process at one of
    them.
    """

    def __init__(self, die_at: int) -> None:
        self.die_at = die_at
        self.lines: list[str] = []
        self.is_over = False
        self._one_at_a_time = threading.Lock()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        # a lambda is a line of who has it
        if code.co_filename not in _FILES or code.co_name.startswith("<") or self.is_over:
            return None
        if event == "line":
            self.came_by(f"{Path(code.co_filename).name}:{code.co_name}")
        return self

    def came_by(self, line: str) -> None:
        with self._one_at_a_time:
            self.lines.append(line)
            if len(self.lines) == self.die_at:
                os._exit(DIED)


def _watch(reaper: Reaper, over: asyncio.Event) -> None:
    """Watch from the first line of `handle` to its last."""
    handle = MessageHandling.handle

    async def watched(self: MessageHandling, message: Message) -> None:
        threading.settrace(reaper)
        sys.settrace(reaper)
        try:
            await handle(self, message)
        finally:
            sys.settrace(None)
            reaper.is_over = True
            reaper.came_by(BEHIND)
            over.set()

    MessageHandling.handle = watched  # type: ignore[method-assign,assignment]


# --- lives ----------------------------------------------------------------------------------------


def listen(mq: qmq.Client, way: str, database: Any, group: str) -> None:
    """Register the handler that goes with a way into a database."""
    handlers = {"engine": bill_in_thread, "session": bill_in_thread, "driver": bill_by_driver}
    handler = handlers.get(way, bill)
    mq.listen(
        SUBJECT,
        handler,
        group,
        idempotent=SqlDedup(database),
        lease=LEASE,
        retry_delays=[timedelta(0)],
    )


def way_into(way: str, url: str) -> Any:
    """The engine or connection for SqlDedup: one connection at a time is enough, and best on
    SQLite.
    """
    if way == "driver":
        return lambda: _connect(url)
    make: Any = create_async_engine if way.startswith("async") else create_engine
    engine = make(url, pool_size=1, max_overflow=0)
    return {"session": sessionmaker, "async-session": async_sessionmaker}.get(
        way, lambda given: given
    )(engine)


def _connect(url: str) -> Any:
    kind, _, rest = url.partition(":")
    if kind == "sqlite":
        return sqlite3.connect(rest, timeout=30)
    if kind == "postgresql":
        return psycopg.connect(rest)
    return pymysql.connect(unix_socket=rest.split(",")[0], user="root", database=rest.split(",")[1])


async def _live(life: Life, over: asyncio.Event) -> None:
    async with qmq.connect(life.address) as mq:
        listen(mq, life.way, way_into(life.way, life.url), life.group)
        async with mq.listening(), asyncio.timeout(300):
            await over.wait()


def _live_alone(life: Life, writing: int) -> None:
    reaper, over = Reaper(life.die_at), asyncio.Event()
    _watch(reaper, over)
    asyncio.run(_live(life, over))
    os.write(writing, json.dumps(reaper.lines).encode())
    os._exit(0)


def _fork(life: Life) -> dict[str, Any]:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            _live_alone(life, writing)
        finally:
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        lines = json.loads(pipe.read() or b"[]")
    _, status = os.waitpid(pid, 0)
    return {"status": os.waitstatus_to_exitcode(status), "lines": lines}


def main() -> None:
    """Run until there is nothing more to read."""
    warnings.simplefilter("ignore")
    import_module("qmq.client.metadata.service")
    for driver in (
        "sqlite",
        "sqlite+aiosqlite",
        "postgresql+psycopg",
        "mysql+pymysql",
        "mysql+aiomysql",
    ):
        create_engine(f"{driver}://")  # imports it
    gc.freeze()  # or a fork's first collection copies all of it
    for line in sys.stdin:
        print(json.dumps(_fork(Life(**json.loads(line)))), flush=True)


if __name__ == "__main__":
    main()
