"""The virtual clock, its events, and coroutines that wait for it. All events of a run happen here,
in one order.

The network between replicas: lost, late, doubled and reordered messages, repetitions much later,
cuts one way or both, clogged links.

When a process dies, messages on their way to it are lost with its connections. Messages that it
sent may still arrive.

A replica's disk: its log of entries, and its small state file.

The fault model: a killed process loses nothing that it wrote. A power cut keeps everything synced,
and of the writes since then a random prefix. (A real disk may also tear or reorder writes; the
recovery of the real log cuts at the first hole, tests/qmq/log.) A wiped disk keeps nothing. The
state file is always written with a sync. A full disk takes no entries; it takes the state, unless
the state's file needs a block more.

Simulated etcd: one linearizable store with leases, and an unreliable connection to it for each
replica.

A request may be lost (nothing happened), its answer may be lost (it happened), and both may be
late. Leases may end early: etcd promises nothing better to a client that it does not hear.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Coroutine, Generator, Sequence
from heapq import heappop, heappush
from itertools import zip_longest
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

from qmq_coordination.coordination_store import (
    Compare,
    CompareTarget,
    Delete,
    Get,
    KeyListing,
    KeyValue,
    LeaseId,
    Operation,
    Put,
    Revision,
    TxnResult,
)
from qmq_replication.history import EpochRun, History
from qmq_replication.ready import Ack, DurableState, LogChunk, Message

from qmq.errors import CoordinationUnavailable, CoordinationUnknown, LeaseNotFound

if TYPE_CHECKING:
    from sim.nemesis import Plan
    from sim.node import Node

_MASK = (1 << 61) - 1


class Future:
    """The future that a simulated coroutine awaits."""

    __slots__ = ("_error", "_result", "is_done", "wake")

    def __init__(self) -> None:
        self.is_done = False
        self.wake: Callable[[], None] | None = None
        self._result: Any = None
        self._error: BaseException | None = None

    def set(self, result: Any = None, error: BaseException | None = None) -> None:
        """Decide it, once."""
        if self.is_done:
            return
        self.is_done, self._result, self._error = True, result, error
        if self.wake is not None:
            self.wake()

    def __await__(self) -> Generator[Future, None, Any]:
        if not self.is_done:
            yield self
        if self._error is not None:
            raise self._error
        return self._result


class World:
    """Time in whole milliseconds. `trace` is a fingerprint of all that happened."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.now = 0
        self.trace = 0
        self.events = 0
        self._heap: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._number = 0

    def after(self, ms: int, act: Callable[..., None], *args: Any) -> None:
        """Do something later."""
        self._number = number = self._number + 1
        heappush(self._heap, (self.now + ms, number, act, args))

    def run(self, until: int) -> None:
        """Let everything happen that is to happen up to `until`."""
        heap, trace, events = self._heap, self.trace, self.events
        try:
            while heap and heap[0][0] <= until:
                self.now, number, act, args = heappop(heap)
                trace = (trace * 1_000_003 + self.now * 31 + number) & _MASK
                events += 1
                act(*args)
        finally:
            self.trace, self.events = trace, events
        self.now = until

    def spawn(self, coroutine: Coroutine[Future, None, None], is_alive: Callable[[], bool]) -> None:
        """Run a coroutine. It is dropped if its process is dead."""
        self._advance(coroutine, is_alive)

    def _advance(
        self, coroutine: Coroutine[Future, None, None], is_alive: Callable[[], bool]
    ) -> None:
        if not is_alive():
            coroutine.close()
            return
        try:
            waited = coroutine.send(None)
        except StopIteration:
            return
        waited.wake = lambda: self.after(0, self._advance, coroutine, is_alive)

    async def sleep(self, seconds: float) -> None:
        """A sleep for coroutines."""
        future = Future()
        self.after(int(seconds * 1000), future.set)
        await future


LATE_MS = 60_000
REMEMBERED = 40


class Network:
    """All links. `cut` has the (from, to) pairs that drop everything, `clogged` the messages that
    wait in stopped links.
    """

    def __init__(
        self, world: World, plan: Plan, nodes: dict[str, Node], faults: Counter[str]
    ) -> None:
        self._world = world
        self._plan = plan
        self._nodes = nodes
        self._faults = faults
        self._worst = plan.drop + plan.double + plan.late + plan.slow
        self.cut: set[tuple[str, str]] = set()
        self.clogged: dict[tuple[str, str], list[tuple[int, Message]]] = {}
        self.is_calm = False
        self._arrives: dict[tuple[str, str], int] = {}
        self._remembered: dict[str, dict[tuple[str, int], tuple[int, Message]]] = {}

    def send(self, sender: str, to: str, message: Message) -> None:
        """Put a message on its way."""
        if to not in self._nodes or (self.cut and (sender, to) in self.cut):
            return
        random = self._world.random.random
        node = self._nodes[to]
        fate = 1.0 if self.is_calm else random()
        if self.clogged and (sender, to) in self.clogged:
            self.clogged[sender, to].append((node.boot, message))
        elif fate >= self._worst:
            if self._plan.late and (fate > 0.97 or isinstance(message, Ack)):
                self._remember(sender, node, message)
            world, link = self._world, (sender, to)
            at = world.now + 1 + int(random() * 9)
            if self._plan.is_ordered:
                at = self._arrives[link] = max(at, self._arrives.get(link, 0))
            world.after(at - world.now, self._deliver, node, node.boot, sender, message)
        else:
            self._mistreat(fate, sender, node, message)

    def _remember(self, sender: str, node: Node, message: Message) -> None:
        """Keep messages for an echo: some of all kinds, and each sender's last acknowledgement of
        each epoch.
        """
        kept = self._remembered.setdefault(node.name, {})
        kept[sender, message.epoch if isinstance(message, Ack) else self._world.now] = (
            node.boot,
            message,
        )
        if len(kept) > REMEMBERED:
            del kept[next(iter(kept))]

    def _mistreat(self, fate: float, sender: str, node: Node, message: Message) -> None:
        random, plan = self._world.random.random, self._plan
        if fate < plan.drop:
            self._faults["message dropped"] += 1
            return
        delay_ms = 1 + int(random() * 9)
        if fate < plan.drop + plan.double:
            self._faults["message doubled"] += 1
            self._world.after(
                1 + int(random() * 9), self._deliver, node, node.boot, sender, message
            )
        elif fate < plan.drop + plan.double + plan.late:
            self._faults["message repeated late"] += 1
            self._world.after(
                int(random() * LATE_MS), self._deliver, node, node.boot, sender, message
            )
        else:
            self._faults["message slow"] += 1
            delay_ms = 10 + int(random() * plan.slow_ms)
        self._world.after(delay_ms, self._deliver, node, node.boot, sender, message)

    def _deliver(self, node: Node, boot: int, sender: str, message: Message) -> None:
        if node.boot == boot and not (self.cut and (sender, node.name) in self.cut):
            node.receive(sender, message)

    # --- faults -----------------------------------------------------------------------------------

    def heal(self) -> None:
        """Restore all links."""
        self.cut.clear()

    def isolate(self, name: str, *, is_inward: bool = True, is_outward: bool = True) -> None:
        """Cut one replica off, perhaps in one direction only."""
        for other in self._nodes:
            if is_inward:
                self.cut.add((other, name))
            if is_outward:
                self.cut.add((name, other))

    def split(self, left: set[str], right: set[str]) -> None:
        """Cut all links between two sides."""
        self.cut |= {(a, b) for a in left for b in right} | {(b, a) for a in left for b in right}

    def clog(self, link: tuple[str, str]) -> None:
        """Stop a link without losing messages."""
        self.clogged.setdefault(link, [])

    def flow(self, link: tuple[str, str]) -> None:
        """Restore a stopped link; everything that waited arrives, in any order."""
        node = self._nodes[link[1]]
        for boot, message in self.clogged.pop(link, ()):
            self._world.after(
                1 + int(self._world.random.random() * 9),
                self._deliver,
                node,
                boot,
                link[0],
                message,
            )

    def flow_backwards(self, link: tuple[str, str], within_ms: int) -> None:
        """The same, the latest first and the oldest last."""
        waiting = self.clogged.pop(link, [])
        for number, (boot, message) in enumerate(reversed(waiting)):
            self._world.after(
                1 + number * within_ms // len(waiting),
                self._deliver,
                self._nodes[link[1]],
                boot,
                link[0],
                message,
            )

    def echo(self, name: str) -> None:
        """Deliver copies of recent and of old messages to a replica, all in one step."""
        self._faults["echo"] += 1
        for (sender, _), (boot, message) in self._remembered.pop(name, {}).items():
            self._world.after(
                1 + int(self._world.random.random() * 30),
                self._deliver,
                self._nodes[name],
                boot,
                sender,
                message,
            )

    def tell_of_loss(self, name: str) -> None:
        """Close the connections of a process that died, or whose links broke; its peers notice
        soon.
        """
        for node in self._nodes.values():
            if node.name != name:
                self._world.after(
                    1 + int(self._world.random.random() * 50),
                    self._disconnected,
                    node,
                    node.boot,
                    name,
                )

    def _disconnected(self, node: Node, boot: int, name: str) -> None:
        if node.boot == boot:
            node.lost(name)


class Entry(NamedTuple):
    """One entry; a barrier has the value 0."""

    epoch: int
    value: int


class Image:
    """A log at one moment: `entries` follow index `start`."""

    __slots__ = ("entries", "start", "start_epoch")

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.start = 0
        self.start_epoch = 0

    @property
    def last(self) -> int:
        """Index of the last entry."""
        return self.start + len(self.entries)

    def do(self, kind: str, index: int, entries: tuple[Entry, ...]) -> None:
        """One write."""
        if kind == "add":
            self.entries.extend(entries)
        elif kind == "cut":
            del self.entries[index - self.start :]
        elif kind == "drop":
            self.start_epoch = self.entries[index - self.start - 1].epoch
            del self.entries[: index - self.start]
            self.start = index
        else:
            self.entries, self.start, self.start_epoch = [], index, entries[0].epoch

    def history(self) -> History:
        """The shape of the disk's content, as the real store recovers it."""
        runs: list[EpochRun] = []
        for index, entry in enumerate(self.entries, self.start + 1):
            if not runs or runs[-1].epoch != entry.epoch:
                runs.append(EpochRun(entry.epoch, index))
        return History(runs, self.last, self.start, self.start_epoch)


def kept_from(history: History, index: int) -> History:
    """A log's history after retention deleted the entries before `index`, as a reopened store gives
    it to its replica.
    """
    if index - 1 <= history.start_index:
        return history
    epoch = history.epoch_at(index - 1)
    assert epoch is not None
    runs = [
        run
        for run, following in zip_longest(history.runs, history.runs[1:])
        if following is None or following.first > index
    ]
    return History(runs, history.last_index, index - 1, epoch)


class Disk:
    """A simulated disk. It is also the core's `Log`."""

    checks_places = True

    def __init__(self, read_entries: int) -> None:
        self._read_entries = read_entries
        self.image = Image()
        self.state = DurableState()
        self.folder = 1
        self.is_full = False
        self.takes_state = True
        self._synced = Image()
        self._pending: list[tuple[str, int, tuple[Entry, ...]]] = []

    # --- writing ----------------------------------------------------------------------------------

    def write(self, kind: str, index: int, entries: tuple[Entry, ...] = ()) -> None:
        """Write; not synced yet."""
        self.image.do(kind, index, entries)
        self._pending.append((kind, index, entries))

    def sync(self, count: int) -> None:
        """The first `count` writes that were pending reach the disk."""
        for each in self._pending[:count]:
            self._synced.do(*each)
        del self._pending[:count]

    @property
    def pending(self) -> int:
        """Writes that a power cut may take."""
        return len(self._pending)

    def holds(self, index: int, entry: Entry, *, durably: bool) -> bool:
        """Whether the entry is here."""
        image = self._synced if durably else self.image
        place = index - image.start - 1
        return place < 0 or (place < len(image.entries) and image.entries[place] == entry)

    # --- faults -----------------------------------------------------------------------------------

    def cut_power(self, random: Random) -> bool:
        """Lose some of what was pending; True if there was any."""
        kept = random.randint(0, len(self._pending))
        is_lossy = kept < len(self._pending)
        self.sync(kept)
        self._pending.clear()
        self.image = Image()
        self.image.entries, self.image.start = list(self._synced.entries), self._synced.start
        self.image.start_epoch = self._synced.start_epoch
        return is_lossy

    def fill(self, *, takes_state: bool) -> None:
        """Other programs take the last byte."""
        self.is_full, self.takes_state = True, takes_state

    def empty(self) -> None:
        """There is room again."""
        self.is_full, self.takes_state = False, True

    def wipe(self) -> None:
        """A new disk."""
        self.forget_log()
        self.state = DurableState()
        self.folder += 1

    def forget_log(self) -> None:
        """Delete the log's files, and nothing else."""
        self.image, self._synced = Image(), Image()
        self._pending.clear()

    # --- for the core -----------------------------------------------------------------------------

    def place(self) -> int:
        """The end of the log."""
        return self.image.last

    def read(self, place: int, after: int, bytes_max: int) -> LogChunk | None:
        """Entries after `after`."""
        assert place == after or not self.checks_places, (
            f"read behind {after} at the place of {place}"
        )
        at = after - self.image.start
        if at < 0:
            return None
        found = tuple(self.image.entries[at : at + self._read_entries])
        last = after + len(found)
        return LogChunk(last, found, last, len(found))

    def start(self) -> tuple[int, int, int]:
        """The position after everything in the log."""
        return self.image.start_epoch, self.image.start, self.image.start


TIMEOUT_MS = 1_000
STORE_LATE_MS = 6_000


class Etcd:
    """The store itself: what happens when a request arrives."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.items: dict[str, KeyValue] = {}
        self.revision = 1
        self.leases: dict[int, tuple[int, int]] = {}
        self._next_lease = 1
        self.on_change: Callable[[str, bytes, bytes], None] = lambda key, before, after: None

    def txn(self, compares: Sequence[Compare], success: Sequence[Operation]) -> TxnResult:
        """Compare, then put or delete."""
        if not all(self._holds(each) for each in compares):
            return TxnResult(False, Revision(self.revision), ())
        for each in success:
            if isinstance(each, Put) and each.lease and each.lease not in self.leases:
                raise LeaseNotFound(f"lease {each.lease} has ended")
        self.revision += 1
        for each in success:
            if isinstance(each, Put):
                before = self.items.get(each.key)
                self.on_change(each.key, before.value if before else b"", each.value)
                created = before.create_revision if before else self.revision
                version = before.version + 1 if before else 1
                self.items[each.key] = KeyValue(
                    each.key, each.value, created, self.revision, version, each.lease
                )
            elif isinstance(each, Delete):
                self.items.pop(each.key, None)
        return TxnResult(True, Revision(self.revision), tuple(() for _ in success))

    def _holds(self, compare: Compare) -> bool:
        found = self.items.get(compare.key)
        if compare.target is CompareTarget.VALUE:
            return found is not None and found.value == compare.value
        actual = 0 if found is None else getattr(found, compare.target.value)
        return bool(actual == compare.value)

    def list(self, prefix: str) -> KeyListing:
        """Keys under a prefix."""
        items = tuple(self.items[key] for key in sorted(self.items) if key.startswith(prefix))
        return KeyListing(Revision(self.revision), items)

    def grant(self, ttl_s: float) -> LeaseId:
        """A lease."""
        lease = self._next_lease
        self._next_lease += 1
        self.leases[lease] = (self.world.now + int(ttl_s * 1000), int(ttl_s * 1000))
        self.world.after(int(ttl_s * 1000) + 1, self._expire, lease)
        return LeaseId(lease)

    def keep_alive(self, lease: LeaseId) -> float:
        """Start the lease's time again."""
        if lease not in self.leases:
            raise LeaseNotFound(f"lease {lease} has ended")
        ttl_ms = self.leases[lease][1]
        self.leases[lease] = (self.world.now + ttl_ms, ttl_ms)
        self.world.after(ttl_ms + 1, self._expire, lease)
        return ttl_ms / 1000

    def _expire(self, lease: int) -> None:
        if lease in self.leases and self.leases[lease][0] <= self.world.now:
            self.end(lease)

    def end(self, lease: int) -> None:
        """End a lease now; its keys go."""
        if self.leases.pop(lease, None) is None:
            raise LeaseNotFound(f"lease {lease} has ended")
        for key in [key for key, item in self.items.items() if item.lease == lease]:
            self.revision += 1
            del self.items[key]


class AskedStore:
    """The requests of a CoordinationStore to the simulated etcd. `_ask` brings a request there and
    the answer back.
    """

    def __init__(self, etcd: Etcd) -> None:
        self._etcd = etcd

    async def _ask(self, do: Callable[..., Any], *args: Any, is_change: bool) -> Any:
        raise NotImplementedError

    async def get(self, key: str) -> KeyValue | None:
        """See CoordinationStore."""
        found: KeyValue | None = await self._ask(self._etcd.items.get, key, is_change=False)
        return found

    async def list(self, prefix: str, *, revision: int = 0, limit: int = 0) -> KeyListing:
        """See CoordinationStore."""
        found: KeyListing = await self._ask(self._etcd.list, prefix, is_change=False)
        return found

    async def txn(
        self,
        compares: Sequence[Compare],
        success: Sequence[Operation],
        failure: Sequence[Operation] = (),
    ) -> TxnResult:
        """See CoordinationStore."""
        assert not any(isinstance(each, Get) for each in success)
        found: TxnResult = await self._ask(self._etcd.txn, compares, success, is_change=True)
        return found

    async def grant(self, ttl_s: float) -> LeaseId:
        """See CoordinationStore."""
        found: LeaseId = await self._ask(self._etcd.grant, ttl_s, is_change=False)
        return found

    async def keep_alive(self, lease: LeaseId) -> float:
        """See CoordinationStore."""
        found: float = await self._ask(self._etcd.keep_alive, lease, is_change=False)
        return found

    async def revoke(self, lease: LeaseId) -> None:
        """See CoordinationStore."""
        await self._ask(self._etcd.end, lease, is_change=True)


class Store(AskedStore):
    """One replica's way to etcd: a CoordinationStore whose network is bad."""

    def __init__(self, etcd: Etcd, is_cut: Callable[[], bool], loss: float, late: float) -> None:
        super().__init__(etcd)
        self._is_cut = is_cut
        self._loss = loss
        self._late = late

    async def _ask(self, do: Callable[..., Any], *args: Any, is_change: bool) -> Any:
        world = self._etcd.world
        future = Future()
        delay_ms = (
            world.random.randint(1, 20)
            if world.random.random() >= self._late
            else world.random.randint(500, STORE_LATE_MS)
        )
        world.after(delay_ms, self._arrive, future, do, args)
        failure = CoordinationUnknown if is_change else CoordinationUnavailable
        world.after(TIMEOUT_MS, future.set, None, failure("no answer (simulated)"))
        return await future

    def _arrive(self, future: Future, do: Callable[..., Any], args: tuple[Any, ...]) -> None:
        world = self._etcd.world
        if self._is_cut() or world.random.random() < self._loss:
            return
        try:
            result, error = do(*args), None
        except LeaseNotFound as cause:
            result, error = None, cause
        if world.random.random() >= self._loss:
            world.after(world.random.randint(1, 20), future.set, result, error)
