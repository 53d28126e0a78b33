"""The driver carries out the core's instructions on the real disk, network and coordination store.
It is thin and decides nothing.

The driver is the broker's committer: the broker reports which entries are written and stored, the
driver passes this to the core, and reports the core's commits to the broker. On a slave, the driver
receives entries from the mesh, checks them, passes them through the core, and writes them before it
answers.

    state file    synced before any message that depends on it. If the disk has no room even for
                  that, the replica waits until there is some: it neither votes nor takes entries,
                  and other replicas see a network that drops messages
    log           changed in the order reset, truncate, append; with a full disk, entries are
                  dropped, as a network might drop them
    broker        serves from the moment this epoch's barrier is committed until the role is lost
    store         reopened in a thread when the state must go back. Until that is done, the driver
                  neither receives nor sends messages of peers, and other calls of the core wait.
                  Other replicas see a slow replica, which is no worse than a lossy network

`Driver._handle` is the sequence of all this, and says what a crash leaves between two of its steps.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, Final, Protocol

from qmq.errors import (
    CoordinationError,
    DiskFull,
    InvariantBroken,
    LogDamaged,
    ProtocolViolation,
    Unavailable,
    check,
)
from qmq.log import follower
from qmq.log.log_config import Flush
from qmq.log.merged_log import read_merged
from qmq.log.reading import ColdRead, ObjectDamaged
from qmq.log.recent_writes import Place
from qmq.log.store import Store
from qmq.process.event_loop import Clock
from qmq.rpc.network import NETWORK, Network
from qmq.wire.frame import Frame
from qmq_replication import wire
from qmq_replication.coordinator import Coordinator, Holding
from qmq_replication.core import Replica
from qmq_replication.history import EpochRun, History
from qmq_replication.identity import ReplicaIdentity
from qmq_replication.links import (
    InboundConnection,
    InboundLink,
    InboundLinks,
    Mesh,
    PeerHello,
    Secret,
)
from qmq_replication.membership import ReplicaMembership
from qmq_replication.ready import (
    Ack,
    Append,
    Campaign,
    LogChunk,
    MembershipChange,
    Message,
    Mismatch,
    Ready,
    ReplicaState,
    Request,
    Resign,
    Role,
    Timing,
)

log = logging.getLogger("qmq.replication")

HOLD_S: Final = 1.5
TICK_S: Final = 0.05
FULL_PAUSE_MS: Final = 500


class CoordinationRequests:
    """Carries out the core's requests to the coordination store,
    and passes the answers to the core.
    """

    def __init__(
        self,
        core: Replica,
        coordinator: Coordinator,
        clock: Clock,
        *,
        call_core: Callable[[Callable[[int], object]], None],
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        on_held: Callable[[int, Holding, int], None],
    ) -> None:
        """`clock` is the clock of the leases. `call_core` calls the core with the time.
        `spawn` runs a job until the driver stops.
        """
        self._core = core
        self._coordinator = coordinator
        self._clock = clock
        self._call_core = call_core
        self._spawn = spawn
        self._on_held = on_held
        self._looking: asyncio.Task[None] | None = None

    def begin(self, request: Request) -> None:
        """Begin to carry out the request."""
        if isinstance(request, Campaign):
            self._spawn(self.campaign())
        elif isinstance(request, Resign):
            self._spawn(self._coordinator.resign(request.epoch))
        elif isinstance(request, MembershipChange):
            self._spawn(self._change(request))
        elif self._looking is None or self._looking.done():
            self._looking = self._spawn(self._look_up())

    async def _look_up(self) -> None:
        try:
            epoch, membership = await self._coordinator.look_up()
        except CoordinationError as failure:
            log.debug("reading the epoch from the coordination store failed: %s", failure)
            return
        self._call_core(lambda now_ms: self._core.on_lookup(now_ms, epoch, membership))

    async def campaign(self) -> None:
        """Ask for a new epoch, if the core still campaigns."""
        if self._core.state.role is not Role.CAMPAIGNING:
            # requested before an earlier campaign won: winning again would lose that epoch's claim
            return
        won = await self._coordinator.campaign(
            self._core.state.promised, above=self._core.refused_epoch
        )
        if won is None:
            self._call_core(lambda now_ms: self._core.campaign_lost(now_ms))
        else:
            epoch, membership = won.epoch, won.membership
            self._call_core(lambda now_ms: self._core.campaign_won(now_ms, epoch, membership))

    async def _change(self, request: MembershipChange) -> None:
        done = await self._coordinator.change(request.before, request.after)
        leader = self._core.leader
        if leader is not None and leader.epoch == request.epoch:
            self._call_core(lambda _: leader.changed(done))

    async def keep_key(self, epoch: int) -> None:
        """Keep the master's key as long as the core leads in this epoch."""
        while True:
            leader = self._core.leader
            if leader is None or leader.epoch != epoch:
                return
            asked_ms = self._clock.monotonic_ms()
            try:
                held = await self._coordinator.renew_key()
            except CoordinationError as failure:
                log.warning(
                    "the coordination store does not answer, the group continues without it: %s",
                    failure,
                )
            else:
                self._on_held(epoch, held, asked_ms)
                self._call_core(
                    lambda now_ms, highest=held.epoch: self._core.superseded(now_ms, highest)  # type: ignore[misc]
                )
            await asyncio.sleep(HOLD_S)


class Host(Protocol):
    """The broker, as the driver uses it."""

    @property
    def store(self) -> Store: ...

    @property
    def is_serving(self) -> bool: ...

    def serve(self, store: Store) -> None:
        """Begin to serve clients."""
        ...

    def retire(self) -> None: ...

    def commit(self, index: int) -> None:
        """Entries up to `index` are committed."""
        ...

    def flushed(self, index: int) -> None:
        """Entries up to `index` are committed, and flushed on a majority."""
        ...

    def schedule(self) -> None:
        """Request a turn soon: an entry was written."""
        ...


class StoreLog:
    """The store as the core's `Log`."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def place(self) -> Place:
        """The ends of the message log and the action log."""
        store = self._host.store
        return store.messages.end, store.actions.end

    def read(self, place: Place, after: int, bytes_max: int) -> LogChunk | None:
        """Read from memory, from the files, or from the object store. Raises LogDamaged."""
        store, (messages, actions) = self._host.store, place
        begin = (messages, actions)  # the place came over the wire, as a list
        found = store.tail.read(begin, after, bytes_max)
        if found is None:
            try:
                found = read_merged(store.logs, begin, after, bytes_max)
            except (ColdRead, ObjectDamaged):
                # an operator puts a damaged object back; the other replicas continue meanwhile
                return LogChunk(after, (), begin, 0)
        if found is None or not found.runs:
            return None
        return LogChunk(found.last, found.runs, found.place, found.size)

    def start(self) -> tuple[int, int, Place]:
        """The position after which the log still has all entries."""
        store = self._host.store
        index, epoch = store.start()
        return epoch, index, (store.messages.start, store.actions.start)


@dataclass(frozen=True, slots=True)
class DriverCalls:
    """What a driver asks of its node."""

    reopen: Callable[[int | None, Place | None], Awaitable[Store]]
    """Reopens the store, cut behind an index or started over at a place,
    and hands it to the host.
    """
    save: Callable[[ReplicaIdentity], None]
    """Puts the identity on disk, synced."""
    fatal: Callable[[BaseException], None]
    """Stops the process."""
    report_damage: Callable[[LogDamaged], bool]
    """Gets damage that was found while reading for a slave;
    returns True if a repair is under way.
    """
    may_serve: Callable[[], bool]
    """False while this replica lacks data that it needs to serve clients: as master it then leads
    without serving.
    """
    on_role: Callable[[Role], None]
    """Gets each new role."""
    on_held: Callable[[int, Holding, int], None]
    """Gets the store's answer that a lease is alive: the epoch, the answer, the time of the request
    (by `lease_clock`).
    """


@dataclass(frozen=True, slots=True)
class DriverSurroundings:
    """The time and the network of a driver."""

    clock: Clock
    lease_clock: Clock
    """The clock of leases in the coordination store."""
    timing: Timing = field(default_factory=Timing)
    network: Network = NETWORK


class Driver:
    """Runs one replica from `start` to `stop`."""

    def __init__(
        self,
        host: Host,
        identity: ReplicaIdentity,
        membership: ReplicaMembership,
        coordinator: Coordinator,
        calls: DriverCalls,
        surroundings: DriverSurroundings,
        *,
        asks_reset: bool = False,
    ) -> None:
        """`asks_reset`: an empty log starts over where the master's begins (`reopen`), before it
        gets entries.
        """
        self.host = host
        self.identity = identity
        self.coordinator = coordinator
        self._calls = calls
        self._clock = surroundings.clock
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._ticker: asyncio.Task[None] | None = None
        self._full_until_ms = 0
        self._timing = surroundings.timing
        self.secret = Secret(identity.secret.encode())
        self.mesh = Mesh(
            PeerHello(identity.group, identity.replica),
            self.secret,
            self._disconnected,
            surroundings.network,
        )
        self.core = self._new_core(membership, asks_reset=asks_reset)
        self.requests = CoordinationRequests(
            self.core,
            coordinator,
            surroundings.lease_clock,
            call_core=self._on_store_answer,
            spawn=self._spawn,
            on_held=calls.on_held,
        )
        self.arrivals = InboundLinks(
            identity.group,
            identity.replica,
            secret=lambda: self.secret.value,
            members=lambda: self.core.members,
            on_message=self._on_message,
        )
        self.violations = 0
        """The number of messages from proved peers that no replica would send."""
        self._opening: asyncio.Task[None] | None = None
        self._held: Ready | None = None
        """The rest of the instructions that did not fit on the full disk."""
        self._is_saved = False
        self._full_told = False
        self._try_again_ms = 0
        self._waiting: dict[object, Callable[[int], object]] = {}
        """Calls of the core that wait until the store is reopened or the disk has room. Of calls
        with the same key the last one counts: a full disk may last for days.
        """

    def _new_core(self, membership: ReplicaMembership, *, asks_reset: bool) -> Replica:
        store = self.host.store
        index, epoch = store.start()
        history = History(
            [EpochRun(*each) for each in store.epochs if each[1] > index], store.index, index, epoch
        )
        state = ReplicaState(
            self.identity.replica,
            membership,
            self.identity.state,
            history,
            StoreLog(self.host),
            timing=self._timing,
            now_ms=self._clock.monotonic_ms(),
            commit=min(store.committed_index, store.index),
        )
        return Replica(state, random=Random(), asks_reset=asks_reset)  # noqa: S311

    def start(self) -> None:
        """Join the group, once the identity is saved: what it says about the past must not be lost
        before new entries are taken.
        """
        if not self._saved():
            self._held = Ready()
        self.core.stored(self.host.store.index)
        self.core.flushed(self.host.store.flushed_index)
        self._ticker = self._loop.create_task(self._tick())

    async def _tick(self) -> None:
        while True:
            due_ms = self._clock.monotonic_ms() + int(TICK_S * 1000)
            await asyncio.sleep(TICK_S)
            if self._held is not None or not self._is_saved:
                self._try_again(due_ms)
            if not self.is_waiting:
                self.call_core(
                    lambda now_ms, due_ms=due_ms: self.core.tick(now_ms, now_ms - due_ms)  # type: ignore[misc]
                )

    def call_core(self, act: Callable[[int], object], key: object = None) -> None:
        """Call the core and carry out the result. While the store is being reopened or the disk is
        full, the call waits, and replaces an earlier one with the same key: of news about the same
        thing the newest counts.

        A broken invariant stops the process.
        """
        if self.is_waiting:
            key = object() if key is None else key
            self._waiting.pop(key, None)
            self._waiting[key] = act
            return
        try:
            act(self._clock.monotonic_ms())
            self._carry_out()
        except LogDamaged as failure:
            if not self._calls.report_damage(failure):
                self._calls.fatal(failure)
        except Exception as cause:
            self._calls.fatal(cause)

    # --- from the broker --------------------------------------------------------------------------

    def written(self, index: int) -> None:
        leader = self.core.leader
        if leader is None or index <= self.core.state.history.last_index:
            return
        self.call_core(lambda _: self._written(index), "written")

    def _written(self, index: int) -> None:
        leader = self.core.leader
        if leader is None:
            raise InvariantBroken(
                f"index {index} was written although this replica is not the master"
            )
        leader.appended(index)
        if self.host.store.config.flush is Flush.ASYNC:
            self.core.stored(index)

    def stored(self, index: int) -> None:
        """See qmq.broker.parts.Committer. Without effect while the core must wait: it gets the
        store's index then (`_resume`).
        """
        if self.is_waiting:
            return

        def report(_: int) -> None:
            if self.host.store.config.flush is Flush.SYNC:
                self.core.stored(index)
            self.core.flushed(index)

        self.call_core(report)

    def flush_wanted(self, index: int) -> None:
        if self.core.leader is not None:
            self.core.leader.want_flush(index)

    # --- from the peers ---------------------------------------------------------------------------

    def accept(self, first: Frame, connection: InboundConnection) -> InboundLink:
        """Accept a connection of another replica. Raises ProtocolViolation, or Unavailable (also
        before `start`).
        """
        if self._ticker is None:
            raise Unavailable(f"{self.identity.replica} is starting: connect again")
        return self.arrivals.accept(first, connection)

    @property
    def refused(self) -> dict[str, int]:
        """Counts of refused connections and messages; the core's counts are since its start."""
        return {
            "hello": self.arrivals.refused,
            "message": self.core.strangers_heard,
            "violation": self.violations,
        }

    def set_secret(self, secret: bytes) -> None:
        """Use this secret of the group, which the coordination store has."""
        self.secret.set(secret)
        if secret and self.identity.secret != secret.decode():
            self.identity = replace(self.identity, secret=secret.decode())
            self._saved()

    def _on_message(self, sender: str, frame: Frame) -> None:
        """Handle a message of a proved peer. Raises ProtocolViolation or CorruptBatch, which close
        this peer's connection only.
        """
        if self.is_waiting:
            return
        message = wire.unpack(frame.payload)
        if (
            isinstance(message, Append)
            and message.payload is not None
            and not self._has_room(message.payload)
        ):
            return
        refused: list[ProtocolViolation] = []

        def step(now_ms: int) -> None:
            try:
                self.core.step(now_ms, sender, message)
            except ProtocolViolation as violation:
                refused.append(violation)

        self.call_core(step)
        if refused:
            self.violations += 1
            log.error(
                "replica %s sent an invalid message, its connection is closed: %s",
                sender,
                refused[0],
            )
            raise refused[0]

    def _has_room(self, stretch: wire.LogStretch) -> bool:
        """True if the disk has room. To the core,
        a full disk looks like a network that drops messages.
        """
        now_ms = self._clock.monotonic_ms()
        if now_ms < self._full_until_ms:
            return False
        try:
            self.host.store.require_space_to_follow(
                stretch.entries, sum(run.size for run in stretch.runs)
            )
        except DiskFull as failure:
            log.warning(
                "storing the master's entries failed, they are refused for a while: %s", failure
            )
            self._full_until_ms = now_ms + FULL_PAUSE_MS
            return False
        return True

    def _disconnected(self, peer: str) -> None:
        self.call_core(lambda now_ms: self.core.disconnected(now_ms, peer), ("disconnected", peer))

    # --- carrying out -----------------------------------------------------------------------------

    def _carry_out(self) -> None:
        while not self.is_waiting:
            ready = self.core.take()
            if not ready:
                return
            self._handle(ready)

    def _handle(self, ready: Ready) -> None:
        """Carry out the core's instructions, in the order of the contract (ready.py).

        Steps 1 and 2 may have to wait. Then `_handle` returns, and the core is not called
        (`is_waiting`), until `_resume` handles `ready` again from the beginning: what is done was
        removed from it. Steps 3 to 6 wait for nothing. The Ack of what step 2 wrote belongs to a
        later Ready: the core is told with `Flush.ASYNC` as soon as it is written, with `Flush.SYNC`
        when it is flushed (`stored`).

        If the process dies

            before or in 1   the old state is on disk, or the new one. No message has told of the
                             new one
            after 1          a promise holds, as if its message were lost. The log still has what
                             was to be cut: it mismatches, and gets in step again. A reset begins
                             once more, because `resetting_until` is on disk
            in 2             the log may be shorter, or end with a part of the entries. None of them
                             is acknowledged: they are sent again
            after 2, in 3    messages are lost, as by a network
            after 3, in 4    what is committed stays committed: the next master has it. Clients
                             without an answer do not know the outcome
            after 4, in 5    the same, for what is flushed on a majority
            after 5, in 6    an epoch without a barrier stays unused: the next one is higher. A
                             request to the coordination store is made or not: the key of a dead
                             master expires, and the next master reads the membership with its epoch
        """
        # A replica that is no master any more answers no client from here on: step 2 may cut what
        # is not committed.
        is_no_master = ready.role not in (None, Role.MASTER)
        if is_no_master:
            self.host.retire()

        # 1. The state is saved, synced. If the disk has no room for it, everything else waits until
        #    a tick can save it.
        if ready.save is not None:
            self.identity, ready.save = self.identity.with_state(ready.save), None
            if not self._saved():
                self._held = ready
                return

        # 2. The log is reset, or cut. To undo applied entries, or changes in memory that are not
        #    written yet, a thread reopens the store; everything else waits for it.
        store = self.host.store
        must_undo = store.unwritten.waits and (ready.truncate is not None or is_no_master)
        if ready.reset is not None:
            log.warning(
                "starting over after index %d: the master has no older entries",
                ready.reset.start_index,
            )
            self._opening = self._spawn(self._reopen_store(ready, None, tuple(ready.reset.place)))
            return
        if must_undo or (
            ready.truncate is not None and not follower.truncate(store, ready.truncate)
        ):
            self._opening = self._spawn(self._reopen_store(ready, ready.truncate, None))
            return
        if ready.truncate is not None:
            log.warning(
                "the log was cut after index %d: the new master does not have the entries after it",
                ready.truncate,
            )
            check(
                store.index == ready.truncate,
                f"the log ends at {store.index} after cutting to {ready.truncate}",
            )
            ready.truncate = None

        #    Then the log is extended. The flush comes in a later turn of the broker, and nothing
        #    here waits for it.
        while ready.append:
            append = ready.append[0]
            stretch: wire.LogStretch = append.payload
            try:
                follower.take(store, stretch.runs, stretch.entries)
            except DiskFull as failure:  # another program took the space after it was asked for
                self._held = ready
                self._is_full("storing the master's entries", failure)
                return
            check(
                store.index == append.last_index,
                f"the log ends at {store.index}, and its master says {append.last_index}",
            )
            if store.config.flush is Flush.ASYNC:
                self.core.stored(store.index)
            self.host.schedule()
            del ready.append[0]

        # 3. Messages are sent: they report 1, and where the log ends after 2.
        for to, message in ready.messages:
            self._send(to, message)

        # 4. The broker applies what is committed, and answers.
        if ready.commit is not None:
            self.host.commit(ready.commit)
            self.serve_if_due()

        # 5. It answers what is flushed on a majority, and flushes soon what a client waits for.
        if ready.flushed is not None:
            self.host.flushed(ready.flushed)
        if ready.flush is not None:
            store.flush_wanted = ready.flush
            self.host.schedule()

        # 6. The new role is told, a master writes its barrier, and requests go to the coordination
        #    store.
        if ready.role is not None:
            log.info(
                "%s is %s in epoch %d",
                self.identity.replica,
                ready.role.value,
                self.core.state.promised,
            )
            self._calls.on_role(ready.role)
        if ready.lead is not None:
            self._lead(ready.lead)
        for request in ready.requests:
            self.requests.begin(request)

    def _send(self, to: str, message: Message) -> None:
        if isinstance(message, Ack | Mismatch):
            message = message._replace(
                place=(self.host.store.messages.end, self.host.store.actions.end)
            )
        self.mesh.send(to, wire.pack(message))

    def serve_if_due(self) -> None:
        """Serve clients, if this epoch's barrier is committed and nothing else is missing."""
        leader = self.core.leader
        if (
            leader is not None
            and leader.is_serving
            and not self.host.is_serving
            and self._calls.may_serve()
        ):
            log.info("%s serves in epoch %d", self.identity.replica, leader.epoch)
            self.host.serve(self.host.store)

    def _lead(self, epoch: int) -> None:
        store = self.host.store
        store.apply_pending()
        try:
            store.append_barrier(epoch)
        except DiskFull as failure:
            log.warning("opening an epoch as master failed, stepping down: %s", failure)
            self.core.become_slave(self._timing.suspect_ms * 3)
            self.core.state.ready.requests.append(Resign(epoch))
            return
        self._written(store.index)
        self.host.schedule()
        self._spawn(self.requests.keep_key(epoch))

    def _spawn(self, job: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(job)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._calls.fatal(task.exception() or RuntimeError("a task failed"))

    # --- waiting for the store, or for room -------------------------------------------------------

    @property
    def is_opening(self) -> bool:
        """True while the store is being reopened. Its files change during this time."""
        return self._opening is not None

    @property
    def is_waiting(self) -> bool:
        """True while the core must not be called:
        the store is being reopened, or the disk is full.
        """
        return self._opening is not None or self._held is not None

    async def _reopen_store(self, ready: Ready, until: int | None, place: Place | None) -> None:
        begun_ms = self._clock.monotonic_ms()
        store = await self._calls.reopen(until, place)
        if ready.reset is not None:
            store.begin_at(ready.reset.start_index, ready.reset.start_epoch)
            self.core.lacks_until(store.gaps_until)
            ready.reset = None
        self._opening = None
        self._resume(ready, begun_ms)

    def _saved(self) -> bool:
        """Save the identity. False if the disk is full: a tick tries again then."""
        try:
            self._calls.save(self.identity)
        except DiskFull as failure:
            self._is_saved = False
            self._is_full("saving the replica's state", failure)
            return False
        self._is_saved = True
        return True

    def _is_full(self, what: str, failure: DiskFull) -> None:
        if not self._full_told:
            log.warning(
                "%s failed, the replica neither votes nor stores entries until there is room: %s",
                what,
                failure,
            )
        self._full_told, self._try_again_ms = True, self._clock.monotonic_ms() + FULL_PAUSE_MS

    def _try_again(self, waits_since_ms: int) -> None:
        """Save the identity, and go on with the instructions that did not fit."""
        if self._clock.monotonic_ms() < self._try_again_ms or not self._saved():
            return
        held, self._held = self._held, None
        if held is not None:
            self._resume(held, waits_since_ms)
        if self._full_told and not self.is_waiting:
            log.info("there is room on the disk again")
            self._full_told = False

    def _resume(self, ready: Ready, waits_since_ms: int) -> None:
        """Handle instructions that had to wait, then the calls of the core that waited. If they
        must wait once more, they do.
        """
        waiting, self._waiting = self._waiting, {}

        def handle(_: int) -> None:
            self._handle(ready)
            self.stored(
                self.host.store.flushed_index
            )  # not before: until a cut is done, this index counts entries that are cut

        self.call_core(handle)
        self.call_core(lambda now_ms: self.core.tick(now_ms, now_ms - waits_since_ms))
        for key, each in waiting.items():
            self.call_core(each, key)

    # --- the identity -----------------------------------------------------------------------------

    def remember(self, membership: ReplicaMembership, addresses: dict[str, str]) -> None:
        """Store what a start without the coordination store needs. An older membership than the
        known one is not stored: only that one shows that the store's data was put back.
        """
        known = self.identity.members()
        newest = membership if known is None or membership.version >= known.version else known
        found = replace(self.identity, membership=newest.encode().decode(), addresses=addresses)
        if found != self.identity:
            self.identity = found
            self._saved()

    def _on_store_answer(self, change: Callable[[int], object]) -> None:
        """Pass the store's answer to the core, and keep the membership that it may have changed."""
        self.call_core(change)
        self.remember(self.core.state.membership, self.identity.addresses)

    def grow(self, identity: ReplicaIdentity) -> None:
        """Save the identity's next generation. Raises DiskFull."""
        self._calls.save(identity)
        self.identity = identity

    def doubt(self, epoch: int) -> None:
        """This replica's folder is an older copy,
        and the store's highest epoch is `epoch`. Raises DiskFull.
        """
        promised = max(self.identity.promised, epoch)
        self.grow(replace(self.identity, promised=promised, is_whole=False))
        self.call_core(lambda now_ms: self.core.doubt(now_ms, epoch))

    # --- operators, and the end -------------------------------------------------------------------

    def act(self, do: Callable[[int], object]) -> None:
        """Pass an operator's request to the core. Raises the errors of `do`, which then has begun
        nothing, and Unavailable.
        """
        if self.is_opening:
            raise Unavailable(
                f"{self.identity.replica} is reopening its log: try again in a moment"
            )
        if self._held is not None:
            raise Unavailable(
                f"{self.identity.replica} waits for room on its disk: free some space"
            )
        do(self._clock.monotonic_ms())
        self.call_core(lambda _: None)

    async def stop(self) -> None:
        """Stop when the store is open. A master deletes its key,
        so that another replica takes over immediately.
        """
        if self._ticker is not None:
            self._ticker.cancel()
        # the thread that reopens the store cannot be stopped
        while self._opening is not None and not self._opening.done():
            await asyncio.wait([self._opening])
        epoch = self.core.leader.epoch if self.core.leader is not None else 0
        for task in list(self._tasks):
            task.cancel()
        if epoch:
            await self.coordinator.resign(epoch)
        await self.mesh.close()
