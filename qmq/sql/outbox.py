"""The outbox: messages that are sent if, and only if, the application's own database transaction commits (docs/OUTBOX.md).

    async with engine.begin() as connection:
        await connection.execute(...)                                  # the business
        async with mq.outbox(connection) as box:
            box.send("order.created", body, key="42")                  # inserted at the block's end, through the same connection
    # committed here: sent at once; and if this process dies before that, by a watchdog

Rules:
* A message's id is fixed by `send`, and is the same however often the message is sent.
* The messages of the block are inserted when the block ends; if it raises, none are.
* With an engine the outbox makes the transaction: `box.connection` is for the business, and the block's end commits.
* SQLAlchemy reports the commit. A plain driver does not: call `await box.committed()` after the commit, or a watchdog sends seconds later.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from datetime import datetime, timedelta
from types import TracebackType
from typing import Any, Final, TypeVar

from sqlalchemy import text

from qmq import limits
from qmq.client.interceptors import Chain, Outgoing, outgoing
from qmq.errors import InvalidArgument
from qmq.model import MessageId
from qmq.sql.database_connection import DatabaseConnection
from qmq.sql.expressions import Statement
from qmq.sql.outbox_message import MessageIds, OutboxMessage, holder_text, new_message
from qmq.sql.outbox_operations import Operations
from qmq.sql.outbox_relay import Relay, TransactionMessages
from qmq.sql.outbox_row_sender import OutboxSender, Sends
from qmq.sql.outbox_runner import EngineRunner, open_engine
from qmq.sql.outbox_statements import OutboxStatements
from qmq.sql.outbox_tables import TABLE, check_table, migration, statements
from qmq.sql.outbox_target import Target, target_of

__all__ = ["Outbox", "Outboxes", "create_tables", "create_tables_async", "migration", "open_engine"]

INSERT_ROWS: Final = 50
INSERT_BYTES: Final = limits.MIB

_R = TypeVar("_R")


class Outboxes:
    """All outboxes of one client: makes ids, and has a relay for each database. Create it in the client's event loop."""

    def __init__(self, sender: Sends, producer_id: int, chain: Chain, now_ns: Callable[[], int]) -> None:
        self.new_id = MessageIds(producer_id)
        self.sender = sender
        self.holder = holder_text(f"{socket.gethostname()}:{os.getpid()}")
        self.chain, self.now_ns = chain, now_ns
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        self._relays: dict[tuple[object, str, int], Relay] = {}

    def outbox(self, target: Any, *, table: str, grace: timedelta) -> Outbox:
        """Make an outbox. `grace` is how long a new row belongs to its sender before a watchdog takes it."""
        return Outbox(self, target_of(target), check_table(table), grace_ms(grace))

    def relay(self, target: Target, table: str, grace: int) -> Relay:
        """The relay of the target's database."""
        database, runner = target.runner()
        found = self._relays.get((database, table, grace))
        if found is None:
            rows = OutboxSender(Operations(runner, table), self.sender, grace)
            found = self._relays[database, table, grace] = Relay(rows, self._loop, self._thread)
        return found

    async def close(self) -> None:
        """Send committed messages; the watchdog sends those that remain."""
        for relay in self._relays.values():
            await relay.close()


class Outbox:
    """An outbox in one transaction; `Client.outbox` creates it."""

    def __init__(self, owner: Outboxes, target: Target, table: str, grace: int) -> None:
        self._owner, self._target, self._table, self._grace_ms = owner, target, table, grace
        self._messages: list[OutboxMessage] = []
        self._told: list[Outgoing] = []
        self._state = "new"
        self._committed: TransactionMessages | None = None
        self._is_inserted = False

    @property
    def connection(self) -> Any:
        """The application's connection; with an engine, the connection whose transaction the outbox commits at the block's end."""
        return self._target.connection

    @property
    def sender(self) -> Sends:
        """The client's sender, which works in its event loop."""
        return self._owner.sender

    def send(
        self,
        subject: str,
        body: bytes,
        *,
        key: str | bytes | None = None,
        tags: Iterable[str] | None = None,
        headers: Mapping[str, str | bytes] | None = None,
        delay: timedelta | None = None,
        at: datetime | None = None,
    ) -> MessageId:
        """Send a message after the commit. Returns its id. On an ordered subject it needs a key, and is sent after earlier messages of the
        key.

        `delay` counts from now; `at` is a datetime with a time zone. Raises InvalidName, InvalidArgument, MessageTooLarge, DelayTooLong.
        """
        if self._state != "open":
            raise InvalidArgument("send within the outbox's block: async with mq.outbox(...) as box: box.send(...)")
        owner = self._owner
        number = owner.new_id()
        message = new_message(number, owner.now_ns(), subject, body, key=key, tags=tags, headers=headers, delay=delay, at=at)
        if owner.chain:
            is_delayed = message.due_ms is not None
            told = outgoing(subject, (key,), (message.tags,), (message.headers,), bodies=(message.body,), is_delayed=is_delayed)
            owner.chain.sending(told)
            self._told.append(told)
            message = replace(message, headers=told.headers[0])
        self._messages.append(message)
        return number

    # --- the block -----------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Outbox:
        if self._state != "new":
            raise InvalidArgument("an outbox can be used only once: make a new one with mq.outbox(...)")
        await self._target.open()
        self._state = "open"
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._state = "closed"
        try:
            try:
                if error is None:
                    await self._insert()
            except BaseException as failure:
                await self._target.close(type(failure), failure, failure.__traceback__)
                raise
            await self._target.close(kind, error, trace)
        except BaseException as failure:
            self._tell(failure)
            raise
        self._tell(error)

    async def _insert(self) -> None:
        """Insert through the target's connection, in its transaction."""
        if not self._messages:
            return
        connection = await self._target.database()
        statements = OutboxStatements(connection.dialect, self._table)
        for rows in _chunks([message.row() for message in self._messages]):
            await connection.execute(statements.insert(rows, self._owner.holder, self._grace_ms))
        self._is_inserted = True
        if self._target.tells:
            relay = self._owner.relay(self._target, self._table, self._grace_ms)
            committed = TransactionMessages(self._messages)

            def committing(is_over: Callable[[], bool]) -> None:
                self._committed = committed
                relay.committing(committed, is_over)

            def rolled_back() -> None:
                self._committed = committed
                committed.forget()

            self._target.when(committing, rolled_back)

    def _tell(self, error: BaseException | None) -> None:
        """Tell interceptors whether their messages are in the outbox."""
        for told in self._told:
            if error is None:
                self._owner.chain.sent(told, ())
            else:
                self._owner.chain.failed(
                    told, error if isinstance(error, Exception) else InvalidArgument("the outbox's block has ended: make a new outbox")
                )

    # --- after the commit ----------------------------------------------------------------------------------------------

    async def committed(self) -> bool:
        """After the transaction: wait until its messages are sent. Returns False if some were not sent: rolled back, or left to a watchdog.

        With a plain driver's connection this call sends them, and uses the connection for short transactions; otherwise they are sent
        without it. Raises InvalidArgument if the transaction is still open; what the driver raises.
        """
        return await asyncio.wrap_future(await self.outcome(self.sender))

    async def outcome(self, sender: Sends) -> Future[bool]:
        """The result for `committed`. With a plain connection it is decided here, and `sender` sends; otherwise the relay decides it."""
        if not self._is_inserted:
            return _decided(self._state == "closed" and not self._messages)
        if self._target.tells:
            if self._committed is None and self._target.is_in_transaction:
                raise _still_open()
            # none: the connection broke, and its transaction ended unnoticed
            return _decided(False) if self._committed is None else self._committed.future
        if self._target.is_in_transaction:
            raise _still_open()
        rows = OutboxSender(Operations(self._target.runner()[1], self._table), sender, self._grace_ms)
        subjects: dict[str, list[OutboxMessage]] = {}
        for message in self._messages:
            subjects.setdefault(message.subject, []).append(message)
        sent = sum([len((await rows.send_committed(subject, messages)).sent) for subject, messages in subjects.items()])
        return _decided(sent == len(self._messages))


def _chunks(rows: Sequence[Mapping[str, Any]]) -> Iterable[list[Mapping[str, Any]]]:
    """The rows of one INSERT."""
    chunk: list[Mapping[str, Any]] = []
    size = 0
    for row in rows:
        if chunk and (len(chunk) >= INSERT_ROWS or size + row["content_bytes"] > INSERT_BYTES):
            yield chunk
            chunk, size = [], 0
        chunk.append(row)
        size += row["content_bytes"]
    if chunk:
        yield chunk


def grace_ms(grace: timedelta) -> int:
    """The grace in milliseconds. Raises InvalidArgument."""
    if not isinstance(grace, timedelta) or not timedelta(seconds=1) <= grace <= timedelta(hours=1):
        raise InvalidArgument(f"grace is a timedelta of a second to an hour, not {grace!r}")
    return grace // timedelta(milliseconds=1)


def _decided(is_sent: bool) -> Future[bool]:
    future: Future[bool] = Future()
    future.set_result(is_sent)
    return future


def _still_open() -> InvalidArgument:
    return InvalidArgument("the transaction is still open: commit it (or roll back) first, then call committed()")


def create_tables(engine: Any, table: str = TABLE) -> None:
    """Create the tables of an outbox through an `Engine`, for tests and small programs; harmless to call again.

    Larger applications copy the output of `qmq outbox migration` into their migrations. Raises InvalidArgument, InvalidName; what
    SQLAlchemy raises.
    """
    runner = EngineRunner(engine)
    runner.run_here(_creating(runner.dialect, table))


async def create_tables_async(engine: Any, table: str = TABLE) -> None:
    """Create the tables through an `AsyncEngine`."""
    runner = EngineRunner(engine)
    await runner.run(_creating(runner.dialect, table))


def _creating(dialect: str, table: str) -> Callable[[DatabaseConnection], Coroutine[Any, Any, None]]:
    async def work(connection: DatabaseConnection) -> None:
        for each in statements(dialect, table):
            await connection.execute(Statement(text(each), {}))

    return work
