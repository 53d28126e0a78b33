"""Support for the metaserver's tests: brokers with a control port only, metaservers in this loop, calls as a client makes them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
from qmq_coordination.broker_groups import EpochClaim, MasterRecord, Registration, ReplicaRecord, group_key
from qmq_coordination.coordination_store import CoordinationStore
from qmq_coordination.view import ClusterView
from qmq_replication.membership import ReplicaMembership

from qmq.errors import InvalidArgument, MessageNotFound, NotMaster, UnknownGroup
from qmq.meta.server import MetaConfig, MetaServer
from qmq.process.event_loop import Clock
from qmq.proto.v1 import control_pb2 as control
from qmq.proto.v1 import control_pb2_grpc, meta_pb2_grpc
from qmq.rpc.channel import CHANNEL_OPTIONS, answering, typed_error


class FakeBroker(control_pb2_grpc.BrokerControlServicer):
    """A master that answers from what a test gives it, and notes what it was asked."""

    def __init__(self, group: str, replica: str) -> None:
        self.group, self.replica = group, replica
        self.asked: list[str] = []
        self.is_master = True
        self.messages: set[str] = set()
        self.consumed: set[str] = set()
        self.voters = [replica]

    async def start(self) -> None:
        self.server = grpc.aio.server()
        control_pb2_grpc.add_BrokerControlServicer_to_server(self, self.server)
        self.port = self.server.add_insecure_port("127.0.0.1:0")
        await self.server.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def register(self, store: CoordinationStore, epoch: int = 1) -> Registration:
        """All keys of a group whose only replica and master this is."""
        claim = EpochClaim(epoch, self.replica, "test")
        await store.put(group_key(self.group, "members"), ReplicaMembership(1, (self.replica,)).encode())
        await store.put(group_key(self.group, "epoch"), claim.encode())
        master = MasterRecord(self.replica, epoch, "test", f"data-{self.replica}:1", self.address)
        record = ReplicaRecord(self.replica, self.group, master.data_address, self.address)
        registration = Registration(store, record, also={group_key(self.group, "master"): master.encode()})
        await registration.start()
        return registration

    def _note(self, what: str) -> None:
        self.asked.append(what)
        if not self.is_master:
            raise NotMaster("not the master any more")

    @answering
    async def DescribeReplica(self, request: Any) -> Any:
        return control.ReplicaStatus(
            replica=self.replica,
            broker_group=self.group,
            role="master" if self.is_master else "slave",
            epoch=1,
            last_index=10,
            stored_index=10,
            commit_index=10,
            message_position=1000,
            action_position=100,
            is_whole=True,
            is_serving=self.is_master,
        )

    @answering
    async def DescribeQueues(self, request: Any) -> Any:
        self._note("DescribeQueues")
        return control.DescribeQueuesResponse(queues=[control.Queue(subject="s", broker_group=self.group, next_sequence=3)])

    @answering
    async def DescribeGroups(self, request: Any) -> Any:
        self._note("DescribeGroups")
        if request.group and request.group not in self.consumed:
            raise UnknownGroup(f"group {request.group!r} has never consumed")
        return control.DescribeGroupsResponse(groups=[control.Group(broker_group=self.group, group=name) for name in self.consumed])

    @answering
    async def ResetGroup(self, request: Any) -> Any:
        self._note("ResetGroup")
        if request.group not in self.consumed:
            raise UnknownGroup("never consumed")
        return control.ResetGroupResponse(moved=[control.Moved(broker_group=self.group, to_sequence=request.sequence)])

    @answering
    async def FindMessage(self, request: Any) -> Any:
        self._note("FindMessage")
        if request.message_id not in self.messages:
            raise MessageNotFound("no such message")
        return control.FindMessageResponse(message=control.StoredMessage(broker_group=self.group))

    @answering
    async def FindTime(self, request: Any) -> Any:
        self._note("FindTime")
        return control.FindTimeResponse(found=[control.Moved(broker_group=self.group)])

    @answering
    async def Transfer(self, request: Any) -> Any:
        self._note("Transfer")
        return control.TransferResponse(master=request.to, epoch=2, refused_ms=7)

    @answering
    async def ChangeReplicas(self, request: Any) -> Any:
        self._note("ChangeReplicas")
        if request.remove == self.replica:
            raise InvalidArgument("the last voter")
        return control.ChangeReplicasResponse(membership_version=2, voters=self.voters, learners=[request.add])


class Caller:
    """A client of one metaserver: calls by name, typed errors."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        self.stub = meta_pb2_grpc.MetaStub(self.channel)

    async def __call__(self, method: str, request: Any) -> Any:
        call: Callable[..., Awaitable[Any]] = getattr(self.stub, method)
        try:
            return await call(request, timeout=30)
        except grpc.aio.AioRpcError as cause:
            raise typed_error(cause, self.address) from cause


@asynccontextmanager
async def metaserver(store: CoordinationStore, clock: Clock | None = None, **options: Any) -> AsyncIterator[tuple[Caller, ClusterView]]:
    """A metaserver on a store, with a client."""
    view = ClusterView(store, relist_s=0.3, probe_s=0.05)
    await view.start()
    server = MetaServer(store, view, MetaConfig("127.0.0.1", 0, **options), clock=clock)
    await server.start()
    caller = Caller(server.address)
    try:
        yield caller, view
    finally:
        await caller.channel.close()
        await server.stop()
        await view.stop()


@asynccontextmanager
async def brokers(store: CoordinationStore, *groups: str, kind: type[FakeBroker] = FakeBroker) -> AsyncIterator[list[FakeBroker]]:
    """One registered broker for each group."""
    found = [kind(group, f"{group}-a") for group in groups]
    registrations = []
    try:
        for each in found:
            await each.start()
            registrations.append(await each.register(store))
        yield found
    finally:
        for registration in registrations:
            await registration.stop()
        for each in found:
            await each.server.stop(None)
