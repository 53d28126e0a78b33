"""Checks the subject's records in the coordination store at each change of them.

* Versions are consecutive. Each has one change, which is prepared once and goes through the phases in order.
* A version is published together with its change, when every source is sealed (committed) or fenced.
* A fence is put while nobody holds the group's master key and no master has a write lease. It is removed once the partition is sealed.
* A group's frontier moves by one version at a time, and only where the ledger has everything before it as done.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from qmq_coordination.coordination_store import KeyValue, WatchedChanges
from qmq_coordination.ordered_records import FENCES, ROUTES, Fence
from qmq_ordering.changes import next_route
from qmq_ordering.lanes import Frontier, Gate, GroupRecord
from qmq_ordering.routes import FENCED, Change, Phase, Route

from ordersim.violation import Violation

if TYPE_CHECKING:
    from ordersim.run import Simulation

PHASES = (Phase.PREPARED, Phase.SEALED, Phase.PUBLISHED, Phase.DONE)


@dataclass(slots=True)
class Group:
    """A consumer group. `since`: the version at which it began to read; `furthest`: the last one that it reached everywhere, which a replay
    of a key does not take back.
    """

    since: int
    record: GroupRecord
    furthest: int


class Routes:
    """Every route that was ever stored."""

    def __init__(self, simulation: Simulation, subject: str) -> None:
        self._simulation = simulation
        self._prefix = f"{ROUTES}{subject}/"
        self.latest = 0
        self.routes: dict[int, Route] = {}
        self.changes: dict[int, Change] = {}
        self.groups: dict[str, Group] = {}
        self.fences: dict[int, Fence] = {}
        self._known_at: dict[int, tuple[str, ...]] = {}
        """The groups that there were when a version was published."""

    def changed(self, changes: WatchedChanges, before: dict[str, KeyValue]) -> None:
        """The store has another revision."""
        events = sorted(changes.events, key=lambda event: "/latest" in event.key)
        for event in events:
            if event.now is None:
                self._deleted(event.key)
                continue
            simulation = self._simulation
            simulation.tracer.put(event.key, event.now.value, at_ms=simulation.world.now, has=simulation.etcd.items.__contains__)
            if event.key.startswith(FENCES):
                self._fenced(event.key, event.now.value)
            elif event.key.startswith(self._prefix):
                self._put(event.key[len(self._prefix) :], event.now.value, before.get(event.key))

    def _put(self, key: str, value: bytes, before: KeyValue | None) -> None:
        what, _, name = key.partition("/")
        if what == "v":
            self._routed(Route.decode(value), is_new=before is None)
        elif what == "c":
            self._change(Change.decode(value))
        elif what == "g":
            self._group(name, GroupRecord.decode(value))
        elif what == "latest":
            self._latest(int(value))

    # --- versions --------------------------------------------------------------------------------------------------------

    def _routed(self, route: Route, *, is_new: bool) -> None:
        version = route.version
        if not is_new or version != self.latest + 1:
            raise Violation(f"routes: version {version} is put while {self.latest} is the latest")
        if version > 1:
            change = self.changes[version]
            if next_route(self.routes[version - 1], change) != route:
                raise Violation(f"routes: version {version} is not what its change leads to: {route}")
            self._require_closed(change)
        self.routes[version] = route
        for part in route.partitions:
            self._simulation.ledger.open(part, version)
        self._simulation.tell("etcd", f"version {version}: " + " ".join(f"{p.number}{p.range}@{p.group}" for p in route.partitions))

    def _require_closed(self, change: Change) -> None:
        for number in change.sources:
            part = self._simulation.ledger.parts[number]
            fence = self.fences.get(number)
            if part.sealed_at < 0 and (fence is None or fence.change_id != change.id):
                raise Violation(f"publish: version {change.to_version} is published, and partition {number} is neither sealed nor fenced")

    def _latest(self, version: int) -> None:
        if version != self.latest + 1 or version not in self.routes:
            raise Violation(f"routes: the latest version goes from {self.latest} to {version}")
        if version > 1 and self.changes[version].phase is not Phase.PUBLISHED:
            raise Violation(f"routes: version {version} is the latest, and its change is {self.changes[version].phase.value}")
        self.latest = version
        self._known_at[version] = tuple(self.groups)

    def _change(self, change: Change) -> None:
        before = self.changes.get(change.to_version)
        if before is None and (change.phase is not Phase.PREPARED or change.to_version != self.latest + 1):
            raise Violation(f"changes: {change.id} to version {change.to_version} begins {change.phase.value}, the latest is {self.latest}")
        if before is not None:
            steps = PHASES.index(change.phase) - PHASES.index(before.phase)
            if change.id != before.id or steps not in (0, 1) or (steps == 0 and change.phase is Phase.PREPARED):
                raise Violation(f"changes: {before.id} ({before.phase.value}) to version {change.to_version} becomes {change}")
            if change.phase is Phase.DONE and before.phase is Phase.PUBLISHED:
                known = self._known_at[change.to_version]  # one that begins while the groups are counted may be missed: nothing hangs on it
                behind = [name for name in known if self.groups[name].furthest < change.to_version]
                if behind:
                    raise Violation(f"changes: {change.id} to version {change.to_version} is done, and {behind} are behind")
        for number, sequence in change.sealed.items():
            part = self._simulation.ledger.parts[number]
            if sequence not in (FENCED, part.sealed_at):
                raise Violation(f"seal: change {change.id} says that {number} is sealed at {sequence}, committed is {part.sealed_at}")
        self.changes[change.to_version] = change
        what = f"{change.id} {change.kind.value} to {change.to_version}: {change.phase.value} {dict(change.sealed)}"
        self._simulation.tell("etcd", f"change {what}")

    # --- fences ----------------------------------------------------------------------------------------------------------

    def _fenced(self, key: str, value: bytes) -> None:
        simulation = self._simulation
        number, fence, name = int(key.rsplit("/", 1)[1]), Fence.decode(value), key[len(FENCES) :].partition("/")[0]
        self.fences[number] = fence
        simulation.ledger.note_fence(key, simulation.world.now)
        simulation.faults["partition fenced"] += 1
        simulation.tell("etcd", f"partition {number} on {name} is FENCED for change {fence.change_id}")
        if f"/qmq/groups/{name}/master" in simulation.etcd.items:
            raise Violation(f"fence: partition {number} is fenced while a master of {name} holds its key")
        for replica in simulation.groups[name].processes():
            if replica.epoch and replica.right():
                raise Violation(f"fence: partition {number} is fenced, and {replica.name} still has the right to append to it")

    def _deleted(self, key: str) -> None:
        if key.startswith(FENCES):
            number = int(key.rsplit("/", 1)[1])
            self._simulation.tell("etcd", f"the fence of partition {number} is removed")
            if self._simulation.ledger.parts[number].sealed_at < 0:
                raise Violation(f"fence: the fence of partition {number} is removed, and the partition is not sealed, as committed")

    # --- groups ----------------------------------------------------------------------------------------------------------

    def _group(self, name: str, record: GroupRecord) -> None:
        known = self.groups.get(name)
        if known is None:
            self.groups[name] = Group(record.frontier.version, record, record.frontier.version)
            self._simulation.tell("etcd", f"group {name} begins at {record}")
            return
        before, known.record = known.record, record
        known.furthest = max(known.furthest, record.frontier.version)
        if record.frontier != before.frontier:
            pieces = " ".join(f"{piece.range}v{piece.version}" for piece in record.frontier.pieces)
            self._simulation.tell("etcd", f"group {name}: {pieces} ({record.gate.value})")
        if record.start.startswith("unpark:") and not record.is_ready:
            return
        moved: dict[int, list[int]] = {}
        for lp in range(self._simulation.plan.logical_partitions):
            was, now = version_at(before.frontier, lp), version_at(record.frontier, lp)
            if now not in (was, was + 1):
                raise Violation(f"frontier: group {name} goes from version {was} to {now} in logical partition {lp}")
            if now > was:
                moved.setdefault(now, []).append(lp)
        for version, lps in moved.items():
            self._advanced(name, before.gate, version, lps)

    def _advanced(self, name: str, gate: Gate, version: int, lps: list[int]) -> None:
        if version not in self.routes:
            raise Violation(f"frontier: group {name} goes to version {version}, and {self.latest} is the latest")
        change, route = self.changes[version], self.routes[version - 1]
        if gate is Gate.STRICT:
            lps = [lp for part in route.partitions if part.number in change.sources for lp in range(*part.range)]
        for lp in lps:
            number = route.holder(lp).number
            if number in change.sources and not self._simulation.ledger.parts[number].is_finished(name, lp):
                raise Violation(
                    f"frontier: group {name} ({gate.value}) goes to version {version}, and logical partition {lp} of partition {number} "
                    "is not finished, as committed"
                )


def version_at(frontier: Frontier, lp: int) -> int:
    """The version in a logical partition."""
    return next(piece.version for piece in frontier.pieces if piece.range.first <= lp < piece.range.end)
