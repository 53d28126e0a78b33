"""The outbox: messages that are sent if, and only if, the application's own database transaction
commits (docs/OUTBOX.md).

    async with engine.begin() as connection:
        await connection.execute(...)                                  # the business
        async with mq.outbox(connection) as box:
            # inserted at the block's end, through the same connection
            box.send("order.created", body, key="42")
    # committed here: sent at once; and if this process dies before that, by a watchdog

Rules:
* A message's id is fixed by `send`, and is the same however often the message is sent.
* The messages of the block are inserted when the block ends; if it raises, none are.
* With an engine the outbox makes the transaction: `box.connection` is for the business, and the
  block's end commits.
* SQLAlchemy reports the commit. A plain driver does not: call `await box.committed()` after the
  commit, or a watchdog sends seconds later.

An application passes its own connection or session, or an engine:

    lent by the application (its transaction)     AlchemyTarget (Connection, Session, and async),
                                                  PlainTarget (a driver's connection)
    opened by the outbox (a transaction of ours)  EngineTarget (Engine, AsyncEngine)

Rules:
* The outbox never begins, commits or rolls back a lent transaction. An autocommitting connection
  without a transaction is refused: there a message would be committed even if the rest is rolled
  back.
* `tells` is whether the commit is reported. A plain driver does not report it: the application
  calls `committed()`.

SQLAlchemy's events report, for each engine, when a connection's outermost transaction is about to
be committed or rolled back.

    on_end(connection, committing, rolled_back)   one of the two is called, once, in the thread
                                                  that ends the transaction

Savepoints are not reported, and need not be: the outbox reads in its table which messages were
committed. `committing` is called just *before* the commit, with a function that says whether the
transaction has ended. Each engine keeps one listener for its life, since a listener must not be
removed while its event is being handled.

In the blocking client (`BlockingOutbox`), the application's thread works on the sync connection,
and the client's event loop sends.
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
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, Engine, event, text

from qmq import limits
from qmq.client.interceptors import Chain, Outgoing, outgoing
from qmq.client.producing.delayed import due_of
from qmq.errors import InvalidArgument
from qmq.model import MessageId
from qmq.sql.connection import (
    AlchemyConnection,
    DatabaseConnection,
    DriverConnection,
    Statement,
    finish,
    settle,
)
from qmq.sql.dialects import packages
from qmq.sql.outbox_message import MessageIds, OutboxMessage, holder_text, new_message
from qmq.sql.outbox_relay import OutboxSender, Relay, TransactionMessages
from qmq.sql.outbox_runner import EngineRunner, LentRunner, Runner, check_engine, open_engine
from qmq.sql.outbox_sender import Fates, Sender
from qmq.sql.outbox_statements import Operations, OutboxStatements
from qmq.sql.outbox_tables import TABLE, check_table, migration, statements

IsOver = Callable[[], bool]


class Target:
    tells = True

    @property
    def connection(self) -> Any:
        """The connection for the application's own statements."""
        raise NotImplementedError

    async def open(self) -> None: ...

    async def close(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """The block has ended."""

    async def database(self) -> DatabaseConnection:
        """The connection through which messages are inserted. Raises InvalidArgument."""
        raise NotImplementedError

    def runner(self) -> tuple[object, Runner]:
        """A runner of the outbox's own transactions on the same database, and a key that identifies
        the database.
        """
        raise NotImplementedError

    def on_end(self, committing: Callable[[IsOver], None], rolled_back: Callable[[], None]) -> None:
        """Have one of the two functions called when the transaction ends."""
        raise NotImplementedError

    @property
    def is_in_transaction(self) -> bool:
        """Whether the application's transaction is still open."""
        raise NotImplementedError


class AlchemyTarget(Target):
    """A SQLAlchemy `Connection` or `AsyncConnection`, or the one that a session uses."""

    def __init__(self, given: Any) -> None:
        self._given = given
        self._connection: Any = None

    @property
    def connection(self) -> Any:
        return self._given

    async def database(self) -> DatabaseConnection:
        is_connection = hasattr(self._given, "get_transaction") and hasattr(self._given, "dialect")
        self._connection = self._given if is_connection else await settle(self._given.connection())
        if self._connection.get_transaction() is None:
            await settle(
                self._connection.exec_driver_sql("SELECT 1")
            )  # SQLAlchemy begins a transaction with the first statement
        if autocommits(await self._raw()):
            raise _autocommit()
        return AlchemyConnection(self._connection)

    async def _raw(self) -> Any:
        sync = self._sync
        if sync is self._connection:
            return sync.connection.driver_connection
        return (await self._connection.get_raw_connection()).driver_connection

    @property
    def _sync(self) -> Any:
        return getattr(self._connection, "sync_connection", self._connection)

    def runner(self) -> tuple[object, Runner]:
        """See `Target`. Engines that share a pool reach one database."""
        return self._sync.engine.pool, EngineRunner(self._connection.engine)

    def on_end(self, committing: Callable[[IsOver], None], rolled_back: Callable[[], None]) -> None:

        on_end(self._sync, committing, rolled_back)

    @property
    def is_in_transaction(self) -> bool:
        sync = self._sync
        return sync is not None and not sync.closed and bool(sync.in_transaction())


class EngineTarget(AlchemyTarget):
    """A transaction of the outbox's own:
    committed when the block ends, rolled back if the block raises.
    """

    def __init__(self, engine: Any) -> None:
        super().__init__(None)
        self._engine = check_engine(engine)
        self._is_async = hasattr(engine, "sync_engine")
        self._context: Any = None

    async def open(self) -> None:
        self._context = self._engine.begin()
        self._given = (
            await self._context.__aenter__() if self._is_async else self._context.__enter__()
        )

    async def close(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        leave = self._context.__aexit__ if self._is_async else self._context.__exit__
        await settle(leave(kind, error, trace))


class PlainTarget(Target):
    """A plain driver's connection."""

    tells = False

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._runner = LentRunner(connection)

    @property
    def connection(self) -> Any:
        return self._connection

    async def database(self) -> DatabaseConnection:
        if autocommits(self._connection):
            raise _autocommit()
        return DriverConnection(self._connection)

    def runner(self) -> tuple[object, Runner]:
        return self._connection, self._runner

    @property
    def is_in_transaction(self) -> bool:
        return in_transaction(self._connection)


def target_of(given: Any) -> Target:
    """The target for the application's handle. Raises InvalidArgument."""
    if isinstance(given, str):
        raise InvalidArgument("an outbox needs a connection, a session or an engine, not a URL")
    if "sqlalchemy" not in packages(given):
        return PlainTarget(given)
    if hasattr(given, "begin") and hasattr(given, "dispose"):
        return EngineTarget(given)
    if not hasattr(type(given), "connection"):
        raise InvalidArgument(
            f"an outbox needs a connection, a session or an engine, not a {type(given).__name__}"
        )
    return AlchemyTarget(given)


def in_transaction(raw: Any) -> bool:
    """Whether a transaction is open on a plain driver's connection, as far as the driver knows."""
    if hasattr(raw, "in_transaction"):  # sqlite3, aiosqlite
        return bool(raw.in_transaction)
    if hasattr(raw, "get_transaction_status"):  # aiomysql, psycopg2
        return bool(raw.get_transaction_status())
    if hasattr(raw, "server_status"):  # PyMySQL
        return bool(raw.server_status & 1)
    status = getattr(getattr(raw, "info", None), "transaction_status", 0)  # psycopg
    return bool(status)


def autocommits(raw: Any) -> bool:
    """Whether a plain driver's connection would commit the next statement immediately."""
    if in_transaction(raw):
        return False
    if hasattr(raw, "in_transaction"):
        return (
            raw.isolation_level is None or getattr(raw, "autocommit", None) is True
        )  # the latter from Python 3.12 on
    if hasattr(raw, "get_autocommit"):
        return bool(raw.get_autocommit())
    return getattr(raw, "autocommit", False) is True


def _autocommit() -> InvalidArgument:
    return InvalidArgument(
        "the connection commits each statement immediately, so a message would be sent even "
        "after a rollback: begin a transaction first"
    )


__all__ = ["Outbox", "Outboxes", "create_tables", "create_tables_async", "migration", "open_engine"]

INSERT_ROWS: Final = 50
INSERT_BYTES: Final = limits.MIB


class Outboxes:
    """All outboxes of one client: makes ids, and has a relay for each database. Create it in the
    client's event loop.
    """

    def __init__(
        self, sender: Sender, producer_id: int, chain: Chain, now_ns: Callable[[], int]
    ) -> None:
        self.new_id = MessageIds(producer_id)
        self.sender = sender
        self.holder = holder_text(f"{socket.gethostname()}:{os.getpid()}")
        self.chain, self.now_ns = chain, now_ns
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        self._relays: dict[tuple[object, str, int], Relay] = {}

    def outbox(self, target: Any, *, table: str, grace: timedelta) -> Outbox:
        """Make an outbox. `grace` is how long a new row belongs to its sender before a watchdog
        takes it.
        """
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
        """The application's connection; with an engine, the connection whose transaction the outbox
        commits at the block's end.
        """
        return self._target.connection

    @property
    def sender(self) -> Sender:
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
        """Send a message after the commit. Returns its id. On an ordered subject it needs a key,
        and is sent after earlier messages of the key.

        `delay` counts from now; `at` is a datetime with a time zone. Raises InvalidName,
        InvalidArgument, MessageTooLarge, DelayTooLong.
        """
        if self._state != "open":
            raise InvalidArgument(
                "send within the outbox's block: async with mq.outbox(...) as box: box.send(...)"
            )
        owner = self._owner
        number, now_ns = owner.new_id(), owner.now_ns()
        due_ms = None if delay is None and at is None else due_of(delay, at, now_ns)
        message = new_message(
            number, now_ns, subject, body, key=key, tags=tags, headers=headers, due_ms=due_ms
        )
        if owner.chain:
            is_delayed = message.due_ms is not None
            told = outgoing(
                subject,
                (key,),
                (message.tags,),
                (message.headers,),
                bodies=(message.body,),
                is_delayed=is_delayed,
            )
            owner.chain.sending(told)
            self._told.append(told)
            message = replace(message, headers=told.headers[0])
        self._messages.append(message)
        return number

    # --- the block --------------------------------------------------------------------------------

    async def __aenter__(self) -> Outbox:
        if self._state != "new":
            raise InvalidArgument(
                "an outbox can be used only once: make a new one with mq.outbox(...)"
            )
        await self._target.open()
        self._state = "open"
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
            self._report_outcome(failure)
            raise
        self._report_outcome(error)

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

            self._target.on_end(committing, rolled_back)

    def _report_outcome(self, error: BaseException | None) -> None:
        """Tell interceptors whether their messages are in the outbox."""
        for told in self._told:
            if error is None:
                self._owner.chain.sent(told, ())
            else:
                self._owner.chain.failed(
                    told,
                    error
                    if isinstance(error, Exception)
                    else InvalidArgument("the outbox's block has ended: make a new outbox"),
                )

    # --- after the commit -------------------------------------------------------------------------

    async def committed(self) -> bool:
        """After the transaction: wait until its messages are sent. Returns False if some were not
        sent: rolled back, or left to a watchdog.

        With a plain driver's connection this call sends them, and uses the connection for short
        transactions; otherwise they are sent without it. Raises InvalidArgument if the transaction
        is still open; what the driver raises.
        """
        return await asyncio.wrap_future(await self.outcome(self.sender))

    async def outcome(self, sender: Sender) -> Future[bool]:
        """The result for `committed`. With a plain connection it is decided here, and `sender`
        sends; otherwise the relay decides it.
        """
        if not self._is_inserted:
            return _decided(self._state == "closed" and not self._messages)
        if self._target.tells:
            if self._committed is None and self._target.is_in_transaction:
                raise _still_open()
            # none: the connection broke, and its transaction ended unnoticed
            return _decided(False) if self._committed is None else self._committed.future
        if self._target.is_in_transaction:
            raise _still_open()
        rows = OutboxSender(
            Operations(self._target.runner()[1], self._table), sender, self._grace_ms
        )
        subjects: dict[str, list[OutboxMessage]] = {}
        for message in self._messages:
            subjects.setdefault(message.subject, []).append(message)
        sent = sum(
            [
                len((await rows.send_committed(subject, messages)).sent)
                for subject, messages in subjects.items()
            ]
        )
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
    return InvalidArgument(
        "the transaction is still open: commit it (or roll back) first, then call committed()"
    )


def create_tables(engine: Any, table: str = TABLE) -> None:
    """Create the tables of an outbox through an `Engine`, for tests and small programs; harmless to
    call again.

    Larger applications copy the output of `qmq outbox migration` into their migrations. Raises
    InvalidArgument, InvalidName; what SQLAlchemy raises.
    """
    runner = EngineRunner(engine)
    runner.run_here(_creating(runner.dialect, table))


async def create_tables_async(engine: Any, table: str = TABLE) -> None:
    """Create the tables through an `AsyncEngine`."""
    runner = EngineRunner(engine)
    await runner.run(_creating(runner.dialect, table))


def _creating(
    dialect: str, table: str
) -> Callable[[DatabaseConnection], Coroutine[Any, Any, None]]:
    async def work(connection: DatabaseConnection) -> None:
        for each in statements(dialect, table):
            await connection.execute(Statement(text(each), {}))

    return work


_LISTENING: Final[WeakKeyDictionary[Engine, _Commits]] = WeakKeyDictionary()
_LOCK: Final = threading.Lock()


class _Waiting(NamedTuple):
    committing: Callable[[Callable[[], bool]], None]
    rolled_back: Callable[[], None]


class _Commits:
    """The callbacks for the transactions of one engine's connections."""

    def __init__(self, engine: Engine) -> None:
        self._waiting: WeakKeyDictionary[Connection, list[_Waiting]] = WeakKeyDictionary()
        for name, told in (
            ("commit", self._committing),
            ("commit_twophase", self._committing),
            ("rollback", self._rolled_back),
            ("rollback_twophase", self._rolled_back),
        ):
            event.listen(engine, name, told)

    def add(self, connection: Connection, waiting: _Waiting) -> None:
        self._waiting.setdefault(connection, []).append(waiting)

    def _committing(self, connection: Connection, *_: Any) -> None:
        transaction = connection.get_transaction()
        for each in self._waiting.pop(connection, ()):
            each.committing(lambda: transaction is None or not transaction.is_active)

    def _rolled_back(self, connection: Connection, *_: Any) -> None:
        for each in self._waiting.pop(connection, ()):
            each.rolled_back()


def on_end(
    connection: Connection,
    committing: Callable[[Callable[[], bool]], None],
    rolled_back: Callable[[], None],
) -> None:
    """Call one of the two functions when the connection's transaction ends."""
    engine = connection.engine
    with _LOCK:
        commits = _LISTENING.get(engine)
        if commits is None:
            commits = _LISTENING[engine] = _Commits(engine)
    commits.add(connection, _Waiting(committing, rolled_back))


class BlockingOutbox:
    """An outbox for the blocking client, on sync connections, sessions and engines. `Outbox`
    describes the methods.
    """

    def __init__(self, box: Outbox, run: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
        self._box, self._run = box, run
        self._sender = _InLoop(box.sender, run)
        self.send = box.send

    @property
    def connection(self) -> Any:
        return self._box.connection

    def __enter__(self) -> BlockingOutbox:
        finish(self._box.__aenter__())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        finish(self._box.__aexit__(kind, error, trace))

    def committed(self) -> bool:
        outcome = finish(self._box.outcome(self._sender))

        async def wait() -> bool:
            return await asyncio.wrap_future(outcome)

        return bool(self._run(wait()))


class _InLoop(Sender):
    """Sends in the client's event loop, while the calling thread waits."""

    def __init__(self, sender: Sender, run: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
        self._sender, self._run = sender, run

    async def is_ordered(self, subject: str) -> bool:
        async def ask() -> bool:
            return await self._sender.is_ordered(subject)

        return bool(self._run(ask()))

    async def send(self, subject: str, messages: Sequence[OutboxMessage]) -> Fates:
        async def say() -> Fates:
            return await self._sender.send(subject, messages)

        fates: Fates = self._run(say())
        return fates
