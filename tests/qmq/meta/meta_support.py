"""Support for the metaserver's tests: brokers with a control port only, metaservers in this loop,
calls as a client makes them.

Support for the tests of ordered subjects: broker groups in memory, a store that loses answers,
metaservers that are killed.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

import grpc
from qmq_coordination.broker_groups import (
    EpochClaim,
    MasterRecord,
    Registration,
    ReplicaRecord,
    group_key,
)
from qmq_coordination.coordination_store import (
    Compare,
    CoordinationStore,
    KeyListing,
    Operation,
    Put,
    Revision,
    TxnResult,
)
from qmq_coordination.embedded import EmbeddedStore
from qmq_coordination.ordered_records import (
    FENCES,
    ROUTES,
    Fence,
    OrderedState,
    latest_key,
    ordered_state,
    route_key,
)
from qmq_coordination.subjects import SubjectCatalog
from qmq_coordination.view import ClusterView
from qmq_ordering.changes import first_route
from qmq_ordering.lanes import Frontier
from qmq_ordering.routes import FENCED, LpRange, Phase
from qmq_replication.membership import ReplicaMembership

from qmq.errors import (
    InvalidArgument,
    MessageNotFound,
    NotConnected,
    NotMaster,
    RouteConflict,
    UnknownGroup,
)
from qmq.meta.ordered.changes import RouteChanges
from qmq.meta.ordered.groups import Records
from qmq.meta.ordered.placement import Forgetting, Placing
from qmq.meta.ordered.rounds import GroupRounds
from qmq.meta.server import MetaConfig, MetaServer
from qmq.model import Fencing, Order, SubjectConfig
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
        await store.put(
            group_key(self.group, "members"), ReplicaMembership(1, (self.replica,)).encode()
        )
        await store.put(group_key(self.group, "epoch"), claim.encode())
        master = MasterRecord(self.replica, epoch, "test", f"data-{self.replica}:1", self.address)
        record = ReplicaRecord(self.replica, self.group, master.data_address, self.address)
        registration = Registration(
            store, record, also={group_key(self.group, "master"): master.encode()}
        )
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
        return control.DescribeQueuesResponse(
            queues=[control.Queue(subject="s", broker_group=self.group, next_sequence=3)]
        )

    @answering
    async def DescribeGroups(self, request: Any) -> Any:
        self._note("DescribeGroups")
        if request.group and request.group not in self.consumed:
            raise UnknownGroup(f"group {request.group!r} has never consumed")
        return control.DescribeGroupsResponse(
            groups=[control.Group(broker_group=self.group, group=name) for name in self.consumed]
        )

    @answering
    async def ResetGroup(self, request: Any) -> Any:
        self._note("ResetGroup")
        if request.group not in self.consumed:
            raise UnknownGroup("never consumed")
        return control.ResetGroupResponse(
            moved=[control.Moved(broker_group=self.group, to_sequence=request.sequence)]
        )

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
        return control.ChangeReplicasResponse(
            membership_version=2, voters=self.voters, learners=[request.add]
        )


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
async def metaserver(
    store: CoordinationStore, clock: Clock | None = None, **options: Any
) -> AsyncIterator[tuple[Caller, ClusterView]]:
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
async def brokers(
    store: CoordinationStore, *groups: str, kind: type[FakeBroker] = FakeBroker
) -> AsyncIterator[list[FakeBroker]]:
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


SUBJECT = "s"
LPS = 100


class KilledError(BaseException):
    """The metaserver's process ends here."""


# --- brokers --------------------------------------------------------------------------------------


@dataclass
class Lanes:
    """One partition on its broker group: its messages are numbers, and each belongs to the whole
    range.
    """

    range: LpRange
    next_sequence: int = 0
    last_append_ms: int = 0
    sealed_by: str = ""
    done: dict[str, list[list[int]]] = field(default_factory=dict)
    """By group: [first, end, done_before]."""
    is_forgotten: bool = False
    """The retention deleted the whole partition."""
    parked: dict[str, dict[bytes, int]] = field(default_factory=dict)
    """By group: keys with their logical partitions."""

    @property
    def sealed_at(self) -> int:
        return self.next_sequence - 1


class Brokers:
    """The masters of all broker groups: in the place of PartitionMasters."""

    def __init__(self) -> None:
        self.down: set[str] = set()
        self.parts: dict[int, Lanes] = {}
        self.calls: list[str] = []
        self.placed: list[control.PlaceLanesRequest] = []
        self.forgotten: list[str] = []
        self.inherited: list[control.InheritParkedRequest] = []
        self.before_seal: Callable[[str], Awaitable[None]] = _nothing

    def _require(self, group: str) -> None:
        if group in self.down:
            raise NotConnected(f"broker group {group} does not answer")

    def part(self, number: int) -> Lanes:
        return self.parts.setdefault(number, Lanes(LpRange(0, LPS)))

    async def seal(
        self, broker_group: str, subject: str, partition: int, change_id: str, to_version: int
    ) -> int:
        await self.before_seal(broker_group)
        self._require(broker_group)
        part = self.part(partition)
        if part.sealed_by not in ("", change_id):
            raise RouteConflict("closed by another change")
        if not part.sealed_by:
            part.sealed_by, part.next_sequence = change_id, part.next_sequence + 1
            self.calls.append(f"seal {partition}")
        return part.sealed_at

    async def probe(self, broker_group: str, subject: str, partition: int) -> None:
        self._require(broker_group)

    async def describe_lanes(
        self, broker_group: str, request: control.DescribeLanesRequest
    ) -> control.DescribeLanesResponse:
        self._require(broker_group)
        self.calls.append(f"describe {broker_group}")
        return control.DescribeLanesResponse(
            partitions=[
                self._status(number, broker_group, request.group)
                for number in request.partitions
                if number in self.parts
            ]
        )

    def _status(self, number: int, broker_group: str, group: str) -> control.PartitionStatus:
        part = self.parts[number]
        found = control.PartitionStatus(partition=number, broker_group=broker_group)
        found.next_sequence, found.last_append_ms = part.next_sequence, part.last_append_ms
        if part.sealed_by:
            found.sealed_at = part.sealed_at
        rows = (
            [[part.range.first, part.range.end, part.next_sequence]]
            if part.is_forgotten
            else part.done.get(group, [])
        )
        for first, end, done in rows:
            is_finished = bool(part.sealed_by) and done >= part.next_sequence
            found.progress.add(
                lps=control.LpRange(first=first, end=end), done_before=done, is_finished=is_finished
            )
        for key, lp in part.parked.get(group, {}).items():
            found.parked.add(partition=number, logical_partition=lp, key=key)
        return found

    def finish(self, group: str, number: int, first: int = 0, end: int = LPS) -> None:
        """Let a group finish all stored messages in a range."""
        part = self.part(number)
        rows = [[first, end, part.next_sequence]]
        for row in part.done.get(group, []):
            rows += [
                [a, b, row[2]]
                for a, b in ((row[0], min(row[1], first)), (max(row[0], end), row[1]))
                if a < b
            ]
        part.done[group] = sorted(rows)

    def append(self, number: int, messages: int = 1) -> None:
        assert not self.part(number).sealed_by
        self.part(number).next_sequence += messages

    async def inherit_parked(
        self, broker_group: str, request: control.InheritParkedRequest
    ) -> None:
        self._require(broker_group)
        self.inherited.append(request)
        keys = {each.key: each.logical_partition for each in request.keys}
        self.part(request.partition).parked.setdefault(request.group, {}).update(keys)

    async def place_lanes(self, broker_group: str, request: control.PlaceLanesRequest) -> None:
        self._require(broker_group)
        self.placed.append(request)
        for place in request.places:
            part = self.part(place.partition)
            if request.moves or request.group not in part.done:
                at = part.next_sequence if place.WhichOneof("target") == "latest" else 0
                part.done[request.group] = [[part.range.first, part.range.end, at]]

    async def forget_group(self, broker_group: str, request: control.DeleteGroupRequest) -> int:
        self._require(broker_group)
        self.forgotten.append(broker_group)
        found = [
            each
            for each in self.parts.values()
            if each.done.pop(request.group, None) or each.parked.pop(request.group, None)
        ]
        return len(found)


async def _nothing(_: str) -> None:
    return None


# --- the store ------------------------------------------------------------------------------------


class Watchful:
    """A store that checks each publication, and yields now and then so that other tasks run in
    between.
    """

    def __init__(
        self, inner: CoordinationStore, brokers: Brokers, random: Random | None = None
    ) -> None:
        self.inner = inner
        self.brokers = brokers
        self.random = random
        self.history: list[tuple[str, bytes]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    async def _yield(self) -> None:
        for _ in range(self.random.randrange(4) if self.random else 0):
            await asyncio.sleep(0)

    async def get(self, key: str) -> Any:
        await self._yield()
        found = await self.inner.get(key)
        await self._yield()
        return found

    async def list(self, prefix: str, *, revision: int = 0, limit: int = 0) -> KeyListing:
        await self._yield()
        return await self.inner.list(prefix, revision=revision, limit=limit)

    async def txn(
        self,
        compares: Sequence[Compare],
        success: Sequence[Operation],
        failure: Sequence[Operation] = (),
    ) -> TxnResult:
        await self._yield()
        before = await state_of(self.inner)
        done = await self.inner.txn(compares, success, failure)
        if done.succeeded:
            self.history += [(each.key, each.value) for each in success if isinstance(each, Put)]
            if any(isinstance(each, Put) and each.key == latest_key(SUBJECT) for each in success):
                await self._check_publication(before)
            await self._check_frontiers(before)
        await self._yield()
        return done

    async def _check_frontiers(self, before: OrderedState) -> None:
        """A group moves one version at a time, and over a partition that was closed only if its
        broker calls it finished there.
        """
        after = await state_of(self.inner)
        for group, record in after.groups.items():
            past = before.groups.get(group)
            if past is None or past.frontier == record.frontier or not record.is_ready:
                continue
            for lp in range(LPS):
                was, now = version_at(past.frontier, lp), version_at(record.frontier, lp)
                assert now in (was, was + 1), f"{group} went from {was} to {now}"
                part = after.routes[was].holder(lp)
                if (
                    now > was
                    and after.routes[now].holder(lp) != part
                    and not self.brokers.parts[part.number].is_forgotten
                ):
                    done = [
                        row
                        for row in self.brokers.parts[part.number].done.get(group, [])
                        if row[0] <= lp < row[1]
                    ]
                    assert self.brokers.parts[part.number].sealed_by
                    assert done
                    assert done[0][2] >= self.brokers.parts[part.number].next_sequence

    async def _check_publication(self, before: OrderedState) -> None:
        """Sealed before published (hazard 7), one version at a time, and every source closed by
        this very change.
        """
        after = await state_of(self.inner)
        assert after.latest == before.latest + 1
        change = after.changes[after.latest]
        fences = {
            item.key: Fence.decode(item.value) for item in (await self.inner.list(FENCES)).items
        }
        for number in change.sources:
            if change.sealed[number] == FENCED:
                assert [
                    fence for key, fence in fences.items() if int(key.rpartition("/")[2]) == number
                ] == [Fence(change.id, change.to_version)]
            else:
                assert self.brokers.parts[number].sealed_by == change.id
                assert change.sealed[number] == self.brokers.parts[number].sealed_at


def version_at(frontier: Frontier, lp: int) -> int:
    """The version that is read in a logical partition."""
    return next(
        piece.version for piece in frontier.pieces if piece.range.first <= lp < piece.range.end
    )


async def state_of(store: Any) -> OrderedState:
    """The subject's state in the store."""
    return ordered_state(SUBJECT, (await store.list(f"{ROUTES}{SUBJECT}/")).items)


# --- metaservers ----------------------------------------------------------------------------------


class World:
    """A store, broker groups a, b and c with their keys, an ordered subject, and metaservers that
    start and stop.
    """

    def __init__(self, random: Random | None = None) -> None:
        self.embedded = EmbeddedStore()
        self.brokers = Brokers()
        self.store = Watchful(self.embedded, self.brokers, random)
        self.now_ms = 1_000_000
        self.ids = itertools.count(1)

    async def create(
        self,
        *,
        partitions: int = 2,
        groups: Sequence[str] = ("a", "b"),
        fencing: Fencing = Fencing.LEASE,
    ) -> None:
        for name in ("a", "b", "c"):
            await self.elect(name, 1)
        route = first_route(LPS, partitions, groups)
        also = [Put(route_key(SUBJECT, 1), route.encode()), Put(latest_key(SUBJECT), b"1")]
        config = SubjectConfig(
            SUBJECT,
            groups=tuple(groups),
            order=Order.STRICT,
            logical_partitions=LPS,
            fencing=fencing,
        )
        await SubjectCatalog(self.embedded).create(config, also=also)

    async def elect(self, group: str, epoch: int) -> None:
        claim = EpochClaim(epoch, f"{group}-{epoch}", f"attempt {epoch}")
        master = MasterRecord(claim.replica, epoch, claim.attempt, "d:1", "c:1")
        await self.embedded.txn(
            [],
            [
                Put(group_key(group, "epoch"), claim.encode()),
                Put(group_key(group, "master"), master.encode()),
            ],
        )

    async def lose_master(self, group: str) -> None:
        """Its process is gone, and its lease has ended."""
        self.brokers.down.add(group)
        await self.embedded.delete(group_key(group, "master"))

    async def sleep(self, seconds: float) -> None:
        self.now_ms += int(seconds * 1000)
        await asyncio.sleep(0)

    def changes(
        self, store: Any = None, arrow: Callable[[str], Awaitable[None]] = _nothing
    ) -> RouteChanges:
        """A metaserver's."""
        return RouteChanges(
            store or self.store,
            self.brokers,
            sleep=self.sleep,
            now_ms=lambda: self.now_ms,
            new_id=self.new_id,
            arrow=arrow,
        )

    def new_id(self) -> str:
        return f"change-{next(self.ids)}"

    def groups(
        self, store: Any = None, arrow: Callable[[str], Awaitable[None]] = _nothing
    ) -> GroupRounds:
        return GroupRounds(Records(store or self.store), self.brokers, arrow=arrow)

    def placing(
        self, store: Any = None, arrow: Callable[[str], Awaitable[None]] = _nothing
    ) -> Placing:
        return Placing(Records(store or self.store), self.brokers, arrow=arrow)

    def forgetting(
        self, store: Any = None, arrow: Callable[[str], Awaitable[None]] = _nothing
    ) -> Forgetting:
        return Forgetting(
            Records(store or self.store), self.placing(store, arrow), self.brokers, arrow=arrow
        )

    async def state(self) -> OrderedState:
        return await state_of(self.embedded)

    async def check(self, *, latest: int) -> OrderedState:
        """Exactly one outcome: versions follow each other, each with its one change, published as
        the sources were sealed.
        """
        state = await self.state()
        assert state.latest == latest
        assert sorted(state.routes) == list(range(1, latest + 1))
        assert sorted(state.changes) == list(range(2, latest + 1))
        for version, change in state.changes.items():
            assert change.to_version == version
            assert change.phase in (Phase.PUBLISHED, Phase.DONE)
            assert set(change.sealed) == set(change.sources)
        assert len({change.id for change in state.changes.values()}) == len(state.changes)
        return state


class Killer:
    """An arrow at which a metaserver is killed, the `nth` time that it gets there."""

    def __init__(self, at: str, nth: int = 1) -> None:
        self.at = at
        self.left = nth
        self.seen: list[str] = []

    async def __call__(self, name: str) -> None:
        self.seen.append(name)
        if name == self.at:
            self.left -= 1
            if self.left == 0:
                raise KilledError(name)


def numbers(sequence: Iterable[Any]) -> list[int]:
    """Partition numbers."""
    return [each.number for each in sequence]


__all__ = [
    "LPS",
    "SUBJECT",
    "Brokers",
    "KilledError",
    "Killer",
    "Lanes",
    "Revision",
    "Watchful",
    "World",
    "numbers",
    "state_of",
]
