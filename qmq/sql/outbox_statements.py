"""All SQL statements of the outbox, as SQLAlchemy Core expressions with their values, and its
operations on the table, each in a separate short transaction. No decisions.

Each form of a statement is compiled once per table and dialect: `_insert` per number of rows,
`_claim` per number of ids.

Work through an engine is retried a few times, since a deadlock, a busy file or a restarted server
is temporary. Repeating is harmless.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple, TypeVar

from sqlalchemy import ColumnElement, TableClause, bindparam, delete, func, insert, select, update
from sqlalchemy.sql.elements import ClauseElement
from tenacity import AsyncRetrying, retry_if_exception, stop_after_attempt, wait_random_exponential

from qmq.errors import QmqError
from qmq.sql.connection import (
    Answer,
    DatabaseConnection,
    Statement,
    bytes_place,
    bytes_value,
    listed,
    named_table,
    now_ms,
    number,
    places,
    places_for,
)
from qmq.sql.dialects import check_dialect
from qmq.sql.outbox_message import OutboxRow, RowName, error_text, from_row
from qmq.sql.outbox_runner import EngineRunner, Runner
from qmq.sql.outbox_sender import is_final
from qmq.sql.outbox_tables import ASIDE, TABLE, WAITING, check_table, lease_table
from qmq.sql.outbox_turns import LeaseRow, WaitingRow

MANY: Final = 500
"""The largest number of values in one list: older SQLite accepts 999."""
_FORMS: Final = 256

_CONTENT: Final = (
    "message_id",
    "subject",
    "message_key",
    "key_hash",
    "tags",
    "headers",
    "body",
    "due_ms",
    "create_time_ms",
    "content_bytes",
)
_BYTES: Final = frozenset({"message_id", "message_key", "body"})
_STATE: Final = ("state", "attempts", "claimed_by", "claimed_until", "last_error")


@dataclass(frozen=True, slots=True)
class OutboxStatements:
    """The statements of one outbox table in one dialect."""

    dialect: str
    table: str = TABLE

    def __post_init__(self) -> None:
        object.__setattr__(self, "dialect", check_dialect(self.dialect))
        check_table(self.table)

    @property
    def rows(self) -> TableClause:
        return named_table(self.table, "id", *_CONTENT, *_STATE)

    @property
    def leases(self) -> TableClause:
        return named_table(lease_table(self.table), "name", "holder", "token", "lease_until")

    @property
    def now(self) -> ColumnElement[int]:
        return now_ms(self.dialect)

    # --- rows -------------------------------------------------------------------------------------

    def insert(self, rows: Sequence[Mapping[str, Any]], holder: str, grace_ms: int) -> Statement:
        """Insert messages, claimed for `grace_ms` by the relay that sends them after the commit."""
        values: dict[str, Any] = {"holder": holder, "grace": grace_ms}
        for index, row in enumerate(rows):
            values |= {f"{name}_{index}": row[name] for name in _CONTENT}
            values |= {f"{name}_{index}": bytes_value(self.dialect, row[name]) for name in _BYTES}
        return Statement(_insert(self, len(rows)), values)

    def find(self, message_ids: Sequence[bytes]) -> Statement:
        """(id, message id, remaining claim) of these messages that wait: they are committed."""
        values = listed("message", [bytes_value(self.dialect, each) for each in message_ids])
        return Statement(_find(self, len(values)), values)

    def stored(self, message_ids: Sequence[bytes]) -> Statement:
        """(message id) of those of these messages that have a row, in any state."""
        values = listed("message", [bytes_value(self.dialect, each) for each in message_ids])
        return Statement(_stored(self, len(values)), values)

    def earliest(self, key_hashes: Sequence[int], besides: Sequence[int]) -> Statement:
        """(key hash, id) of the first waiting message of each key, without the given rows."""
        values = listed("hash", key_hashes)
        others = listed("besides", besides)
        return Statement(_earliest(self, len(values), len(others)), values | others)

    def claim(self, ids: Sequence[int], grace_ms: int) -> Statement:
        """Claim messages from now on."""
        return Statement(
            _claim(self, places_for(len(ids))), listed("row", ids) | {"grace": grace_ms}
        )

    def sent(self, rows: Sequence[RowName]) -> Statement:
        """Delete messages that were sent."""
        return Statement(_sent(self, places_for(len(rows))), self._named(rows))

    def failed(self, rows: Sequence[RowName], error: str, *, is_final: bool) -> Statement:
        """Messages that could not be sent stay waiting and unclaimed, or are set aside."""
        return Statement(
            _failed(self, places_for(len(rows)), ASIDE if is_final else WAITING),
            self._named(rows) | {"error": error},
        )

    def _named(self, rows: Sequence[RowName]) -> dict[str, Any]:
        ids = [bytes_value(self.dialect, row.message_id) for row in rows]
        return listed("row", [row.id for row in rows]) | listed("message", ids)

    def waiting(self, after: int, limit: int, besides: Sequence[str]) -> Statement:
        """(id, subject, key hash, size, remaining claim) of rows after `after`,
        without some subjects.
        """
        others = listed("besides", besides) if besides else {}
        return Statement(_waiting(self, len(others)), others | {"after": after, "most": limit})

    def contents(self, ids: Sequence[int]) -> Statement:
        """The contents of those of these messages that wait, in order."""
        return Statement(_contents(self, places_for(len(ids))), listed("row", ids))

    # --- for people -------------------------------------------------------------------------------

    def list(self, after: int, limit: int, *, only_aside: bool) -> Statement:
        return Statement(_list(self, only_aside), {"after": after, "most": limit})

    def drop(self, ids: Sequence[int]) -> Statement:
        """Delete messages in any state."""
        return Statement(_drop(self, places_for(len(ids))), listed("row", ids))

    def retry(self, ids: Sequence[int]) -> Statement:
        """Make messages wait again that were set aside."""
        return Statement(_retry(self, places_for(len(ids))), listed("row", ids))

    # --- the lease --------------------------------------------------------------------------------

    def view_lease(self) -> Statement:
        """(holder, token, remaining time)."""
        return Statement(_leases(self).view, {"outbox": self.table})

    def create_lease(self) -> Statement:
        """Create the row of a table's lease, without a holder. The first watchdog does this."""
        return Statement(_leases(self).create, {"outbox": self.table, "nobody": ""})

    def take_lease(self, holder: str, token: int, lease_ms: int) -> Statement:
        """Compare and set: the lease has expired, and was not taken since `token` was read. Changes
        one row or none.
        """
        return Statement(
            _leases(self).take,
            {"outbox": self.table, "seen": token, "taker": holder, "lease": lease_ms},
        )

    def renew_lease(self, holder: str, token: int, lease_ms: int) -> Statement:
        """Renew the lease, even if it has expired, unless another watchdog has taken it. Changes
        one row or none.
        """
        return Statement(
            _leases(self).renew,
            {"outbox": self.table, "mine": holder, "seen": token, "lease": lease_ms},
        )

    def release_lease(self, holder: str, token: int) -> Statement:
        """Release the lease, so that another watchdog can take it immediately."""
        return Statement(
            _leases(self).release, {"outbox": self.table, "mine": holder, "seen": token}
        )


# --- forms ----------------------------------------------------------------------------------------


@lru_cache(maxsize=_FORMS)
def _insert(statements: OutboxStatements, count: int) -> ClauseElement:
    def place(name: str, index: int) -> ColumnElement[Any]:
        return (
            bytes_place(statements.dialect, f"{name}_{index}")
            if name in _BYTES
            else bindparam(f"{name}_{index}")
        )

    new = {
        "state": number(WAITING),
        "attempts": number(0),
        "claimed_by": bindparam("holder"),
        "claimed_until": statements.now + bindparam("grace"),
    }
    return insert(statements.rows).values(
        [{name: place(name, index) for name in _CONTENT} | new for index in range(count)]
    )


@lru_cache(maxsize=_FORMS)
def _find(statements: OutboxStatements, count: int) -> ClauseElement:
    rows = statements.rows.c
    ids = [bytes_place(statements.dialect, f"message_{index}") for index in range(count)]
    return select(rows.id, rows.message_id, rows.claimed_until - statements.now).where(
        rows.state == number(WAITING), rows.message_id.in_(ids)
    )


@lru_cache(maxsize=_FORMS)
def _stored(statements: OutboxStatements, count: int) -> ClauseElement:
    rows = statements.rows.c
    return select(rows.message_id).where(
        rows.message_id.in_(
            [bytes_place(statements.dialect, f"message_{at}") for at in range(count)]
        )
    )


@lru_cache(maxsize=_FORMS)
def _earliest(statements: OutboxStatements, hashes: int, besides: int) -> ClauseElement:
    rows = statements.rows.c
    found = select(rows.key_hash, func.min(rows.id)).where(
        rows.key_hash.in_(places("hash", hashes)), rows.state == number(WAITING)
    )
    return found.where(rows.id.not_in(places("besides", besides))).group_by(rows.key_hash)


@lru_cache(maxsize=_FORMS)
def _claim(statements: OutboxStatements, count: int) -> ClauseElement:
    rows = statements.rows
    return (
        update(rows)
        .values(claimed_until=statements.now + bindparam("grace"))
        .where(rows.c.id.in_(places("row", count)))
    )


def _are_named(
    rows: TableClause, dialect: str, count: int
) -> tuple[ColumnElement[bool], ColumnElement[bool]]:
    ids = [bytes_place(dialect, f"message_{index}") for index in range(count)]
    return rows.c.id.in_(places("row", count)), rows.c.message_id.in_(ids)


@lru_cache(maxsize=_FORMS)
def _sent(statements: OutboxStatements, count: int) -> ClauseElement:
    rows = statements.rows
    return delete(rows).where(*_are_named(rows, statements.dialect, count))


@lru_cache(maxsize=_FORMS)
def _drop(statements: OutboxStatements, count: int) -> ClauseElement:
    rows = statements.rows
    return delete(rows).where(rows.c.id.in_(places("row", count)))


@lru_cache(maxsize=_FORMS)
def _failed(statements: OutboxStatements, count: int, state: int) -> ClauseElement:
    rows = statements.rows
    changed = update(rows).values(
        attempts=rows.c.attempts + number(1),
        claimed_until=number(0),
        last_error=bindparam("error"),
        state=number(state),
    )
    return changed.where(*_are_named(rows, statements.dialect, count))


@lru_cache(maxsize=_FORMS)
def _waiting(statements: OutboxStatements, besides: int) -> ClauseElement:
    rows = statements.rows.c
    found = select(
        rows.id,
        rows.subject,
        rows.key_hash,
        rows.content_bytes,
        rows.claimed_until - statements.now,
    )
    found = found.where(rows.state == number(WAITING), rows.id > bindparam("after"))
    if besides:
        found = found.where(rows.subject.not_in(places("besides", besides)))
    return found.order_by(rows.id).limit(bindparam("most"))


@lru_cache(maxsize=_FORMS)
def _contents(statements: OutboxStatements, count: int) -> ClauseElement:
    rows = statements.rows.c
    found = select(rows.id, *[rows[name] for name in _CONTENT]).where(rows.state == number(WAITING))
    return found.where(rows.id.in_(places("row", count))).order_by(rows.id)


@lru_cache(maxsize=_FORMS)
def _list(statements: OutboxStatements, only_aside: bool) -> ClauseElement:
    rows = statements.rows.c
    shown = (
        "id",
        "message_id",
        "subject",
        "message_key",
        "content_bytes",
        "due_ms",
        "create_time_ms",
        "state",
        "attempts",
        "claimed_by",
    )
    found = select(
        *[rows[name] for name in shown], rows.claimed_until - statements.now, rows.last_error
    ).where(rows.id > bindparam("after"))
    if only_aside:
        found = found.where(rows.state == number(ASIDE))
    return found.order_by(rows.id).limit(bindparam("most"))


@lru_cache(maxsize=_FORMS)
def _retry(statements: OutboxStatements, count: int) -> ClauseElement:
    rows = statements.rows
    changed = update(rows).values(state=number(WAITING), claimed_until=number(0))
    return changed.where(rows.c.state == number(ASIDE), rows.c.id.in_(places("row", count)))


class _Leases(NamedTuple):
    view: ClauseElement
    create: ClauseElement
    take: ClauseElement
    renew: ClauseElement
    release: ClauseElement


@lru_cache(maxsize=_FORMS)
def _leases(statements: OutboxStatements) -> _Leases:
    table = statements.leases
    leases = table.c
    until = statements.now + bindparam("lease")
    is_ours = leases.name == bindparam("outbox")
    seen = update(table).where(is_ours, leases.token == bindparam("seen"))
    mine = seen.where(
        leases.holder == bindparam("mine")
    )  # A database that is put back gives the same token to another holder.
    nobody = {
        "name": bindparam("outbox"),
        "holder": bindparam("nobody"),
        "token": number(0),
        "lease_until": number(0),
    }
    return _Leases(
        view=select(leases.holder, leases.token, leases.lease_until - statements.now).where(
            is_ours
        ),
        create=insert(table).values(nobody),
        take=seen.where(leases.lease_until <= statements.now).values(
            holder=bindparam("taker"), token=leases.token + number(1), lease_until=until
        ),
        renew=mine.values(lease_until=until),
        release=mine.values(lease_until=number(0)),
    )


_T = TypeVar("_T")
TRIES: Final = 4


class Found(NamedTuple):
    """A committed message: its row, and how long it is still claimed, in milliseconds."""

    id: int
    claimed_ms: int


class Operations:
    """The operations on one outbox table."""

    def __init__(self, runner: Runner, table: str) -> None:
        self._runner = runner
        self.statements = OutboxStatements(runner.dialect, table)
        self.is_lent = not isinstance(runner, EngineRunner)
        """Whether this is the application's only connection,
        on which one operation runs at a time.
        """

    async def ask(self, *statements: Statement) -> list[Answer]:
        """Run statements in one transaction. Raises what the driver raises."""

        async def work(connection: DatabaseConnection) -> list[Answer]:
            return [await connection.execute(statement) for statement in statements]

        if self.is_lent:
            return await self._runner.run(work)
        async for attempt in AsyncRetrying(
            stop=stop_after_attempt(TRIES),
            wait=wait_random_exponential(0.05, 1.0),
            reraise=True,
            retry=retry_if_exception(_is_the_databases),
        ):
            with attempt:
                return await self._runner.run(work)
        raise AssertionError("it answers, or it raises")

    async def _rows(self, statements: Iterable[Statement]) -> list[tuple[Any, ...]]:
        return [row for answer in await self.ask(*statements) for row in answer.rows]

    # --- rows -------------------------------------------------------------------------------------

    async def find(self, message_ids: Sequence[bytes]) -> dict[bytes, Found]:
        """The rows of these messages that are committed and waiting."""
        rows = await self._rows(map(self.statements.find, chunks(message_ids)))
        return {
            bytes(message_id): Found(number, claimed_ms) for number, message_id, claimed_ms in rows
        }

    async def earliest(self, key_hashes: Sequence[int], besides: Sequence[int]) -> dict[int, int]:
        """The first waiting row of each key, not counting the given rows."""
        rows = await self._rows(
            [self.statements.earliest(hashes, besides) for hashes in chunks(key_hashes)]
        )
        return dict(rows)

    async def claim(self, ids: Sequence[int], grace_ms: int) -> None:
        if ids:
            await self.ask(
                *[self.statements.claim(chunk, grace_ms) for chunk in chunks(sorted(ids))]
            )

    async def settle(
        self, sent: Sequence[RowName], failed: Iterable[tuple[RowName, QmqError]]
    ) -> None:
        """Delete sent rows; keep failed rows waiting, or set them aside."""
        by_error: dict[tuple[str, bool], list[RowName]] = defaultdict(list)
        for row, error in failed:
            by_error[error_text(error), is_final(error)].append(row)
        # In one order, so that two processes that delete do not deadlock.
        statements = [self.statements.sent(chunk) for chunk in chunks(sorted(sent), MANY // 2)]
        for (text, is_aside), rows in by_error.items():
            statements += [
                self.statements.failed(chunk, text, is_final=is_aside)
                for chunk in chunks(sorted(rows), MANY // 2)
            ]
        if statements:
            await self.ask(*statements)

    async def waiting(self, after: int, limit: int, besides: Sequence[str]) -> list[WaitingRow]:
        """The waiting rows after a row, in order, without some subjects."""
        return [
            WaitingRow(*row)
            for row in await self._rows([self.statements.waiting(after, limit, besides[:MANY])])
        ]

    async def contents(self, ids: Sequence[int]) -> list[OutboxRow]:
        """The messages of these rows, in order."""
        return [
            from_row(row) for row in await self._rows(map(self.statements.contents, chunks(ids)))
        ]

    # --- the lease --------------------------------------------------------------------------------

    async def view_lease(self) -> LeaseRow | None:
        """The lease; None if there is no row yet."""
        rows = await self._rows([self.statements.view_lease()])
        return LeaseRow(*rows[0]) if rows else None

    async def create_lease(self) -> None:
        """Create the lease's row. Raises what the driver raises, also if another process created it
        just now.
        """
        await self.ask(self.statements.create_lease())

    async def changed(self, statement: Statement) -> bool:
        """Run a statement once. Returns whether it changed a row."""

        async def work(connection: DatabaseConnection) -> bool:
            return (await connection.execute(statement)).changed > 0

        return await self._runner.run(work)


def _is_the_databases(failure: BaseException) -> bool:
    """Whether the exception came from the database: not a cancellation and not an error of QMQ."""
    return isinstance(failure, Exception) and not isinstance(failure, QmqError)


def chunks(items: Sequence[_T], most: int = MANY) -> Iterator[Sequence[_T]]:
    """Chunks of ids, each small enough for one statement."""
    return (items[begin : begin + most] for begin in range(0, len(items), most))
