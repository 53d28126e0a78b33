"""The sender of an outbox table: sends the rows of a subject, deletes the sent ones, and records
the errors of the others.

    relay, right after a commit          send_committed ──▶ look what is committed, hold back, claim
    committed() of a plain connection    send_committed
    watchdog, what the others left       send_left ──▶ read the rows

Each then sends the rows, and deletes or notes them.

Rules:
* The table says which messages are committed: rows of a rolled back transaction or savepoint do not
  exist, and are not sent.
* A message of an ordered subject is held back while an earlier row of its key waits that is not
  sent with it.
* Committed rows stay claimed while they are being sent, so that no watchdog takes them. The
  watchdog has its lease instead.
* A crash between sending and deleting leaves a row that is sent again, with the same id.

*The relay* sends the messages that this process committed, right after the commit. There is one for
each database and table that a client's outboxes use.

    commit ──▶ committing(messages) ──▶ line of the subject ──▶ OutboxSender.send_committed
    send_committed ──▶ sent, and deleted
                   └─▶ held: something of the key waits before it; in the line again soon

Rules:
* Each subject has its own queue, so that a subject in trouble delays no other. A queue has one
  round of at most 1,000 messages under way; messages committed meanwhile form the next round.
* A relay guarantees nothing: the watchdog sends every message that the relay does not, or that a
  dead process left. So a relay keeps at most 64 MiB, and gives up a message whose database does not
  answer.
* SQLAlchemy reports a commit just before it happens. The relay looks into the table only after the
  transaction has ended.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Final, NamedTuple

from qmq import limits
from qmq.errors import ClientClosed, QmqError
from qmq.sql.outbox_message import OutboxMessage, RowName, error_text
from qmq.sql.outbox_sender import Sender
from qmq.sql.outbox_statements import Operations

log: Final = logging.getLogger("qmq.outbox")


@dataclass(frozen=True, slots=True)
class HandedOver:
    """The outcomes of committed messages by id. Messages that are missing were rolled back, were
    sent by another process, or are left to the watchdog.
    """

    sent: frozenset[bytes]
    held: frozenset[bytes]
    """Messages with an earlier waiting row of their key."""


class LeftOver(NamedTuple):
    """The outcome of remaining rows: how many were read, and how many of these were sent."""

    readable: int
    sent: int


class OutboxSender:
    """Sends the rows of an outbox. `grace_ms` is how long committed rows are claimed at a time; the
    watchdog claims none.
    """

    def __init__(self, table: Operations, sender: Sender, grace_ms: int = 0) -> None:
        self.table = table
        self._sender, self._grace_ms = sender, grace_ms

    async def send_committed(self, subject: str, messages: Sequence[OutboxMessage]) -> HandedOver:
        """Send those of these messages that are committed. Raises what the driver raises."""
        found = await self.table.find([message.message_id for message in messages])
        mine = [
            (found[message.message_id].id, message)
            for message in messages
            if message.message_id in found
        ]
        mine.sort(key=lambda row: row[0])
        held = await self._must_wait(subject, mine)
        going = [
            (RowName(number, message.message_id), message)
            for number, message in mine
            if number not in held
        ]
        await self.table.claim(
            [row.id for row in found.values() if row.claimed_ms < self._grace_ms // 2],
            self._grace_ms,
        )
        sent: set[RowName] = set()
        if going:
            async with self._claimed([number for number, _ in mine]):
                sent = await self._send(subject, going)
        return HandedOver(
            frozenset([row.message_id for row in sent]),
            frozenset([message.message_id for number, message in mine if number in held]),
        )

    async def send_left(self, subject: str, ids: Sequence[int]) -> LeftOver:
        """Send those of these rows that still wait; unreadable ones are set aside. Raises what the
        driver raises.
        """
        stored = await self.table.contents(ids)
        await self.table.settle(
            (), [(row.name, row.fault) for row in stored if row.fault is not None]
        )
        rows = [(row.name, row.message) for row in stored if row.message is not None]
        return LeftOver(len(rows), len(await self._send(subject, rows)) if rows else 0)

    async def _send(
        self, subject: str, rows: Sequence[tuple[RowName, OutboxMessage]]
    ) -> set[RowName]:
        """Send rows of one subject, in order, and delete the sent ones. Returns these."""
        fates = await self._sender.send(subject, [message for _, message in rows])
        sent = [rows[place][0] for place in fates.sent]
        failed = [
            (rows[place][0], error)
            for place, error in fates.failed
            if not isinstance(error, ClientClosed)
        ]
        if failed:
            log.warning(
                "%d messages of outbox %s to %s are not sent: %s",
                len(failed),
                self.table.statements.table,
                subject,
                failed[0][1],
            )
        await self.table.settle(sent, failed)
        return set(sent)

    # --- order ------------------------------------------------------------------------------------

    async def _must_wait(self, subject: str, mine: Sequence[tuple[int, OutboxMessage]]) -> set[int]:
        """Rows that must wait for an earlier row of their key."""
        hashes = {number: message.key_hash for number, message in mine}
        keys = sorted({each for each in hashes.values() if each is not None})
        if not keys or not await self._is_ordered(subject):
            return set()
        earliest = await self.table.earliest(keys, list(hashes))
        return {
            number
            for number, each in hashes.items()
            if each is not None and earliest.get(each, number) < number
        }

    async def _is_ordered(self, subject: str) -> bool:
        try:
            return await self._sender.is_ordered(subject)
        except QmqError:
            return False  # sending fails with this error, too, and records it

    # --- claims -----------------------------------------------------------------------------------

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
            except Exception as failure:
                # any exception of a driver: at worst the watchdog sends these messages, too
                log.warning(
                    "messages in outbox %s could not be claimed: %s",
                    self.table.statements.table,
                    error_text(failure),
                )


ROUND_MESSAGES: Final = 1_000
ROUND_BYTES: Final = 4 * limits.MIB
KEPT_BYTES_MAX: Final = 64 * limits.MIB
HELD_S: Final = 0.1
"""How often the relay checks whether earlier rows of a held message are deleted."""
COMMIT_S: Final = 60.0
"""How long a commit that has begun may take before the relay leaves it to the watchdog."""

IsOver = Callable[[], bool]


class TransactionMessages:
    """The messages of one transaction, decided when each message is. The result of `future` is
    whether all were sent.
    """

    def __init__(self, messages: Sequence[OutboxMessage]) -> None:
        self.messages = messages
        self.future: Future[bool] = Future()
        self.future.set_running_or_notify_cancel()  # a waiter that gives up cancels nothing
        self._open = len(messages)
        self._sent = 0
        if not messages:
            self.future.set_result(True)

    def decided(self, is_sent: bool) -> None:
        """The outcome of one message is known."""
        self._open -= 1
        self._sent += is_sent
        if not self._open:
            self.future.set_result(self._sent == len(self.messages))

    def forget(self) -> None:
        """Leave all of these messages to the watchdog."""
        if not self.future.done():
            self.future.set_result(not self.messages)


class _Entry(NamedTuple):
    message: OutboxMessage
    committed: TransactionMessages
    is_over: IsOver
    until: float


class Relay:
    """Sends committed messages in the client's event loop;
    `committing` may be called from any thread.
    """

    def __init__(self, rows: OutboxSender, loop: asyncio.AbstractEventLoop, thread: int) -> None:
        self.rows = rows
        self.kept_bytes = 0
        self.is_closing = False
        self._loop, self._thread = loop, thread
        self._lines: dict[str, _Line] = {}

    def committing(self, committed: TransactionMessages, is_over: IsOver) -> None:
        """A transaction with these messages is being committed."""
        if threading.get_ident() == self._thread:
            self._put(committed, is_over)
        elif self._loop.is_closed():
            committed.forget()
        else:
            self._loop.call_soon_threadsafe(self._put, committed, is_over)

    def _put(self, committed: TransactionMessages, is_over: IsOver) -> None:
        size = sum([message.size for message in committed.messages])
        if self.is_closing or self.kept_bytes + size > KEPT_BYTES_MAX:
            committed.forget()
            return
        self.kept_bytes += size
        for message in committed.messages:
            line = self._lines.get(message.subject)
            if line is None:
                line = self._lines[message.subject] = _Line(self, message.subject)
            line.put(_Entry(message, committed, is_over, self._loop.time() + COMMIT_S))

    def ended(self, subject: str) -> None:
        """For a subject's queue: it is empty."""
        del self._lines[subject]

    async def close(self) -> None:
        """Send committed messages; leave held ones to the watchdog."""
        self.is_closing = True
        while self._lines:
            await asyncio.wait([line.task for line in self._lines.values()])


class _Line:
    """The committed messages of one subject."""

    def __init__(self, relay: Relay, subject: str) -> None:
        self._relay = relay
        self._subject = subject
        self._queue: deque[_Entry] = deque()
        self._held: list[_Entry] = []
        self._arrived = asyncio.Event()
        self._pause_s = 0.0
        self.task = asyncio.get_running_loop().create_task(self._run())

    def put(self, entry: _Entry) -> None:
        self._queue.append(entry)
        self._arrived.set()

    async def _run(self) -> None:
        is_stuck = False
        try:
            while self._queue or self._held:
                await self._wait_for_messages(is_stuck)
                entries = self._take()
                is_full = bool(self._queue)
                await self._send_ended(entries)
                is_stuck = is_full and len(self._held) == len(
                    entries
                )  # the round was full, and no message of it was decided
        finally:
            self._relay.ended(self._subject)
            for entry in (*self._held, *self._queue):
                self._decided(entry, False)

    async def _wait_for_messages(self, is_stuck: bool) -> None:
        """Wait for new messages. Held messages are checked from time to time only."""
        self._arrived.clear()
        if not self._queue or is_stuck:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._pause_s):
                    await self._arrived.wait()

    def _take(self) -> list[_Entry]:
        entries, self._held = self._held, []
        size = sum([entry.message.size for entry in entries])
        while (
            self._queue
            and len(entries) < ROUND_MESSAGES
            and (not entries or size + self._queue[0].message.size <= ROUND_BYTES)
        ):
            entries.append(self._queue.popleft())
            size += entries[-1].message.size
        return entries

    async def _send_ended(self, entries: list[_Entry]) -> None:
        """Send the committed messages; those that are still being committed are checked
        again in a moment.
        """
        now = asyncio.get_running_loop().time()
        over: list[_Entry] = []
        early: list[_Entry] = []
        for entry in entries:
            (
                over if entry.is_over() or now > entry.until or self._relay.is_closing else early
            ).append(entry)
        self._pause_s = (
            min(self._pause_s + 0.001, 0.02) if early and not over else 0.0 if early else HELD_S
        )
        if over:
            await self._send_round(over)
        self._held += early

    async def _send_round(self, entries: list[_Entry]) -> None:
        relay = self._relay
        sent: frozenset[bytes] = frozenset()
        held: frozenset[bytes] = frozenset()
        try:
            found = await relay.rows.send_committed(
                self._subject, [entry.message for entry in entries]
            )
            sent, held = found.sent, found.held
        except Exception as failure:  # drivers raise different errors
            log.warning(
                "messages to %s stay in outbox %s for now: %s",
                self._subject,
                relay.rows.table.statements.table,
                error_text(failure),
            )
        if relay.is_closing or len(held) >= ROUND_MESSAGES:
            held = frozenset()
        for entry in entries:
            if entry.message.message_id in held:
                self._held.append(entry)
            else:
                self._decided(entry, entry.message.message_id in sent)

    def _decided(self, entry: _Entry, is_sent: bool) -> None:
        self._relay.kept_bytes -= entry.message.size
        entry.committed.decided(is_sent)
