"""The network of a cluster in one process: its parties, and the cuts between them.

A *party* is the unit of faults: a replica, a metaserver, the coordination store, the application's
clients. Each party opens its connections through its own network, which knows the other party by
the address. Cutting two parties apart ends the connections between them, both ways, and refuses new
ones; calls over gRPC fail as they begin. Shutting a network aborts all its connections, accepted
ones included, as the death of a process does.

All parties share one coordination store, that of `qmq dev`, in memory, with leases by the cluster's
clock. A party that is cut off or dead cannot reach it (`PartyStore`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from pathlib import PurePath
from typing import Any, Final, cast
from weakref import WeakKeyDictionary

import grpc
from qmq_coordination.coordination_store import (
    NO_LEASE,
    Compare,
    KeyListing,
    KeyValue,
    LeaseId,
    Operation,
    Revision,
    TxnResult,
    WatchedChanges,
)
from qmq_coordination.embedded import EmbeddedStore

from qmq.errors import CoordinationUnavailable
from qmq.process.address import parse
from qmq.rpc.channel import RpcChannel
from qmq.rpc.network import Factory, Network, Refused, ServerListener, ignored
from qmq.rpc.server_name import NameSource
from qmq.security.principal import TokenSource, no_token
from qmq.wire.frame_stream import FrameStream

CLIENTS: Final = "clients"
COORDINATION: Final = "coordination"


class Parties:
    """All parties of a cluster, their addresses, and the cuts between them."""

    def __init__(self) -> None:
        self._networks: dict[str, list[PartyNetwork]] = {}
        self._cuts: dict[frozenset[str], int] = {}
        """The number of cuts of each pair, because faults may overlap."""

    def network(self, party: str) -> PartyNetwork:
        """A new network for a party."""
        network = PartyNetwork(self, party)
        self._networks[party] = [
            each for each in self._networks.get(party, ()) if not each.is_shut
        ] + [network]
        return network

    @staticmethod
    def owner(address: str) -> str:
        """The party that listens on an address: sockets are named `FOLDER/PARTY:NUMBER`."""
        return PurePath(parse(address).path.rpartition(":")[0]).name

    def are_cut(self, one: str, other: str) -> bool:
        """True if two parties are cut apart."""
        return frozenset((one, other)) in self._cuts

    def cut(self, one: str, other: str) -> None:
        """Cut two parties apart."""
        pair = frozenset((one, other))
        self._cuts[pair] = self._cuts.get(pair, 0) + 1
        for here, there in ((one, other), (other, one)):
            for network in self._networks.get(here, ()):
                network.drop(there)

    def heal(self, one: str, other: str) -> None:
        """Remove one cut."""
        pair = frozenset((one, other))
        left = self._cuts.pop(pair) - 1
        if left:
            self._cuts[pair] = left


class PartyNetwork(Network):
    """The network of one party."""

    is_machine = False

    def __init__(self, parties: Parties, party: str) -> None:
        self.party = party
        self.is_shut = False
        self._parties = parties
        self._opened: WeakKeyDictionary[asyncio.BaseProtocol, str] = WeakKeyDictionary()
        """The connections by the party at the other end; accepted ones have no known party."""
        self._listeners: list[ServerListener] = []

    def reaches(self, other: str) -> bool:
        """Whether this party can reach another one."""
        return not self.is_shut and not self._parties.are_cut(self.party, other)

    async def listen(
        self, host: str, port: int, factory: Factory, refused: Refused = ignored
    ) -> ServerListener:
        listener = await super().listen(host, port, lambda: self._kept(factory(), ""), refused)
        self._listeners.append(listener)
        return listener

    async def connect(self, address: str, factory: Factory) -> None:
        """See Network. Raises ConnectionRefusedError if the parties are cut."""
        other = self._parties.owner(address)
        self._require(other)
        await super().connect(address, lambda: self._kept(factory(), other))
        if not self.reaches(other):
            self.drop(other)
            self._require(other)

    def _require(self, other: str) -> None:
        if not self.reaches(other):
            raise ConnectionRefusedError(
                f"nothing passes from {self.party} to {other} (a fault that the test asked for)"
            )

    def _kept(self, protocol: asyncio.BaseProtocol, other: str) -> asyncio.BaseProtocol:
        self._opened[protocol] = other
        if self.is_shut:
            _abort(protocol)
        return protocol

    def channel(
        self, address: str, server: NameSource, token: TokenSource = no_token
    ) -> grpc.aio.Channel:
        other = self._parties.owner(address)

        def guard() -> None:
            if not self.reaches(other):
                nothing, why = grpc.aio.Metadata(), f"nothing passes from {self.party} to {other}"
                raise grpc.aio.AioRpcError(
                    grpc.StatusCode.UNAVAILABLE, nothing, nothing, details=why
                )

        return RpcChannel(address, server, guard, token=token)

    def drop(self, other: str) -> None:
        """End the connections to another party."""
        for protocol, to in list(self._opened.items()):
            if to == other:
                _abort(protocol)

    def shut(self) -> None:
        """End all connections; nothing passes any more."""
        self.is_shut = True
        for listener in self._listeners:
            listener.close()
        for protocol in list(self._opened):
            _abort(protocol)


def _abort(protocol: asyncio.BaseProtocol) -> None:
    if isinstance(protocol, FrameStream):
        protocol.abort()


class PartyStore:
    """A CoordinationStore through a party's network. Closing it does not close the shared store."""

    def __init__(self, store: EmbeddedStore, network: PartyNetwork) -> None:
        self._store = store
        self._network = network

    def _require(self) -> None:
        if not self._network.reaches(COORDINATION):
            raise CoordinationUnavailable(
                f"nothing passes from {self._network.party} to the coordination store"
            )

    async def get(self, key: str) -> KeyValue | None:
        self._require()
        return await self._store.get(key)

    async def list(self, prefix: str, *, revision: int = 0, limit: int = 0) -> KeyListing:
        self._require()
        return await self._store.list(prefix, revision=revision, limit=limit)

    async def put(self, key: str, value: bytes, lease: LeaseId = NO_LEASE) -> Revision:
        self._require()
        return await self._store.put(key, value, lease)

    async def delete(self, key: str, *, is_prefix: bool = False) -> int:
        self._require()
        return await self._store.delete(key, is_prefix=is_prefix)

    async def txn(
        self,
        compares: Sequence[Compare],
        success: Sequence[Operation],
        failure: Sequence[Operation] = (),
    ) -> TxnResult:
        self._require()
        return await self._store.txn(compares, success, failure)

    async def grant(self, ttl_s: float) -> LeaseId:
        self._require()
        return await self._store.grant(ttl_s)

    async def keep_alive(self, lease: LeaseId) -> float:
        self._require()
        return await self._store.keep_alive(lease)

    async def revoke(self, lease: LeaseId) -> None:
        self._require()
        await self._store.revoke(lease)

    async def watch(self, prefix: str, start_revision: int) -> AsyncIterator[WatchedChanges]:
        """See CoordinationStore. The watch breaks with the first change that
        cannot be delivered.
        """
        self._require()
        found: Any = self._store.watch(prefix, start_revision)
        async with aclosing(found) as changes:
            async for each in changes:
                self._require()
                yield cast(WatchedChanges, each)

    async def compact(self, revision: int) -> None:
        self._require()
        await self._store.compact(revision)

    async def close(self) -> None: ...
