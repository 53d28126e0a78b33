"""A replica's process in the simulator: the real core and the real coordinator between a simulated
disk, network and etcd.

It does the work of the driver, without bytes. It may die between any two steps of carrying out a
Ready.

A stranger to the group that can reach every replica: it sends what a hostile machine, or a removed
replica, might send.

    forge      connects in a member's name, answers the challenge with what it can know, and sends
               anything if it is let in
    outcast    speaks as a machine that has a valid proof, but does not belong to the group

It sees everything and aims well: it uses the epochs, indexes and rounds of the replica that it
talks to. It must have no effect, so all other checks judge it: no acknowledged entry is lost, and
the group works again when the stranger stops. It has a separate random generator.
"""

from __future__ import annotations

from collections import deque
from random import Random
from typing import TYPE_CHECKING

from qmq_coordination.broker_groups import MasterRecord, group_key, read_group
from qmq_replication.coordinator import Coordinator
from qmq_replication.core import Replica
from qmq_replication.history import EpochRun
from qmq_replication.links import DIALS, LISTENS, InboundLinks, PeerHello, ProofStep, prove
from qmq_replication.ready import (
    Ack,
    Append,
    Campaign,
    DurableState,
    LogReset,
    LookUp,
    MembershipChange,
    Message,
    Mismatch,
    Promise,
    PromiseRequest,
    Ready,
    Refusal,
    ReplicaState,
    Request,
    Resign,
    Role,
    TakeOver,
)

from qmq.errors import CoordinationError, ProtocolViolation, QmqError, Unavailable
from qmq.wire.frame import Frame, FrameKind
from sim.world import Disk, Entry

if TYPE_CHECKING:
    from sim.run import Simulation

SECRET = b"known to the store and the replicas"
EVERY_MS = 5_000
SEEDS_EACH = 4
"""One seed in this many has a stranger."""


class NoConnection:
    """A connection whose answers reach only the stranger, which cannot use them."""

    def may_be(self, _replica: str) -> bool:
        """See `InboundConnection`."""
        return True

    def answer_peer(self, payload: bytes) -> None:
        """See `InboundConnection`."""

    def trust_peer(self) -> None:
        """See `InboundConnection`."""

    def close_peer(self) -> None:
        """See `InboundConnection`."""


class Stranger:
    """See the module."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._random = Random(simulation.seed)

    def begin(self) -> None:
        """Attack until `calm`."""
        if self._simulation.seed % SEEDS_EACH == 0 and not self._simulation.is_calm:
            self._strike()
            self._simulation.world.after(
                1 + int(self._random.expovariate(1 / EVERY_MS)), self.begin
            )

    def _strike(self) -> None:
        nodes = [
            node
            for node in self._simulation.nodes.values()
            if node.core is not None and not node.is_paused
        ]
        if not nodes:
            return
        node = self._random.choice(nodes)
        others = [name for name in self._simulation.membership.replicas if name != node.name]
        kind = self._random.choice(("forge", "outcast"))
        self._simulation.faults[kind] += 1
        for message in self._volley(node):
            if kind == "forge":
                self._forge(node, self._random.choice(others or ["nobody"]), message)
            else:
                self._say(node, "outcast", message)

    def _volley(self, node: Node) -> list[Message]:
        core = node.core
        assert core is not None
        epoch, last = core.state.promised, core.state.history.last_index
        far = self._random.choice((1, 1, 10**15, (1 << 63) - 1 - epoch))
        run = EpochRun(epoch + 1, last + 1)
        peer = next(iter(core.leader.peers.values()), None) if core.leader is not None else None
        everything: list[Message] = [
            PromiseRequest(epoch + far),
            Refusal(epoch + far),
            TakeOver(epoch),
            Promise(epoch, 0, 0, True),
            Append(epoch, 0, core.state.history.last_epoch, last, (), last, last, False, None),
            Append(epoch + 1, 0, 0, 0, (), 0, 0, True, None),
            Append(
                epoch + 1,
                0,
                core.state.history.last_epoch,
                last,
                (run,),
                last + 1,
                last + 1,
                False,
                (Entry(epoch + 1, -1),),
            ),
            LogReset(epoch + 1, 0, 0, 0, [0, 0], 0),
            Ack(epoch, 0 if peer is None else peer.round, last, last, last),
            Ack(epoch, 0, 1 << 40, 1 << 40, last),
        ]
        return self._random.sample(everything, 4)

    def _forge(self, node: Node, name: str, message: Message) -> None:
        """Proofs for another connection, another direction or another secret."""
        hello = PeerHello("g", name, node.name, "nonce")
        proof = self._random.choice(
            [
                prove(*each)
                for each in (
                    (SECRET, DIALS, hello, "before"),
                    (SECRET, LISTENS, hello, "before"),
                    (b"guess", DIALS, hello, ""),
                )
            ]
        )
        try:
            arrival = node.arrivals.accept(
                _frame(FrameKind.REPLICA_HELLO, hello.pack()), NoConnection()
            )
            arrival.take(_frame(FrameKind.REPLICA_HELLO, ProofStep(proof=proof).pack()))
            arrival.take(Frame(FrameKind.REPLICA, 0, 0, message))  # type: ignore[arg-type]
        except (ProtocolViolation, Unavailable):
            return

    def _say(self, node: Node, sender: str, message: Message) -> None:
        try:
            node.receive(sender, message)
        except ProtocolViolation:
            node.receive(sender, TakeOver(0))  # carries out what was begun, as the driver does


def arrivals_of(node: Node, kind: type[InboundLinks]) -> InboundLinks:
    """A replica's listening port."""
    return kind(
        "g",
        node.name,
        secret=lambda: SECRET,
        members=lambda: node.core.members if node.core is not None else (),
        heard=lambda sender, frame: node.receive(sender, frame.payload),  # type: ignore[arg-type]
    )


def _frame(kind: FrameKind, payload: bytes) -> Frame:
    return Frame(kind, 0, 0, memoryview(payload))


MASTER = group_key("g", "master")
LEASE_S = 8.0
HOLD_S = 2.5
LOOK_MS = 2_000
WAITING_MAX = 20
SAVE_AGAIN_MS = 500
SAVE_WEIGHT = 20
"""Dying around a save is that much more likely than elsewhere."""


class Died(Exception):
    """The process is gone, in the middle of what it did."""


class Node:
    """One replica. `replica_class` and `coordinator_class` are replaced by the planted bugs."""

    replica_class: type[Replica] = Replica
    coordinator_class: type[Coordinator] = Coordinator
    arrivals_class: type[InboundLinks] = InboundLinks
    wants_flush = False
    """Whether its producers wait until a majority has flushed what they sent."""
    checks_places = True
    """Whether the log checks what the core returns. Not with planted bugs, which the simulator must
    find by their effects.
    """

    def __init__(self, simulation: Simulation, name: str) -> None:
        self.simulation = simulation
        self.world = simulation.world
        self.plan = simulation.plan
        self.name = name
        self.disk = Disk(self.plan.read_entries)
        self.disk.checks_places = self.checks_places
        self.boot = 0
        self.is_up = False
        self.is_paused = False
        self.died_ms = 0
        self.core: Replica | None = None
        self.arrivals = arrivals_of(self, self.arrivals_class)
        self._inbox: deque[tuple[str, Message]] = deque()
        self._waiting: deque[tuple[int, int, int]] = deque()
        self._for_flush: deque[tuple[int, Entry]] = deque()
        self._is_syncing = False
        self._syncing_to = 0
        self._synced_to = 0
        self._unsaved: Ready | None = None
        """What waits until the disk has room for the state; nothing else happens meanwhile."""
        self._lost_meanwhile: dict[str, None] = {}
        self._committed_to = 0
        self._tick_at = 0
        self._meant_at = 0
        """When a tick was due that did not come, since the process stood still."""
        self._lost_power = False
        self._folder = 1
        self._membership = simulation.first_membership

    @property
    def is_doubtful(self) -> bool:
        """Whether the replica may lack entries that it acknowledged, and knows that now or will
        know at its next start.
        """
        state = self.disk.state
        forgot = self._lost_power and not self.plan.is_sync
        return (
            not state.is_whole
            or state.resetting_until > 0
            or self.disk.folder != self._folder
            or forgot
        )

    @property
    def is_stuck(self) -> bool:
        """Whether the core must not be called now: the process stands still, or its disk has no
        room for its state.
        """
        return self.is_paused or self._unsaved is not None

    # --- life -------------------------------------------------------------------------------------

    def start(self) -> None:
        """Boot, from what the disk has."""
        if self.is_up:
            return
        self.simulation.tell(self.name, "starts")
        self.boot += 1
        self.is_up, self.is_paused = True, False
        self._inbox.clear()
        self._waiting.clear()
        self._for_flush.clear()
        self._is_syncing = False
        self._unsaved = None
        self._lost_meanwhile.clear()
        self._committed_to = 0
        store = self.simulation.store_of(self.name)
        self.coordinator = self.coordinator_class(
            store,
            "g",
            lambda: MasterRecord(self.name, 0),
            self.simulation.new_attempt,
            sleep=self.world.sleep,
            lease_s=LEASE_S,
        )
        boot = self.boot
        self.world.spawn(self._boot(), lambda: self.boot == boot and self.is_up)

    async def _boot(self) -> None:
        await self._recover()
        self._lost_power = False
        state = ReplicaState(
            self.name,
            self._membership,
            self.disk.state,
            self.disk.image.history(),
            self.disk,
            timing=self.plan.timing,
            now_ms=self.world.now,
            commit=self.disk.image.start,
        )
        self.core = self.replica_class(state, random=Random(self.world.random.getrandbits(32)))
        self.disk.sync(self.disk.pending)
        self.core.flushed(self.disk.image.last)
        self._tick_at = self._meant_at = 0
        self._carry_out()
        self._look_up(self.boot)

    async def _recover(self) -> None:
        """Recover as the driver does from what is on disk."""
        # a new disk: every promised epoch was at most the store's
        if self.disk.folder != self._folder:
            epoch = await self._highest_epoch()
            self.disk.state = self.disk.state._replace(promised=epoch, is_whole=False)
            self._folder = self.disk.folder
        if self._lost_power and not self.plan.is_sync:
            self.disk.state = self.disk.state._replace(is_whole=False)
        if self.disk.state.resetting_until:
            self.disk.forget_log()
            self.disk.state = DurableState(self.disk.state.promised, is_whole=False)

    async def _highest_epoch(self) -> int:
        while True:
            try:
                return (await read_group(self.simulation.store_of(self.name), "g")).claim.epoch
            except CoordinationError:
                await self.world.sleep(0.3)

    def kill(self) -> None:
        """SIGKILL: the operating system keeps what was written."""
        if self.is_up:
            self.is_up = False
            self.died_ms = self.world.now
            self.boot += 1
            self.core = None
            self.simulation.tell(self.name, "dies")
            self.simulation.network.tell_of_loss(self.name)

    def cut_power(self) -> None:
        """The machine stops."""
        self.kill()
        self._lost_power |= self.disk.cut_power(self.world.random)

    def pause(self, ms: int) -> None:
        """SIGSTOP, and SIGCONT later."""
        if self.is_up:
            self.is_paused = True
            self.world.after(ms, self._resume, self.boot)

    def _resume(self, boot: int) -> None:
        if self.boot != boot:
            return
        self.is_paused = False
        while self._inbox and self.boot == boot:
            self.receive(*self._inbox.popleft())

    def _tick(self, boot: int, at: int) -> None:
        if self.boot != boot or self.core is None or self._tick_at != at:
            return
        self._tick_at = 0
        self._meant_at = self._meant_at or at
        if self.is_stuck:
            self._tick_within(200)
            return
        late_ms, self._meant_at = at - self._meant_at, 0
        self.core.tick(at, late_ms)
        self._carry_out()

    def _tick_within(self, ms: int) -> None:
        """Have the core ticked, unless it will be before."""
        at = self.world.now + max(ms, 1)
        if not self._tick_at or at < self._tick_at:
            self._tick_at = at
            self.world.after(at - self.world.now, self._tick, self.boot, at)

    def _look_up(self, boot: int) -> None:
        """The watch on the coordination store: a hint, late."""
        if self.boot != boot or self.core is None:
            return
        items = self.simulation.etcd.items
        if not self.is_stuck and not self.simulation.is_etcd_cut(self.name):
            self._membership = self.simulation.membership
            self.core.looked_up(self.world.now, self.simulation.epoch, self._membership)
            if MASTER not in items:
                self.core.master_gone(self.world.now)
            self._carry_out()
        self.world.after(LOOK_MS, self._look_up, boot)

    # --- what comes in ----------------------------------------------------------------------------

    def receive(self, sender: str, message: Message) -> None:
        """A message arrived."""
        if self.core is None:
            return
        if self.is_paused:
            self._inbox.append((sender, message))
            return
        if self._unsaved is not None or (
            self.disk.is_full and isinstance(message, Append) and message.payload is not None
        ):
            return
        self.core.step(self.world.now, sender, message)
        self._carry_out()

    def lost(self, peer: str) -> None:
        """The connection to a peer ended."""
        if self._unsaved is not None:
            self._lost_meanwhile[peer] = None
        elif self.core is not None and not self.is_paused:
            self.core.disconnected(self.world.now, peer)
            self._carry_out()

    def propose(self, value: int) -> bool:
        """A producer sends a message; False if this is not the master, or not yet."""
        core = self.core
        if (
            core is None
            or self.is_stuck
            or core.leader is None
            or not core.leader.is_serving
            or core.leader.transfer_to
        ):
            return False
        if self.disk.is_full or self.disk.image.last - core.state.commit > WAITING_MAX:
            return False
        if self.wants_flush:
            core.leader.want_flush(self.disk.image.last + 1)
            self._for_flush.append((self.disk.image.last + 1, Entry(core.state.promised, value)))
        self._append_own(value)
        self._waiting.append((self.disk.image.last, core.state.promised, value))
        self._carry_out()
        return True

    def _append_own(self, value: int) -> None:
        core = self.core
        assert core is not None
        assert core.leader is not None
        entry = Entry(core.leader.epoch, value)
        self._write((entry,))
        core.leader.appended(self.disk.image.last)
        self._written()

    def _write(self, entries: tuple[Entry, ...]) -> None:
        image = self.disk.image
        before = image.entries[-1].epoch if image.entries else image.start_epoch
        for index, entry in enumerate(entries, image.last + 1):
            self.simulation.checks.wrote(self.name, index, entry, before)
            before = entry.epoch
        self.disk.write("add", image.last, entries)

    # --- storing ----------------------------------------------------------------------------------

    def _written(self) -> None:
        """Entries were written: stored, or stored once a sync is done."""
        if not self.plan.is_sync:
            self._tell_stored(self.disk.image.last)
        if not self._is_syncing:
            self._is_syncing = True
            self._syncing_to = self.disk.image.last
            sync_ms = 15 if self.simulation.is_calm else self.plan.sync_ms
            delay = (
                self.world.random.randint(1, sync_ms)
                if self.plan.is_sync
                else self.world.random.randint(100, 1_500)
            )
            self.world.after(delay, self._synced, self.boot, self.disk.pending)

    def _synced(self, boot: int, count: int) -> None:
        if self.boot != boot or self.core is None:
            return
        if self.is_paused:
            self.world.after(200, self._synced, boot, count)
            return
        self._is_syncing = False
        self.disk.sync(count)
        self._synced_to = self._syncing_to
        if self._unsaved is None:
            self._tell_synced()
            self._carry_out()
        if self.boot != boot:
            return
        if (self.disk.pending or self._syncing_to < self.disk.image.last) and not self._is_syncing:
            self._written()

    def _tell_synced(self) -> None:
        assert self.core is not None
        if self.plan.is_sync:
            self._tell_stored(self._synced_to)
        self.core.flushed(self._synced_to)

    def _written_again_from(self, index: int) -> None:
        """Entries after `index` are replaced: a sync under way does not cover the new ones."""
        self._syncing_to = min(self._syncing_to, index)
        self._synced_to = min(self._synced_to, index)

    def _tell_stored(self, index: int) -> None:
        assert self.core is not None
        self.core.stored(index)

    # --- carrying out -----------------------------------------------------------------------------

    def _carry_out(self) -> None:
        """Do what the core wants, in the order of its contract."""
        try:
            if self._unsaved is not None and self.disk.takes_state:
                self._saved_late(self._unsaved)
            while self.core is not None and self.core.state.ready and self._unsaved is None:
                ready = self.core.take()
                if self.simulation.story is not None:
                    self.simulation.story.did(self, ready)
                self._do(ready)
        except Died:
            if self.plan.is_sync and self.world.random.random() < 0.5:
                self.cut_power()
            else:
                self.kill()
            self.world.after(self.world.random.randint(10, 5_000), self.start)
        core = self.core
        if core is not None and (not self._tick_at or core.due_ms < self._tick_at):
            self._tick_within(core.due_ms - self.world.now)

    def _failpoint(self, weight: int = 1) -> None:
        if (
            self.plan.failpoint
            and not self.simulation.is_calm
            and self.world.random.random() < self.plan.failpoint * weight
        ):
            self.simulation.faults["failpoint"] += 1
            raise Died

    def _do(self, ready: Ready) -> None:
        if ready.save is not None:
            self._failpoint(SAVE_WEIGHT)
            if not self.disk.takes_state:
                self._wait_for_room(ready)
                return
            self.disk.state = ready.save
            self._failpoint(SAVE_WEIGHT)
        self._go_on(ready)

    def _wait_for_room(self, ready: Ready) -> None:
        self._unsaved = ready
        self.world.after(SAVE_AGAIN_MS, self._save_again, self.boot)

    def _save_again(self, boot: int) -> None:
        if self.boot != boot or self._unsaved is None:
            return
        if self.is_paused or not self.disk.takes_state:
            self.world.after(SAVE_AGAIN_MS, self._save_again, boot)
            return
        self._carry_out()
        lost, self._lost_meanwhile = self._lost_meanwhile, {}
        for peer in lost:
            self.lost(peer)

    def _saved_late(self, ready: Ready) -> None:
        assert ready.save is not None
        self._unsaved = None
        self.disk.state = ready.save
        self._go_on(ready)
        self._tell_synced()

    def _go_on(self, ready: Ready) -> None:
        self._change_log(ready)
        if ready.messages:
            self._send(ready)
            self._failpoint()
        if ready.commit is not None:
            self._committed(ready.commit)
        if ready.flushed is not None:
            self._flushed(ready.flushed)
        if ready.role is not None and ready.role is not Role.MASTER:
            self._waiting.clear()
            self._for_flush.clear()
        if ready.lead is not None:
            self._lead(ready.lead)
        for request in ready.requests:
            self._ask(request)

    def _change_log(self, ready: Ready) -> None:
        if ready.reset is not None:
            self._failpoint()
            self.disk.write("reset", ready.reset.start_index, (Entry(ready.reset.start_epoch, 0),))
            self._written_again_from(ready.reset.start_index)
            self.disk.sync(self.disk.pending)
        if ready.truncate is not None:
            self._failpoint()
            self.disk.write("cut", ready.truncate)
            self._written_again_from(ready.truncate)
        for append in ready.append:
            self._failpoint()
            self._write(append.payload)
        if ready.append:
            self._written()

    def _send(self, ready: Ready) -> None:
        for to, message in ready.messages:
            if isinstance(message, Ack | Mismatch):
                message = message._replace(place=self.disk.image.last)
            self.simulation.network.send(self.name, to, message)

    def _committed(self, index: int) -> None:
        core, checks = self.core, self.simulation.checks
        assert core is not None
        checks.commits(self, self._committed_to, index, self.simulation.membership)
        self._committed_to = index
        while self._waiting and self._waiting[0][0] <= index:
            at, epoch, value = self._waiting.popleft()
            if core.leader is not None and core.leader.epoch == epoch:
                checks.acknowledges(self.name, at, value)
        if core.leader is not None:
            self.simulation.nemesis.has_committed(self)

    def _flushed(self, index: int) -> None:
        while self._for_flush and self._for_flush[0][0] <= index:
            self.simulation.checks.acknowledges_flushed(
                self, *self._for_flush.popleft(), self.simulation.membership
            )

    def _lead(self, epoch: int) -> None:
        self.simulation.checks.became_master(self, epoch)
        if self.disk.is_full:
            assert self.core is not None
            self.core.become_slave(self.plan.timing.suspect_ms * 3)
            self.core.state.ready.requests.append(Resign(epoch))
            return
        self._append_own(0)
        self.simulation.nemesis.has_become_master(self)
        boot = self.boot
        self.world.spawn(self._hold(epoch), lambda: self.boot == boot)

    # --- the coordination store -------------------------------------------------------------------

    def _ask(self, request: Request) -> None:
        boot = self.boot
        if isinstance(request, LookUp):
            self.world.after(20, self._looked_up, boot)
            return
        if isinstance(request, Campaign):
            job = self._campaign()
        elif isinstance(request, Resign):
            job = self._resign(request)
        else:
            job = self._change(request)
        self.world.spawn(job, lambda: self.boot == boot)

    def _looked_up(self, boot: int) -> None:
        if (
            self.boot == boot
            and self.core is not None
            and not self.is_stuck
            and not self.simulation.is_etcd_cut(self.name)
        ):
            self.core.looked_up(self.world.now, self.simulation.epoch, self.simulation.membership)
            self._carry_out()

    async def _awake(self) -> None:
        while self.is_stuck:
            await self.world.sleep(0.1)

    async def _campaign(self) -> None:
        assert self.core is not None
        if self.core.state.role is not Role.CAMPAIGNING:
            return
        won = await self.coordinator.campaign(
            self.core.state.promised, above=self.core.refused_epoch
        )
        await self._awake()
        assert self.core is not None
        if won is None:
            self.core.campaign_lost(self.world.now)
        else:
            self.core.campaign_won(self.world.now, won.epoch, won.membership)
        self._carry_out()

    async def _resign(self, request: Resign) -> None:
        await self.coordinator.resign(request.epoch)

    async def _change(self, request: MembershipChange) -> None:
        done = await self.coordinator.change(request.before, request.after)
        await self._awake()
        if (
            self.core is not None
            and self.core.leader is not None
            and self.core.leader.epoch == request.epoch
        ):
            self.core.leader.changed(done)
            self._carry_out()

    async def _hold(self, epoch: int) -> None:
        """While master: keep the key."""
        while True:
            await self.world.sleep(HOLD_S)
            await self._awake()
            if self.core is None or self.core.leader is None or self.core.leader.epoch != epoch:
                return
            try:
                highest = (await self.coordinator.hold()).epoch
            except CoordinationError:
                continue
            if self.core is not None and highest > epoch:
                self.core.superseded(self.world.now, highest)
                self._carry_out()

    # --- what operators do ------------------------------------------------------------------------

    def operate(self, what: str, name: str) -> None:
        """Add or remove a replica, or hand over; refused if it does not fit just now."""
        core = self.core
        if core is None or self.is_stuck or core.leader is None:
            return
        try:
            if what == "transfer":
                core.leader.transfer(name)
                self.world.after(2_000, self._end_transfer, self.boot, core.leader.epoch)
            else:
                after = (
                    core.state.membership.with_learner(name)
                    if what == "join"
                    else core.state.membership.without(name)
                )
                core.leader.propose(after, self.world.now)
                self.simulation.checks.proposes(self, after)
        except QmqError:
            return
        self._carry_out()

    def _end_transfer(self, boot: int, epoch: int) -> None:
        if (
            self.boot == boot
            and self.core is not None
            and self.core.leader is not None
            and self.core.leader.epoch == epoch
        ):
            self.core.leader.transfer_to = ""
