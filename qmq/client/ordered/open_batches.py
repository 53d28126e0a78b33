"""The open batches of an ordered producer: one for each stream, and only one while no route is known."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from qmq.client.links import Links
from qmq.client.ordered.batch_builder import BatchBuilder, Keys
from qmq.client.ordered.ordered_batch import OrderedBatch
from qmq.client.ordered.stream_connection import StreamConnection


class OpenBatches:
    """`taken` is called with each batch that is closed. The collections are changed in place: the producer keeps references to them."""

    def __init__(self, links: Links, timeout_s: float, taken: Callable[[OrderedBatch], None]) -> None:
        self._links = links
        self._loop = asyncio.get_running_loop()
        self._timeout_s = timeout_s
        self._taken = taken
        self.keys = Keys()
        """The logical partition of each key; 0 for all of them while the number of logical partitions is not known."""
        self.all = [self._make(None)]
        self.by_lp = list(self.all)
        """The open batch of each logical partition."""
        self.slots = [0]
        """For each logical partition, the index of its open batch in `all`."""
        self.filled: dict[BatchBuilder, float] = {}
        """Open batches that are not empty, and when the first message of each came; the oldest is first."""

    def _make(self, connection: StreamConnection | None) -> BatchBuilder:
        return BatchBuilder(connection, self._links.now_ns, self._links.round)

    def take(self, builder: BatchBuilder) -> OrderedBatch | None:
        """Close an open batch; None if it holds nothing."""
        del self.filled[builder]
        if not builder.bodies:
            return None
        batch = builder.take(self._loop.time() + self._timeout_s)
        self._taken(batch)
        return batch

    def take_of(self, connection: StreamConnection | None) -> OrderedBatch | None:
        """Close the open batch of a stream, if it holds anything."""
        builder = next((each for each in self.filled if each.connection is connection), None)
        return self.take(builder) if builder is not None else None

    def rerouted(self, by_lp: Sequence[StreamConnection]) -> None:
        """The route has changed: no open batch belongs to a removed stream."""
        self.keys.begin(len(by_lp))
        known = {each.connection: each for each in self.all}
        slots: dict[StreamConnection, int] = {}
        self.slots[:] = [slots.setdefault(connection, len(slots)) for connection in by_lp]
        self.all[:] = [known.get(connection) or self._make(connection) for connection in slots]
        self.by_lp[:] = [self.all[slot] for slot in self.slots]
