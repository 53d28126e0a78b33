"""From the table to the brokers: committed messages of one subject are sent, what is sent is deleted, what failed is noted.

    hand_over   after a commit, by the one who inserted: looks what is committed, and whether something of a key waits before it
    deliver     by both: send, then delete

The table says what is committed: what a rolled back transaction or savepoint inserted is not there, and so is not sent. A crash between
sending and deleting leaves a row that is sent again, with the same id.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Final, Protocol

from qmq.errors import ClientClosed, QmqError
from qmq.sql.outbox_message import OutboxMessage, error_text
from qmq.sql.outbox_operations import Operations
from qmq.sql.outbox_sender import Fates

log: Final = logging.getLogger("qmq.outbox")

Claiming = Callable[[Sequence[int]], AbstractAsyncContextManager[None]]
"""Keeps rows claimed while they are being sent."""


class Sends(Protocol):
    """As `outbox_sender.Sender` does."""

    def is_ordered(self, subject: str) -> Awaitable[bool]:
        """Whether the subject keeps the order of its keys."""
        ...

    def send(self, subject: str, messages: Sequence[OutboxMessage]) -> Awaitable[Fates]:
        """Send messages, in order."""
        ...


@dataclass(frozen=True, slots=True)
class HandedOver:
    """What became of messages, by their ids. What is in neither was rolled back, sent by another, or is left to the watchdog."""

    sent: frozenset[bytes]
    held: frozenset[bytes]
    """Something of their keys waits before them."""


async def hand_over(
    subject: str, messages: Sequence[OutboxMessage], table: Operations, sender: Sends, claiming: Claiming, grace_ms: int
) -> HandedOver:
    """Send what is committed of these. Raises what the driver raises."""
    found = await table.find([message.message_id for message in messages])
    mine = sorted([(found[message.message_id].id, message) for message in messages if message.message_id in found], key=lambda row: row[0])
    held = await _held(subject, mine, table, sender)
    going = [(number, message) for number, message in mine if number not in held]
    await table.claim([row.id for row in found.values() if row.claimed_ms < grace_ms // 2], grace_ms)
    if not going:
        return HandedOver(frozenset(), frozenset([message.message_id for _, message in mine]))
    async with claiming([number for number, _ in mine]):
        sent = await deliver(subject, going, table, sender)
    return HandedOver(
        frozenset([message.message_id for number, message in going if number in sent]),
        frozenset([message.message_id for number, message in mine if number in held]),
    )


async def _held(subject: str, mine: Sequence[tuple[int, OutboxMessage]], table: Operations, sender: Sends) -> set[int]:
    """Rows before which another one of their key waits."""
    hashes = {number: message.key_hash for number, message in mine}
    keys = sorted({each for each in hashes.values() if each is not None})
    if not keys or not await _is_ordered(subject, sender):
        return set()
    earliest = await table.earliest(keys, list(hashes))
    return {number for number, each in hashes.items() if each is not None and earliest.get(each, number) < number}


async def _is_ordered(subject: str, sender: Sends) -> bool:
    try:
        return await sender.is_ordered(subject)
    except QmqError:
        return False  # sending will fail with this, and note it


async def deliver(subject: str, rows: Sequence[tuple[int, OutboxMessage]], table: Operations, sender: Sends) -> set[int]:
    """Send rows of one subject, in order, and delete those that are sent, whose ids it gives. Raises what the driver raises."""
    fates = await sender.send(subject, [message for _, message in rows])
    sent = [rows[place][0] for place in fates.sent]
    failed = [(rows[place][0], error) for place, error in fates.failed if not isinstance(error, ClientClosed)]
    if failed:
        log.warning("%d messages of outbox %s to %s are not sent: %s", len(failed), table.say.table, subject, failed[0][1])
    await table.settle(sent, failed)
    return set(sent)


def keeping_claimed(table: Operations, grace_ms: int) -> Claiming:
    """Claims rows anew, thrice in the time for which they are claimed, as long as it takes."""

    async def keep(ids: Sequence[int]) -> None:
        while True:
            await asyncio.sleep(grace_ms / 3000)
            try:
                await table.claim(ids, grace_ms)
            except Exception as failure:  # whatever a driver raises: the worst is that the watchdog sends them too
                log.warning("messages in outbox %s could not be claimed: %s", table.say.table, error_text(failure))

    @asynccontextmanager
    async def claiming(ids: Sequence[int]) -> AsyncIterator[None]:
        task = asyncio.create_task(keep(ids))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])

    return claiming


@asynccontextmanager
async def not_claiming(ids: Sequence[int]) -> AsyncIterator[None]:
    """Where the only connection is lent for as long as it takes."""
    yield
