"""The outbox's operations on its table, each in a separate short transaction. No decisions.

Work through an engine is retried a few times, since a deadlock, a busy file or a restarted server is temporary. Repeating is harmless.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple, TypeVar

from tenacity import AsyncRetrying, retry_if_exception, stop_after_attempt, wait_random_exponential

from qmq.errors import QmqError
from qmq.sql.database_connection import Answer, DatabaseConnection
from qmq.sql.expressions import Statement
from qmq.sql.outbox_choice import WaitingRow
from qmq.sql.outbox_lease import LeaseRow
from qmq.sql.outbox_message import OutboxRow, RowName, error_text, from_row
from qmq.sql.outbox_runner import EngineRunner, Runner
from qmq.sql.outbox_sender import is_final
from qmq.sql.outbox_statements import MANY, OutboxStatements

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
        """Whether this is the application's only connection, on which one operation runs at a time."""

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

    # --- rows ----------------------------------------------------------------------------------------------------------

    async def find(self, message_ids: Sequence[bytes]) -> dict[bytes, Found]:
        """The rows of these messages that are committed and waiting."""
        rows = await self._rows(map(self.statements.find, chunks(message_ids)))
        return {bytes(message_id): Found(number, claimed_ms) for number, message_id, claimed_ms in rows}

    async def earliest(self, key_hashes: Sequence[int], besides: Sequence[int]) -> dict[int, int]:
        """The first waiting row of each key, not counting the given rows."""
        rows = await self._rows([self.statements.earliest(hashes, besides) for hashes in chunks(key_hashes)])
        return dict(rows)

    async def claim(self, ids: Sequence[int], grace_ms: int) -> None:
        if ids:
            await self.ask(*[self.statements.claim(chunk, grace_ms) for chunk in chunks(sorted(ids))])

    async def settle(self, sent: Sequence[RowName], failed: Iterable[tuple[RowName, QmqError]]) -> None:
        """Delete sent rows; keep failed rows waiting, or set them aside."""
        by_error: dict[tuple[str, bool], list[RowName]] = defaultdict(list)
        for row, error in failed:
            by_error[error_text(error), is_final(error)].append(row)
        # In one order, so that two processes that delete do not deadlock.
        statements = [self.statements.sent(chunk) for chunk in chunks(sorted(sent), MANY // 2)]
        for (text, is_aside), rows in by_error.items():
            statements += [self.statements.failed(chunk, text, is_final=is_aside) for chunk in chunks(sorted(rows), MANY // 2)]
        if statements:
            await self.ask(*statements)

    async def waiting(self, after: int, limit: int, besides: Sequence[str]) -> list[WaitingRow]:
        """The waiting rows after a row, in order, without some subjects."""
        return [WaitingRow(*row) for row in await self._rows([self.statements.waiting(after, limit, besides[:MANY])])]

    async def contents(self, ids: Sequence[int]) -> list[OutboxRow]:
        """The messages of these rows, in order."""
        return [from_row(row) for row in await self._rows(map(self.statements.contents, chunks(ids)))]

    # --- the lease -----------------------------------------------------------------------------------------------------

    async def view_lease(self) -> LeaseRow | None:
        """The lease; None if there is no row yet."""
        rows = await self._rows([self.statements.view_lease()])
        return LeaseRow(*rows[0]) if rows else None

    async def create_lease(self) -> None:
        """Create the lease's row. Raises what the driver raises, also if another process created it just now."""
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
