"""The sender of an outbox table: sends the rows of a subject, deletes the sent ones, and records the errors of the others.

    relay, right after a commit           ── send_committed ──▶ look what is committed, hold back, claim ──┐
    committed() of a plain connection     ── send_committed ──▶                                            ├──▶ send, delete or note
    watchdog, what the others left      ── send_left ───────▶ read the rows                            ──┘

Rules:
* The table says which messages are committed: rows of a rolled back transaction or savepoint do not exist, and are not sent.
* A message of an ordered subject is held back while an earlier row of its key waits that is not sent with it.
* Committed rows stay claimed while they are being sent, so that no watchdog takes them. The watchdog has its lease instead.
* A crash between sending and deleting leaves a row that is sent again, with the same id.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from qmq.errors import ClientClosed, QmqError
from qmq.sql.outbox_message import OutboxMessage, RowName, error_text
from qmq.sql.outbox_sender import Fates
from qmq.sql.outbox_statements import Operations

log: Final = logging.getLogger("qmq.outbox")


class Sends(Protocol):
    """The interface of `outbox_sender.Sender`."""

    def is_ordered(self, subject: str) -> Awaitable[bool]:
        """Whether the subject keeps the order of its keys."""
        ...

    def send(self, subject: str, messages: Sequence[OutboxMessage]) -> Awaitable[Fates]:
        """Send messages, in order."""
        ...


@dataclass(frozen=True, slots=True)
class HandedOver:
    """The outcomes of committed messages by id. Messages that are missing were rolled back, were sent by another process, or are left to
    the watchdog.
    """

    sent: frozenset[bytes]
    held: frozenset[bytes]
    """Messages with an earlier waiting row of their key."""


class LeftOver(NamedTuple):
    """The outcome of remaining rows: how many were read, and how many of these were sent."""

    readable: int
    sent: int


class OutboxSender:
    """Sends the rows of an outbox. `grace_ms` is how long committed rows are claimed at a time; the watchdog claims none."""

    def __init__(self, table: Operations, sender: Sends, grace_ms: int = 0) -> None:
        self.table = table
        self._sender, self._grace_ms = sender, grace_ms

    async def send_committed(self, subject: str, messages: Sequence[OutboxMessage]) -> HandedOver:
        """Send those of these messages that are committed. Raises what the driver raises."""
        found = await self.table.find([message.message_id for message in messages])
        mine = [(found[message.message_id].id, message) for message in messages if message.message_id in found]
        mine.sort(key=lambda row: row[0])
        held = await self._held(subject, mine)
        going = [(RowName(number, message.message_id), message) for number, message in mine if number not in held]
        await self.table.claim([row.id for row in found.values() if row.claimed_ms < self._grace_ms // 2], self._grace_ms)
        sent: set[RowName] = set()
        if going:
            async with self._claimed([number for number, _ in mine]):
                sent = await self._send(subject, going)
        return HandedOver(
            frozenset([row.message_id for row in sent]),
            frozenset([message.message_id for number, message in mine if number in held]),
        )

    async def send_left(self, subject: str, ids: Sequence[int]) -> LeftOver:
        """Send those of these rows that still wait; unreadable ones are set aside. Raises what the driver raises."""
        stored = await self.table.contents(ids)
        await self.table.settle((), [(row.name, row.fault) for row in stored if row.fault is not None])
        rows = [(row.name, row.message) for row in stored if row.message is not None]
        return LeftOver(len(rows), len(await self._send(subject, rows)) if rows else 0)

    async def _send(self, subject: str, rows: Sequence[tuple[RowName, OutboxMessage]]) -> set[RowName]:
        """Send rows of one subject, in order, and delete the sent ones. Returns these."""
        fates = await self._sender.send(subject, [message for _, message in rows])
        sent = [rows[place][0] for place in fates.sent]
        failed = [(rows[place][0], error) for place, error in fates.failed if not isinstance(error, ClientClosed)]
        if failed:
            log.warning("%d messages of outbox %s to %s are not sent: %s", len(failed), self.table.statements.table, subject, failed[0][1])
        await self.table.settle(sent, failed)
        return set(sent)

    # --- order ---------------------------------------------------------------------------------------------------------

    async def _held(self, subject: str, mine: Sequence[tuple[int, OutboxMessage]]) -> set[int]:
        """Rows that must wait for an earlier row of their key."""
        hashes = {number: message.key_hash for number, message in mine}
        keys = sorted({each for each in hashes.values() if each is not None})
        if not keys or not await self._is_ordered(subject):
            return set()
        earliest = await self.table.earliest(keys, list(hashes))
        return {number for number, each in hashes.items() if each is not None and earliest.get(each, number) < number}

    async def _is_ordered(self, subject: str) -> bool:
        try:
            return await self._sender.is_ordered(subject)
        except QmqError:
            return False  # sending fails with this error, too, and records it

    # --- claims --------------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _claimed(self, ids: Sequence[int]) -> AsyncIterator[None]:
        """Keep rows claimed while the block runs, unless the only connection is lent and in use."""
        if self.table.is_lent:
            yield
            return
        task = asyncio.create_task(self._keep_claimed(ids))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])

    async def _keep_claimed(self, ids: Sequence[int]) -> None:
        """Renew the claims, three times within the time of a claim."""
        while True:
            await asyncio.sleep(self._grace_ms / 3000)
            try:
                await self.table.claim(ids, self._grace_ms)
            except Exception as failure:  # any exception of a driver: at worst the watchdog sends these messages, too
                log.warning("messages in outbox %s could not be claimed: %s", self.table.statements.table, error_text(failure))
