"""The partitioner: which destination takes the messages of which logical partition, through all
changes of the route. Pure.

    learn  ──▶ new partitions are made; those that the newest route lacks get no new batches
    settle ──▶ logical partitions of left partitions with a settled window go to the newest route's;
               the caller cuts the remaining batches

Rules:
* All undecided messages of a logical partition are in one destination, which `by_lp` names. Keeping
  order in each destination therefore keeps the order of each key.
* A logical partition goes to the newest route's destination when its old one is settled, however
  many versions lie between. Each left partition is settled separately: the two sources of a merge
  do not wait for each other. Until then new messages wait in the old one.
* The caller puts the remaining messages of a settled partition into the new destinations before
  anything newer: first those that were sent, then those that waited after them.
* A route that is older than the known one is ignored.

Worked example: partition 2 holds [0, 500). Version 2 splits it into 3 [0, 250) and 4 [250, 500);
version 3 moves 3 to 5. A sender that missed version 2 learns of version 3: its partition 2 is left;
when settled, it hands over to 5 and 4. The sender never makes partition 3.

The ordered producer and the delay server use it. Spark's sink does not (`PartitionedRows`): several
attempts of one task may run at once and must cut the same rows into the same batches. It therefore
cuts nothing until it has looked at all closed partitions, and then cuts whole chunks of rows, by
arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any, Generic, TypeVar

from qmq_ordering.routes import PhysicalPartition, Route

from qmq.delivery.window import InFlightWindow

P = TypeVar("P", bound=InFlightWindow[Any])
"""The window of one partition, with the batches that wait for it."""


class Partitioner(Generic[P]):
    """Maps logical partitions to destinations. `make` makes the destination of a partition at its
    first use.
    """

    def __init__(self, make: Callable[[PhysicalPartition], P]) -> None:
        self.route: Route | None = None
        self.partitions: dict[int, P] = {}
        """The destinations by partition number: those in use, and those left but not settled."""
        self.by_lp: list[P] = []
        self._make = make

    @property
    def version(self) -> int:
        """The version of the newest known route; 0 if none is known."""
        return self.route.version if self.route is not None else 0

    @property
    def wants_route(self) -> bool:
        """Whether a partition refused a batch as if it were sealed, and no newer route is known:
        ask for the route until there is one.
        """
        return any(partition.wants_route for partition in self.partitions.values())

    def learn(self, route: Route, fenced: Collection[int], now: float) -> None:
        """Take the newest route, and the fenced partitions. Call `settle` afterwards."""
        if route.version < self.version:
            return
        is_newer = route.version > self.version
        self.route = route
        for part in route.partitions:
            if part.number not in self.partitions:
                self.partitions[part.number] = self._make(part)
            elif is_newer:
                self.partitions[part.number].keep()
        for number in self.partitions.keys() - {part.number for part in route.partitions}:
            self.partitions[number].leave(now, is_fenced=number in fenced)
        if not self.by_lp:
            self.by_lp = [
                self.partitions[route.holder(lp).number] for lp in range(route.logical_partitions)
            ]

    def resume(self, part: PhysicalPartition, lps: Iterable[int]) -> P:
        """Add a partition that has undecided messages of these logical partitions from before the
        first route was known. If the newest route lacks the partition, the logical partitions
        belong to it until it is settled. Call `learn` with that route afterwards.
        """
        partition = self.partitions.get(part.number)
        if partition is None:
            partition = self.partitions[part.number] = self._make(part)
        if self.route is not None and self.route.partition(part.number) is None:
            for lp in lps:
                self.by_lp[lp] = partition
        return partition

    def settle(self) -> list[P]:
        """Remove settled partitions, whose logical partitions go to their successors. Returns the
        removed ones, in the order of their numbers.
        """
        numbers = sorted(
            [number for number, partition in self.partitions.items() if partition.is_settled]
        )
        settled = [self.partitions.pop(number) for number in numbers]
        if settled:
            assert self.route is not None
            gone = {id(partition) for partition in settled}
            for lp, partition in enumerate(self.by_lp):
                if id(partition) in gone:
                    self.by_lp[lp] = self.partitions[self.route.holder(lp).number]
        return settled
