"""Which principal uses a producer id: the first one that sent under it to this broker, while rules are enforced. Pure.

A message's id contains the id of its producer, so every consumer knows it. Without an owner, any principal that may produce to the same
subject could begin a newer session under that id, and the broker would refuse the producer's own batches as those of an older one
(`ProducerFenced`).

Each principal keeps the `IDS_MAX` ids that it began to use last, so a principal that invents ids pushes out only its own. The next batch
of an id that was pushed out claims it again.

What if it crashes here? Owners are in memory. A broker that starts, or becomes master, learns them from the first batch of each id; a
producer that sends continuously claims its id before others can.
"""

from __future__ import annotations

from typing import Final

from qmq.errors import AccessDenied
from qmq.security.principal import Principal

IDS_MAX: Final = 10_000


class ProducerOwners:
    """The owners of producer ids at one broker."""

    def __init__(self, ids_max: int = IDS_MAX) -> None:
        self._ids_max = ids_max
        self._owners: dict[int, Principal] = {}
        self._ids: dict[Principal, dict[int, None]] = {}
        """Of each principal, the oldest first."""

    def claim(self, producer_id: int, principal: Principal) -> None:
        """A principal sends under an id. Raises AccessDenied if another principal owns the id."""
        owner = self._owners.get(producer_id)
        if owner == principal:
            return
        if owner is not None:
            raise AccessDenied(
                f"producer {producer_id:016x} is not {principal}'s: another principal began to send under this id. "
                "After a change of principal, make a new client"
            )
        ids = self._ids.setdefault(principal, {})
        self._owners[producer_id], ids[producer_id] = principal, None
        if len(ids) > self._ids_max:
            oldest = next(iter(ids))
            del ids[oldest], self._owners[oldest]
