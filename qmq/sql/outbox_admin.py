"""Operations of people on an outbox: list waiting and set-aside messages, retry and drop them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from qmq.errors import InvalidArgument, NotConnected, QmqError
from qmq.sql.connection import Statement, settle
from qmq.sql.outbox_message import error_text
from qmq.sql.outbox_runner import EngineRunner, open_engine
from qmq.sql.outbox_statements import Operations, chunks
from qmq.sql.outbox_tables import ASIDE

_R = TypeVar("_R")


@dataclass(frozen=True, slots=True)
class Listed:
    """One message in an outbox. Times are milliseconds since 1970; `claimed_ms` is how long its
    sender still claims it.
    """

    id: int
    message_id: str
    subject: str
    key: bytes
    content_bytes: int
    due_ms: int | None
    create_time_ms: int
    is_aside: bool
    attempts: int
    claimed_by: str
    claimed_ms: int
    last_error: str


class OutboxAdmin:
    """One outbox table. Made by `looking_into`."""

    def __init__(self, table: Operations) -> None:
        self._table = table

    async def list(
        self, limit: int = 100, *, after: int = -1, only_aside: bool = False
    ) -> list[Listed]:
        """The messages after a row, in the order in which they are sent."""
        (answer,) = await self._table.ask(
            self._table.statements.list(after, limit, only_aside=only_aside)
        )
        return [_listed(row) for row in answer.rows]

    async def retry(self, ids: Sequence[int]) -> int:
        """Retry set-aside messages. Returns their number."""
        return await self._change(
            [self._table.statements.retry(chunk) for chunk in chunks(sorted(ids))]
        )

    async def drop(self, ids: Sequence[int]) -> int:
        """Delete messages in any state: they will never be sent. Returns their number."""
        return await self._change(
            [self._table.statements.drop(chunk) for chunk in chunks(sorted(ids))]
        )

    async def aside(self) -> Sequence[int]:
        """The ids of all set-aside messages."""
        found: list[int] = []
        while rows := await self.list(1_000, after=found[-1] if found else -1, only_aside=True):
            found += [row.id for row in rows]
        return found

    async def _change(self, statements: Sequence[Statement]) -> int:
        if not statements:
            raise InvalidArgument(
                "give message ids: they are in the first column of `qmq outbox list`"
            )
        return sum([answer.changed for answer in await self._table.ask(*statements)])


async def looking_into(url: str, table: str, work: Callable[[OutboxAdmin], Awaitable[_R]]) -> _R:
    """Work on the outbox at a database's URL. Raises InvalidArgument, InvalidName, NotConnected."""
    engine = open_engine(url)
    try:
        return await work(OutboxAdmin(Operations(EngineRunner(engine), table)))
    except QmqError:
        raise
    except Exception as failure:  # drivers raise different errors
        raise NotConnected(f"the outbox {table} cannot be read: {error_text(failure)}") from failure
    finally:
        await settle(engine.dispose())


def _listed(row: tuple[Any, ...]) -> Listed:
    number, message_id, subject, key, size, due_ms, created, state, *claim = row
    attempts, claimed_by, claimed_ms, error = claim
    return Listed(
        number,
        bytes(message_id).hex(),
        subject,
        bytes(key or b""),
        size,
        due_ms,
        created,
        state == ASIDE,
        attempts,
        claimed_by,
        max(claimed_ms, 0),
        error or "",
    )
