"""The parts that serve the calls of one identity: a client of the cluster, and everything that
works with it.

A gateway without credentials has one set of parts, for all clients. With credentials each access
key has a separate set, so that no client settles another's messages, and the cluster sees the
principal of each call.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from qmq.client.client import Client
from qmq.gateway.clients import ClientKeys, ClientSessions
from qmq.gateway.config import GatewayConfig
from qmq.gateway.readers import GroupReaders, HandedOut
from qmq.gateway.receipts import GATEWAY_ID_BYTES, InvisibleMessages
from qmq.gateway.receiving import GroupPulling, GroupReceiving
from qmq.gateway.sending import CheckPlan, TopicSending, TopicTransactions
from qmq.gateway.topics import TopicCatalog
from qmq.process.event_loop import Clock


class GatewayParts:
    """The parts of one identity. The creator of these parts owns the client."""

    def __init__(self, client: Client, config: GatewayConfig, clock: Clock) -> None:
        self.client, self.config = client, config
        self.catalog = TopicCatalog(
            lambda: client.metadata,
            clock.monotonic_ms,
            creates=config.creates_topics,
            all_ordered=config.all_ordered,
        )
        self.sessions = ClientSessions(clock.monotonic_ms)
        self.invisible = InvisibleMessages[HandedOut](os.urandom(GATEWAY_ID_BYTES), os.urandom)
        self._readers = GroupReaders(client, clock.monotonic_ms)
        self.sending = TopicSending(client, self.catalog, clock)
        self.receiving = GroupReceiving(
            self._readers, self.catalog, self.invisible, self.sessions, config, clock
        )
        self.pulling = GroupPulling(client, self.catalog, clock)
        self.transactions = TopicTransactions(
            client, self.sessions, clock, CheckPlan(config.transactions)
        )

    def sweep(self) -> None:
        """Call this from time to time."""
        self.receiving.sweep()
        self._readers.tidy()

    async def close(self) -> None:
        """Return the messages that clients hold, and leave the groups."""
        self.receiving.release_all()
        await self._readers.close()


class GatewayIdentities:
    """The parts of each access key, made at its first call.
    `connect` makes a client with a token.
    """

    def __init__(
        self, connect: Callable[[str], Client], config: GatewayConfig, clock: Clock
    ) -> None:
        self._connect, self._config, self._clock = connect, config, clock
        self._parts: dict[str, GatewayParts] = {}

    def parts_of(self, keys: ClientKeys) -> GatewayParts:
        """The parts of the identity. Raises InvalidArgument for an impossible token."""
        found = self._parts.get(keys.access_key)
        if found is None:
            found = self._parts[keys.access_key] = GatewayParts(
                self._connect(keys.token), self._config, self._clock
            )
        return found

    @property
    def all(self) -> list[GatewayParts]:
        """All parts that exist."""
        return list(self._parts.values())

    async def close(self) -> None:
        """End their clients."""
        await asyncio.gather(*map(_close, self.all))


async def _close(parts: GatewayParts) -> None:
    try:
        await parts.close()
    finally:
        await parts.client.close()
