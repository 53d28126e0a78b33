"""Messages that were never sent, for tests of handlers: real messages, with the checks of sending,
but no broker. Verdicts have no effect.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from typing import NamedTuple

from qmq import limits
from qmq.client.consuming.message import BatchSlice, DecodedBatch, Message, Messages
from qmq.client.producing.batch import OpenBatch, body_bytes
from qmq.client.producing.receipts import BatchReceipt, Receipts
from qmq.model import check_name
from qmq.process.event_loop import ms_of
from qmq.wire import batch


class LocalMessage(NamedTuple):
    """The arguments of `Client.send`."""

    body: bytes
    key: str | bytes | None = None
    tags: Iterable[str] = ()
    headers: Mapping[str, str | bytes] | None = None


class LocalBatch(NamedTuple):
    """Messages as a consumer gets them, and their receipts as a producer gets them."""

    messages: Messages
    receipts: Receipts


def local_batch(subject: str, contents: Iterable[LocalMessage], *, attempt: int = 1) -> LocalBatch:
    """Messages as a consumer of the subject would get them, with their own ids. Raises InvalidName,
    InvalidArgument, MessageTooLarge.
    """
    check_name("subject", subject)
    opened = OpenBatch(None, ms_of(time.time_ns()))
    for each in contents:
        opened.bodies.append(body_bytes(each.body, limits.BODY_BYTES_MAX))
        opened.add_columns(each.key, each.tags, each.headers)
    if not opened.bodies:
        return LocalBatch(Messages([]), Receipts([]))
    columns, created_ms = opened.collect()
    producer_id, number = secrets.randbits(62), secrets.randbits(31)
    sent, region = batch.encode(
        subject.encode(),
        columns,
        producer_id=producer_id,
        batch_sequence=number,
        create_time_ms=created_ms,
    )
    view = batch.BatchView(
        batch.Envelope(batch.Kind.DATA, *batch.sent_sizes(sent), 0, 0, 0, created_ms, 0), region
    )
    messages = Messages(
        [BatchSlice(DecodedBatch(view), 0, view.count, attempt, 0, _NoSettler(subject))]
    )
    return LocalBatch(
        messages,
        Receipts([BatchReceipt(subject, 0, 0, view.count, producer_id, number, created_ms, "")]),
    )


def chosen(messages: Messages, wants: Callable[[Message], bool]) -> Messages:
    """The messages for which `wants` is true."""
    ones = (one for each in messages.slices for one in _ones(each))
    return Messages([each for each in ones if wants(each.message(0))])


def _ones(part: BatchSlice) -> Iterator[BatchSlice]:
    for index in range(part.count):
        yield BatchSlice(
            part.batch, part.offset + index, 1, part.attempt, part.pull + index, part.settler
        )


class _NoSettler:
    """Accepts verdicts and ignores them."""

    broker_group = ""

    def __init__(self, subject: str) -> None:
        self.subject = subject

    def ack(self, pull: int) -> None: ...

    def settle(
        self, first: int, last: int, verdict: int, delay: int = 0, error: str = ""
    ) -> None: ...

    def nack(self, part: BatchSlice, delay: timedelta | None, error: str = "") -> None: ...

    async def settle_now(self, first: int, last: int, verdict: int) -> None: ...
