"""Locates subjects in this process's own view of the coordination store, for a client inside a server. A delay group also delivers
without a running metaserver. So its client calls no metaserver, and applies the metaserver's rules here (qmq/meta/cluster_catalog.py). The
locator never creates a subject: a message whose subject is deleted waits.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from qmq_coordination.view import ClusterView

from qmq.client.links import Links
from qmq.client.locator import Locator, Pushed
from qmq.client.metadata_answers import routes_of
from qmq.client.route_book import Ordering, Placement
from qmq.errors import CallerError, NotConnected, Overloaded, QmqError, Unavailable
from qmq.meta.cluster_catalog import ClusterCatalog
from qmq.meta.route_watchers import Watchers
from qmq.model import Order, SubjectConfig
from qmq.network import NETWORK, Network

if TYPE_CHECKING:
    from qmq_coordination.coordination_store import CoordinationStore


class ViewLocator:
    """Implements `qmq.client.locator.Locate` and `Watch`. Use it only while the view runs."""

    def __init__(self, store: CoordinationStore, view: ClusterView, network: Network = NETWORK) -> None:
        self._view = view
        self._network = network
        self._cluster = ClusterCatalog(store, view, auto_create=False)
        self._watchers = Watchers(view)

    async def locate(self, subject: str) -> Placement:
        """Locate a subject. Raises UnknownSubject; Unavailable if the answer is not known at the moment."""
        try:
            config, found = await self._cluster.locate(subject, create=False)
            ordering = await self._ordering(config)
        except (CallerError, Unavailable):
            raise
        except QmqError as cause:
            raise NotConnected(f"the broker groups of {subject!r} are not known at the moment: {cause}") from cause
        return Placement(routes_of(found, self._view.cluster), ordering)

    async def _ordering(self, config: SubjectConfig) -> Ordering | None:
        if config.order is Order.NONE:
            return None
        state = await self._cluster.ordered(config)
        assert state.route is not None
        return Ordering(config.order, state.route, frozenset(state.fenced))

    async def watch(self) -> AsyncIterator[Pushed]:
        """The changes of locations, until `close`."""
        while True:
            try:
                async for told in self._watchers.watch():
                    yield Pushed(told.subjects, told.broker_groups)
                return
            except Overloaded:  # too many changes at a time to keep their names
                yield Pushed(is_gap=True)

    def links(self, client: str) -> Links:
        """Make connections to brokers that this locator finds. The caller closes them."""
        return Links(Locator(self.locate, self.watch), client, network=self._network)

    def close(self) -> None:
        self._watchers.close()
