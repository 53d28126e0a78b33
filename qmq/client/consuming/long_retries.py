"""Retries after more than an hour, which a broker does not keep.

A copy of the failed message, directed to this group, goes to a delay group; then the message is
acknowledged (`Retries`):

    nack(ten days) ──▶ postponed ──▶ stored by a delay group ──▶ ACK
                                 └─▶ not stored, or outcome unknown
                                     ──▶ NACK for an hour, at the broker that has it

Rules:
* Until its verdict is sent, this consumer holds the postponed message and renews its lease. If the
  consumer dies before that, the message is handed out again, and may also come from the delay
  group: at least once.
* The copy keeps the message's id, key, tags, headers and create time. Two headers are added: the
  group that it is for, and how often the message failed.
* Messages that are postponed in one round of the event loop are sent together, in batches that a
  producer does not cut, so that each batch is stored as a whole or not at all.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from qmq import limits, model
from qmq.client.consuming.message import Message
from qmq.errors import QmqError
from qmq.wire.batch import CREATED_SPAN_MS, columns_of_copies, size_of_copy
from qmq.wire.batch_columns import Columns
from qmq.wire.frame_payloads import Verdict

log = logging.getLogger("qmq.client")

RETRY_BATCH_MESSAGES: Final = 500
RETRY_BATCH_BYTES: Final = 256 * limits.KIB
_OTHERS_BYTES: Final = 200
"""The most that a copy adds to a message: two headers and a due time."""

SendDirected = Callable[[str, Columns, int], Awaitable[None]]
"""(subject, columns, create time of the batch):
returns when a delay group has stored them. Raises QmqError.
"""


class LongRetry(NamedTuple):
    """A message to be delivered again at `due_ms`, milliseconds since 1970,
    and the error of its attempt.
    """

    settle_postponed: Callable[[int, int, int, str], None]
    """(pull sequence, verdict, delay in milliseconds, error): gives the postponed message its
    verdict.
    """
    message: Message
    due_ms: int
    error: str = ""

    def settle(self, verdict: int, delay_ms: int) -> None:
        """Give the message its verdict."""
        error = self.error if verdict == Verdict.NACK else ""
        self.settle_postponed(self.message.pull_sequence, verdict, delay_ms, error)


class Retries:
    """The long retries of one consumer. Storing a batch at a delay group may take `timeout_s`."""

    def __init__(self, subject: str, group: str, send: SendDirected, timeout_s: float) -> None:
        self._subject, self._group, self._send, self._timeout_s = subject, group, send, timeout_s
        self._waiting: list[LongRetry] = []
        self._sending: set[asyncio.Task[None]] = set()
        self._is_closed = False

    def add(self, retries: Iterable[LongRetry]) -> None:
        """Add messages; they are sent at the end of this round of the event loop."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._flush)
        self._waiting += retries

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        for batch in batches(waiting):
            if self._is_closed:
                _settle(batch, Verdict.NACK, limits.REQUEUE_MS_MAX)
                continue
            task = asyncio.get_running_loop().create_task(self._store(batch))
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)

    async def _store(self, batch: Sequence[LongRetry]) -> None:
        verdict, delay_ms = Verdict.NACK, limits.REQUEUE_MS_MAX
        try:
            columns, create_time_ms = retry_columns(batch, self._group)
            async with asyncio.timeout(self._timeout_s):
                await self._send(self._subject, columns, create_time_ms)
            verdict, delay_ms = Verdict.ACK, 0
        except (QmqError, TimeoutError) as failure:
            log.warning(
                "%d failed messages of subject %s, group %s: no delay group confirmed that it "
                "stores them for a later retry; they are handed out again in an hour: %s",
                len(batch),
                self._subject,
                self._group,
                failure or "no answer in time",
            )
        finally:
            _settle(batch, verdict, delay_ms)

    async def close(self) -> None:
        """Wait until every message has its verdict, for `timeout_s` at most. Messages that are
        added later are not sent. If the wait is cancelled, messages that no delay group has
        confirmed come back in an hour.
        """
        self._flush()
        try:
            while self._sending:
                await asyncio.wait(self._sending)
        finally:
            self._is_closed = True
            if self._sending:
                for each in self._sending:
                    each.cancel()
                await asyncio.wait(self._sending)


def _settle(batch: Sequence[LongRetry], verdict: int, delay_ms: int) -> None:
    for each in batch:
        each.settle(verdict, delay_ms)


def batches(retries: Iterable[LongRetry]) -> Iterator[list[LongRetry]]:
    """Batches in the order of the messages, cut where a batch is full, or where create times are
    too far apart. Pure.
    """
    batch: list[LongRetry] = []
    size = low = high = 0
    for each in retries:
        message = each.message
        created = message.create_time_ms
        grown = size + _size_of(message)
        is_apart = max(high, created) - min(low, created) >= CREATED_SPAN_MS
        if batch and (len(batch) >= RETRY_BATCH_MESSAGES or grown > RETRY_BATCH_BYTES or is_apart):
            yield batch
            batch, grown = [], grown - size
        if not batch:
            low = high = created
        batch.append(each)
        size, low, high = grown, min(low, created), max(high, created)
    if batch:
        yield batch


def _size_of(message: Message) -> int:
    return (
        size_of_copy(message.body, message.key_bytes or b"", message.tags, message.headers)
        + _OTHERS_BYTES
    )


def retry_columns(batch: Sequence[LongRetry], group: str) -> tuple[Columns, int]:
    """The copies, directed to the group; and the batch's create time. Raises CorruptBatch."""
    messages = [each.message for each in batch]
    columns, first = columns_of_copies(
        [message.body for message in messages],
        [message.key_bytes or b"" for message in messages],
        [message.tags for message in messages],
        [_headers_of(message, group) for message in messages],
        [message.create_time_ms for message in messages],
        [message.id.to_bytes() for message in messages],
    )
    columns.due_times_ms = [each.due_ms for each in batch]
    return columns, first


def _headers_of(message: Message, group: str) -> dict[str, bytes]:
    return {**message.headers, model.GROUP: group.encode(), model.ATTEMPT: b"%d" % message.attempt}
