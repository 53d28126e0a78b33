"""The partitioner of an ordered producer: it cuts the batches of settled streams by the newest route (`qmq/delivery/partitioner.py`). Pure.

With best-effort order (`bend`), batches that wait for a broker group in trouble go to a healthy partition: they get a logical partition of
that one's range, and are marked *bent*. If they are cut again, they go where their keys belong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from qmq_ordering.route import PhysicalPartition

from qmq.client.ordered.ordered_batch import OrderedBatch, cut
from qmq.client.ordered.stream import Stream
from qmq.delivery.partitioner import Partitioner


class StreamPartitioner(Partitioner[Stream]):
    def __init__(self, make: Callable[[PhysicalPartition], Stream]) -> None:
        super().__init__(make)
        self.bent = 0
        """Messages that went to another partition than their own."""

    def settle(self) -> list[Stream]:
        """Take the batches of settled streams, and remove these streams. Returns them."""
        settled = super().settle()
        for stream in settled:
            self.put_cut(stream.take_left())
        return settled

    def put_cut(self, batches: Iterable[OrderedBatch]) -> None:
        """Cut batches by the newest usable route, and add each piece to its stream."""
        for batch in batches:
            batch.is_bent = False
            for stream, piece in cut(batch, self.by_lp.__getitem__):
                stream.put(piece)

    def bend(self, now: float) -> list[Stream]:
        """Move batches from troubled streams to healthy ones. Returns the troubled streams that had any."""
        streams = self.partitions.values()
        healthy = [stream for stream in streams if stream.is_healthy]
        giving = [stream for stream in streams if healthy and stream.has_release and stream.is_troubled(now)]
        for stream in giving:
            for batch in stream.release():
                self.bent += 0 if batch.is_bent else batch.count
                batch.is_bent = True
                min(healthy, key=_load).put(batch)
        return giving


def _load(stream: Stream) -> int:
    return len(stream.flight) + len(stream.waiting)
