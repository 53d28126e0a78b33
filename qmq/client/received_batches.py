"""The batches of a delivery, each checked and decoded once.

Batches travel whole, because the checksum is the producer's. A pull that ends inside a batch brings all of it. The next pull begins there:
with batches of 1,000 messages and room for 250 more, each batch would come four times. So the batch in which a delivery ended is kept
until the next delivery. The next pull names it, and the broker leaves it out. A range of the kept batch has the place behind those that
came. A batch that was handed out to its end is not kept: a consumer that waits holds nothing.

Lanes, and older brokers, send the batch again; the kept one is used instead of its copy. A copy is the same batch if the envelopes are
equal: the index names one entry of the group's log, and the checksum is that of the bytes. The bytes of the copy are not looked at.
"""

from __future__ import annotations

from collections.abc import Sequence

from qmq.batch import BatchView, parse_envelope
from qmq.client.message import Decoded
from qmq.wire.frame_payloads import Range


class ReceivedBatches:
    """Reads the batches of one session's deliveries, in their order."""

    __slots__ = ("_cut",)

    def __init__(self) -> None:
        self._cut: Decoded | None = None

    @property
    def kept(self) -> int:
        """The base sequence of the batch that is kept; -1: none."""
        return -1 if self._cut is None else self._cut.view.base_sequence

    def forget(self) -> None:
        """Keep nothing: another session begins."""
        self._cut = None

    def read(self, payload: bytes | memoryview, at: int, count: int, ranges: Sequence[Range], server: str | None = None) -> list[Decoded]:
        """Read the `count` batches that begin at byte `at` of a payload from `server`; the delivery hands out `ranges` of them, and of the
        kept batch, which is the last one of the result then. Raises CorruptBatch.
        """
        batches: list[Decoded] = []
        cut, self._cut = self._cut, None
        for _ in range(count):
            batch = cut
            if batch is None or batch.server != server or parse_envelope(payload, at) != batch.view.envelope:
                batch = Decoded(BatchView.parse(payload, at), server)
            at += batch.view.envelope.total_bytes
            batches.append(batch)
        if cut is not None and any([each.batch == count for each in ranges]):  # noqa: C419 - faster than a generator
            batches.append(cut)
        last = ranges[-1] if ranges else None
        if last is not None and last.batch < len(batches):
            view = batches[last.batch].view
            if last.first_sequence + last.count < view.base_sequence + view.count:
                self._cut = batches[last.batch]
        return batches
