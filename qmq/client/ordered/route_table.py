"""The table of a producer: which stream takes the messages of which logical partition, through all changes of the route. Pure.

Rules:
* All undecided messages of a logical partition are in one stream: the one that the table names. So order is kept by keeping it in streams.
* A range flips to the newest route's partition when its old stream is settled, however many versions lie between, and each range for
  itself: the two sides of a merge need not wait for each other. Until then new messages gather behind, in the old stream.
* A route that is older than the known one is not believed.
* With best-effort order (`bend`), what waits for a broker group in trouble goes at once to a healthy partition: stamped with a logical
  partition of that one's range, and *bent*. When it is cut anew it is sent where it belongs.

Worked example: partition 2 holds [0, 500). Version 2 splits it into 3 [0, 250) and 4 [250, 500); version 3 moves 3 to 5. A producer that
slept through both learns of version 3: its stream to 2 is left; settled, it hands over to the streams of 5 and 4. It never has one to 3.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from qmq_ordering.route import PhysicalPartition, Route

from qmq.client.ordered.ordered_batch import OrderedBatch, cut
from qmq.client.ordered.stream import Stream


class RouteTable:
    """`make` makes the stream of a partition that is used for the first time."""

    def __init__(self, make: Callable[[PhysicalPartition], Stream]) -> None:
        self.route: Route | None = None
        self.streams: dict[int, Stream] = {}
        """By the number of the partition: those in use, and those left but not settled."""
        self.by_lp: list[Stream] = []
        self.bent = 0
        """Messages that went to another partition than theirs."""
        self._make = make

    @property
    def version(self) -> int:
        """Of the newest route known; 0 if none is."""
        return self.route.version if self.route is not None else 0

    @property
    def wants_route(self) -> bool:
        """Whether a partition refused as if it were sealed, and nothing newer is known: ask until there is."""
        return any(stream.wants_route for stream in self.streams.values())

    # --- routes --------------------------------------------------------------------------------------------------------

    def learn(self, route: Route, fenced: Collection[int], now: float) -> None:
        """The newest route, and the partitions that are fenced. To be followed by `settle`."""
        if route.version < self.version:
            return
        is_newer = route.version > self.version
        self.route = route
        for part in route.partitions:
            if part.number not in self.streams:
                self.streams[part.number] = self._make(part)
            elif is_newer:
                self.streams[part.number].keep()
        for number, stream in self.streams.items():
            if route.partition(number) is None:
                stream.leave(now, is_fenced=number in fenced)
        if not self.by_lp:
            self.by_lp = [self.streams[route.holder(lp).number] for lp in range(route.logical_partitions)]

    def settle(self) -> list[Stream]:
        """Flip what can be flipped: settled streams hand over, and are gone. Those that are."""
        settled = [stream for stream in self.streams.values() if stream.is_settled]
        for stream in settled:
            del self.streams[stream.partition.number]
            self._flip(stream)
            self.put_cut(stream.take_left())
        return settled

    def _flip(self, old: Stream) -> None:
        assert self.route is not None
        by_lp = self.by_lp
        for lp in range(*old.partition.range):
            if by_lp[lp] is old:
                by_lp[lp] = self.streams[self.route.holder(lp).number]

    def put_cut(self, batches: Iterable[OrderedBatch]) -> None:
        """Cut batches by the table, and put each piece behind what is in its stream."""
        for batch in batches:
            batch.is_bent = False
            for stream, piece in cut(batch, self.by_lp.__getitem__):
                stream.put(piece)

    # --- best-effort order ---------------------------------------------------------------------------------------------

    def bend(self, now: float) -> list[Stream]:
        """Give what waits for troubled streams to healthy ones; the troubled streams that had something to give."""
        healthy = [stream for stream in self.streams.values() if stream.is_healthy]
        giving = [stream for stream in self.streams.values() if healthy and stream.has_release and stream.is_troubled(now)]
        for stream in giving:
            for batch in stream.release():
                self.bent += 0 if batch.is_bent else batch.count
                batch.is_bent = True
                min(healthy, key=_load).put(batch)
        return giving


def _load(stream: Stream) -> int:
    return len(stream.flight) + len(stream.waiting)
