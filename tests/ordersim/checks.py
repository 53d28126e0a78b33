"""Compares the results that producers and handlers got with the ledger.

* A producer gets "stored" only for a committed message, with its position.
* A handler gets only committed messages, and none of a parked key. In a range of logical partitions
  it gets messages of a version only when everything of the earlier versions is done there, as
  committed.
* No message overtakes an earlier one of its key in its partition: that is done, parked, or finished
  by a handler since its last replay.
* Of each key, a group gets first deliveries in the order of sending; a redelivery returns to an
  earlier message and comes forward again without leaving one out. Messages whose producer got an
  unknown outcome, and messages set aside, are exempt.
* A message that failed as "not stored" is in no log. At the end no acknowledged message is missing,
  and every one was finished by a handler of each group, or skipped by an operator.

The committed entries, read from the logs and interpreted independently of the product: all checks
compare with this.

For each partition the ledger has its messages and its command message, and for each consumer group
the grants, settled messages and parked keys. It checks each entry when it appears:

    no entry follows a command message; nobody appends to a partition after it was fenced in real
    time, no message of a key is appended to a partition after one of the key was appended to a
    later version's partition a second copy exists only if the first one's partition was fenced, and
    has the same message id grants never overlap, tokens grow, and a void token settles nothing a
    settled message was handed to a handler and finished there

Checks the subject's records in the coordination store at each change of them.

* Versions are consecutive. Each has one change, which is prepared once and goes through the phases
  in order.
* A version is published together with its change, when every source is sealed (committed) or
  fenced.
* A fence is put while nobody holds the group's master key and no master has a write lease. It is
  removed once the partition is sealed.
* A group's frontier moves by one version at a time, and only where the ledger has everything before
  it as done.

Reads the committed entries of broker groups from their stores' files, each once, in order.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from qmq_coordination.coordination_store import KeyValue, WatchedChanges
from qmq_coordination.ordered_records import FENCES, ROUTES, Fence
from qmq_ordering.changes import next_route
from qmq_ordering.lanes import Frontier, Gate, GroupRecord
from qmq_ordering.routes import FENCED, Change, LpRange, Phase, PhysicalPartition, Route

from ordersim.loop import Violation
from qmq.log import command_messages
from qmq.log.actions import (
    LaneBegin,
    LaneDone,
    LaneGrant,
    LaneInherit,
    LanePark,
    LaneRelease,
    LaneUnpark,
    decode_actions,
)
from qmq.log.envelopes import Entry, walk
from qmq.log.segments import Segments
from qmq.log.store import Store
from qmq.model import MessageId
from qmq.wire.batch import BatchView, Kind, unwrap

if TYPE_CHECKING:
    from ordersim.run import Simulation
    from ordersim.servers import BrokerGroup
    from qmq.client.consuming.ordered.message import OrderedMessage


class CommittedLogs:
    def __init__(self) -> None:
        self._places: dict[str, list[int]] = {}

    def read(self, group: str, store: Store, until: int) -> Iterator[Entry]:
        """The entries of a group up to a committed index that were not read before. Its replicas'
        files are the same.
        """
        places = self._places.setdefault(group, [0, 0])
        entries = [
            _entries(segments, place, until)
            for segments, place in zip(store.logs, places, strict=True)
        ]
        both = [
            [(entry.envelope.index, log, entry) for entry in each]
            for log, each in enumerate(entries)
        ]
        for _, log, entry in heapq.merge(*both, key=lambda each: each[0]):
            places[log] = entry.end
            yield entry


def _entries(segments: Segments, position: int, until: int) -> list[Entry]:
    found: list[Entry] = []
    for entry in walk(segments, position):
        if entry.envelope.index > until:
            break
        found.append(entry)
    return found


PHASES = (Phase.PREPARED, Phase.SEALED, Phase.PUBLISHED, Phase.DONE)


@dataclass(slots=True)
class Group:
    """A consumer group. `since`: the version at which it began to read; `furthest`: the last one
    that it reached everywhere, which a replay of a key does not take back.
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
            simulation.tracer.put(
                event.key,
                event.now.value,
                at_ms=simulation.world.now,
                has=simulation.etcd.items.__contains__,
            )
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

    # --- versions ---------------------------------------------------------------------------------

    def _routed(self, route: Route, *, is_new: bool) -> None:
        version = route.version
        if not is_new or version != self.latest + 1:
            raise Violation(f"routes: version {version} is put while {self.latest} is the latest")
        if version > 1:
            change = self.changes[version]
            if next_route(self.routes[version - 1], change) != route:
                raise Violation(
                    f"routes: version {version} is not what its change leads to: {route}"
                )
            self._require_closed(change)
        self.routes[version] = route
        for part in route.partitions:
            self._simulation.ledger.open(part, version)
        self._simulation.tell(
            "etcd",
            f"version {version}: "
            + " ".join(f"{p.number}{p.range}@{p.group}" for p in route.partitions),
        )

    def _require_closed(self, change: Change) -> None:
        for number in change.sources:
            part = self._simulation.ledger.parts[number]
            fence = self.fences.get(number)
            if part.sealed_at < 0 and (fence is None or fence.change_id != change.id):
                raise Violation(
                    f"publish: version {change.to_version} is published, and partition "
                    f"{number} is neither sealed nor fenced"
                )

    def _latest(self, version: int) -> None:
        if version != self.latest + 1 or version not in self.routes:
            raise Violation(f"routes: the latest version goes from {self.latest} to {version}")
        if version > 1 and self.changes[version].phase is not Phase.PUBLISHED:
            raise Violation(
                f"routes: version {version} is the latest, and its change is "
                f"{self.changes[version].phase.value}"
            )
        self.latest = version
        self._known_at[version] = tuple(self.groups)

    def _change(self, change: Change) -> None:
        before = self.changes.get(change.to_version)
        if before is None and (
            change.phase is not Phase.PREPARED or change.to_version != self.latest + 1
        ):
            raise Violation(
                f"changes: {change.id} to version {change.to_version} begins "
                f"{change.phase.value}, the latest is {self.latest}"
            )
        if before is not None:
            steps = PHASES.index(change.phase) - PHASES.index(before.phase)
            if (
                change.id != before.id
                or steps not in (0, 1)
                or (steps == 0 and change.phase is Phase.PREPARED)
            ):
                raise Violation(
                    f"changes: {before.id} ({before.phase.value}) to version "
                    f"{change.to_version} becomes {change}"
                )
            if change.phase is Phase.DONE and before.phase is Phase.PUBLISHED:
                # one that begins while the groups are counted may be missed: nothing hangs on it
                known = self._known_at[change.to_version]
                behind = [name for name in known if self.groups[name].furthest < change.to_version]
                if behind:
                    raise Violation(
                        f"changes: {change.id} to version {change.to_version} is done, and "
                        f"{behind} are behind"
                    )
        for number, sequence in change.sealed.items():
            part = self._simulation.ledger.parts[number]
            if sequence not in (FENCED, part.sealed_at):
                raise Violation(
                    f"seal: change {change.id} says that {number} is sealed at {sequence}, "
                    f"committed is {part.sealed_at}"
                )
        self.changes[change.to_version] = change
        what = (
            f"{change.id} {change.kind.value} to {change.to_version}: {change.phase.value} "
            f"{dict(change.sealed)}"
        )
        self._simulation.tell("etcd", f"change {what}")

    # --- fences -----------------------------------------------------------------------------------

    def _fenced(self, key: str, value: bytes) -> None:
        simulation = self._simulation
        number, fence, name = (
            int(key.rsplit("/", 1)[1]),
            Fence.decode(value),
            key[len(FENCES) :].partition("/")[0],
        )
        self.fences[number] = fence
        simulation.ledger.note_fence(key, simulation.world.now)
        simulation.faults["partition fenced"] += 1
        simulation.tell(
            "etcd", f"partition {number} on {name} is FENCED for change {fence.change_id}"
        )
        if f"/qmq/groups/{name}/master" in simulation.etcd.items:
            raise Violation(
                f"fence: partition {number} is fenced while a master of {name} holds its key"
            )
        for replica in simulation.groups[name].processes():
            if replica.epoch and replica.right():
                raise Violation(
                    f"fence: partition {number} is fenced, and {replica.name} still has the "
                    "right to append to it"
                )

    def _deleted(self, key: str) -> None:
        if key.startswith(FENCES):
            number = int(key.rsplit("/", 1)[1])
            self._simulation.tell("etcd", f"the fence of partition {number} is removed")
            if self._simulation.ledger.parts[number].sealed_at < 0:
                raise Violation(
                    f"fence: the fence of partition {number} is removed, and the partition "
                    "is not sealed, as committed"
                )

    # --- groups -----------------------------------------------------------------------------------

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
                raise Violation(
                    f"frontier: group {name} goes from version {was} to {now} in logical "
                    f"partition {lp}"
                )
            if now > was:
                moved.setdefault(now, []).append(lp)
        for version, lps in moved.items():
            self._advanced(name, before.gate, version, lps)

    def _advanced(self, name: str, gate: Gate, version: int, lps: list[int]) -> None:
        if version not in self.routes:
            raise Violation(
                f"frontier: group {name} goes to version {version}, and {self.latest} is the latest"
            )
        change, route = self.changes[version], self.routes[version - 1]
        if gate is Gate.STRICT:
            lps = [
                lp
                for part in route.partitions
                if part.number in change.sources
                for lp in range(*part.range)
            ]
        for lp in lps:
            number = route.holder(lp).number
            if number in change.sources and not self._simulation.ledger.parts[number].is_finished(
                name, lp
            ):
                raise Violation(
                    f"frontier: group {name} ({gate.value}) goes to version {version}, and "
                    f"logical partition {lp} of partition {number} "
                    "is not finished, as committed"
                )


def version_at(frontier: Frontier, lp: int) -> int:
    """The version in a logical partition."""
    return next(
        piece.version for piece in frontier.pieces if piece.range.first <= lp < piece.range.end
    )


@dataclass(slots=True)
class Message:
    """A committed message. `number` counts the messages of its key from 1, as they were sent."""

    key: bytes
    number: int
    lp: int
    sequence: int
    id: bytes
    append_ms: int


@dataclass(slots=True)
class Progress:
    """One consumer group on one partition."""

    begins_at: int
    holders: dict[int, tuple[LpRange, str]] = field(default_factory=dict)
    last_token: int = 0
    done: set[int] = field(default_factory=set)
    end_done: set[int] = field(default_factory=set)
    """Logical partitions in which the command message is done."""
    parked: dict[bytes, list[int]] = field(default_factory=dict)
    inherited: dict[bytes, int] = field(default_factory=dict)
    """Logical partitions of keys that were parked in an older partition."""


@dataclass(slots=True)
class Part:
    """One partition. Sequences count from 0 without gaps, since retention takes nothing here."""

    part: PhysicalPartition
    since: int
    """The first version that has it."""
    messages: list[Message] = field(default_factory=list)
    sealed_at: int = -1
    groups: dict[str, Progress] = field(default_factory=dict)
    fenced_ms: int = -1
    last_numbers: dict[bytes, int] = field(default_factory=dict)
    """The last message of each key."""
    by_lp: dict[int, list[int]] = field(default_factory=dict)
    """Sequences."""
    by_key: dict[bytes, list[int]] = field(default_factory=dict)
    """Sequences."""

    def is_finished(self, group: str, lp: int) -> bool:
        """Whether the group has done everything of a logical partition here, the command message
        too.
        """
        found = self.groups.get(group)
        if self.sealed_at == 0:
            return True  # nothing was ever in it
        if found is None or self.sealed_at < 0 or lp not in found.end_done:
            return False
        return all(
            sequence in found.done or sequence < found.begins_at
            for sequence in self.by_lp.get(lp, ())
        )


class Ledger:
    """See the module."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self.parts: dict[int, Part] = {}
        self.by_key: dict[bytes, dict[int, list[tuple[int, Message]]]] = {}
        """Of each key: its messages by number, each with the partitions that have it."""
        self._appended: dict[bytes, list[tuple[int, int]]] = {}
        """Of each key: the time of its last append to each version's partition, ascending."""
        self._committed = CommittedLogs()
        self._queued: dict[int, list[Entry]] = {}

    def open(self, part: PhysicalPartition, since: int) -> None:
        """A route has a new partition."""
        if part.number not in self.parts:
            self.parts[part.number] = Part(part, since)

    # --- reading ----------------------------------------------------------------------------------

    def read(self, group: BrokerGroup, store: Store, until: int) -> None:
        """Read the entries up to a committed index."""
        for entry in self._committed.read(group.name, store, until):
            self._apply(group, entry)

    def _apply(self, group: BrokerGroup, entry: Entry) -> None:
        self._simulation.tracer.entry(entry)
        kind = entry.envelope.kind
        if kind == Kind.DATA:
            self._stored(group, BatchView(entry.envelope, entry.region))
        elif kind == Kind.COMMAND:
            self._sealed(BatchView(entry.envelope, entry.region))
        elif kind == Kind.ACTIONS:
            for action in decode_actions(unwrap(entry.region)):
                self._acted(action)

    # --- messages ---------------------------------------------------------------------------------

    def _stored(self, group: BrokerGroup, view: BatchView) -> None:
        part = self.parts[view.header.partition]
        at_ms = view.envelope.append_time_ms
        where = (
            f"batch {view.header.batch_sequence} of producer {view.header.producer_id} in "
            f"partition {part.part.number}"
        )
        if part.sealed_at >= 0:
            raise Violation(
                f"sealed: {where} was committed at {view.base_sequence}, behind the command "
                f"message at {part.sealed_at}"
            )
        if 0 <= part.fenced_ms < at_ms:
            raise Violation(
                f"fence: {where} was appended at {at_ms} ms, and the fence was put at "
                f"{part.fenced_ms} ms"
            )
        assert view.base_sequence == len(part.messages), (view.base_sequence, len(part.messages))
        keys, lps = view.keys() or [], view.logical_partitions() or ()
        ids = view.message_ids() or [
            MessageId(view.header.producer_id, view.header.batch_sequence, index).to_bytes()
            for index in range(view.count)
        ]
        for index, body in enumerate(view.bodies()):
            number = int(body.rpartition(b"/")[2])
            last = part.last_numbers.get(keys[index], 0)
            if number <= last:
                raise Violation(
                    f"written: {where} has message {number} of {keys[index]!r} at "
                    f"{view.base_sequence + index}, behind {last}"
                )
            part.last_numbers[keys[index]] = max(number, last)
            message = Message(
                keys[index], number, lps[index], view.base_sequence + index, ids[index], at_ms
            )
            part.messages.append(message)
            part.by_lp.setdefault(message.lp, []).append(message.sequence)
            part.by_key.setdefault(message.key, []).append(message.sequence)
            self._place(part, message)

    def _place(self, part: Part, message: Message) -> None:
        name = f"message {message.number} of {message.key!r}"
        copies = self.by_key.setdefault(message.key, {}).setdefault(message.number, [])
        for number, other in copies:
            older = min(self.parts[number], part, key=lambda each: each.since)
            if older.fenced_ms < 0 or other.id != message.id:
                raise Violation(
                    f"stored twice: {name} is in partition {number} at {other.sequence} (id "
                    f"{other.id.hex()}), and in partition "
                    f"{part.part.number} at {message.sequence} (id {message.id.hex()})"
                )
        copies.append((part.part.number, message))
        times = self._appended.setdefault(message.key, [])
        for since, at_ms in times:
            if (since > part.since and at_ms < message.append_ms) or (
                since < part.since and at_ms > message.append_ms
            ):
                raise Violation(
                    f"both written: {name} was appended to partition {part.part.number} of "
                    f"version {part.since} at {message.append_ms} ms, "
                    f"and one of version {since} has the key at {at_ms} ms"
                )
        times[:] = [each for each in times if each[0] != part.since] + [
            (part.since, message.append_ms)
        ]

    def _sealed(self, view: BatchView) -> None:
        part = self.parts[view.header.partition]
        sealed = command_messages.read(view.region, view.base_sequence)
        if part.sealed_at >= 0:
            raise Violation(
                f"sealed: partition {part.part.number} has a second command message at "
                f"{view.base_sequence}"
            )
        part.sealed_at = sealed.sequence
        self._simulation.tell(
            part.part.group,
            f"partition {part.part.number} is sealed at {sealed.sequence}, committed",
        )

    # --- lanes ------------------------------------------------------------------------------------

    def _acted(self, action: object) -> None:
        if isinstance(action, LaneBegin):
            self._begun(action)
        elif isinstance(action, LaneGrant | LaneRelease | LaneDone | LanePark):
            progress = self.parts[action.partition].groups[action.group]
            if isinstance(action, LaneGrant):
                self._granted(action, progress)
            elif isinstance(action, LaneRelease):
                progress.holders.pop(action.token, None)
            else:
                self._settled(action, progress)
        elif isinstance(action, LaneUnpark):
            self._unparked(action)
        elif isinstance(action, LaneInherit):
            self._inherited(action)

    def _begun(self, action: LaneBegin) -> None:
        part = self.parts[action.partition]
        if action.group in part.groups:
            return
        begins = self._simulation.routes.groups[action.group].since
        if action.sequence and part.since > begins:
            raise Violation(
                f"beginning: group {action.group} begins at {action.sequence} in partition "
                f"{action.partition} of version {part.since}, "
                f"and began to read at version {begins}"
            )
        part.groups[action.group] = Progress(action.sequence)

    def _granted(self, action: LaneGrant, progress: Progress) -> None:
        lps = LpRange(action.first, action.end)
        for token, (other, consumer) in progress.holders.items():
            if other.overlaps(lps):
                raise Violation(
                    f"lanes: {lps} of partition {action.partition} is granted to "
                    f"{action.consumer}, and {consumer} has {other} ({token})"
                )
        progress.last_token += 1
        progress.holders[progress.last_token] = (lps, action.consumer)

    def _settled(self, action: LaneDone | LanePark, progress: Progress) -> None:
        part, group = self.parts[action.partition], action.group
        held = progress.holders.get(action.token)
        if held is None:
            raise Violation(
                f"token: {action.consumer} of group {group} settles in partition "
                f"{action.partition} with {action.token}, which is void "
                f"({sorted(progress.holders)} hold)"
            )
        lps, _ = held
        ranges = (
            action.ranges if isinstance(action, LaneDone) else ((action.sequence, action.sequence),)
        )
        for first, last in ranges:
            for sequence in range(first, last + 1):
                if sequence == part.sealed_at:
                    progress.end_done.update(range(*lps))
                elif (
                    lps.first <= part.messages[sequence].lp < lps.end
                    and sequence not in progress.done
                ):
                    self._message_settled(action, part, progress, part.messages[sequence])

    def _message_settled(
        self, action: LaneDone | LanePark, part: Part, progress: Progress, message: Message
    ) -> None:
        where = (action.group, part.part.number, message.sequence)
        name = (
            f"message {message.number} of {message.key!r} (partition {part.part.number}, "
            f"{message.sequence}) for group {action.group}"
        )
        checks = self._simulation.checks
        if isinstance(action, LanePark):
            if message.key not in progress.parked and where not in checks.failed:
                raise Violation(f"parked: {name} begins a parked key, and no handler failed on it")
            progress.parked.setdefault(message.key, []).append(message.sequence)
            checks.set_aside(action.group, message.key, message.number)
        elif where not in checks.finished and message.sequence >= progress.begins_at:
            raise Violation(
                f"settled: {action.consumer} settled {name}, which no handler has finished"
            )
        elif message.key in progress.parked:
            raise Violation(f"parked: {action.consumer} settled {name}, while the key is parked")
        progress.done.add(message.sequence)

    def _inherited(self, action: LaneInherit) -> None:
        progress = self.parts[action.partition].groups[action.group]
        for key, lp in list(progress.inherited.items()):
            if action.first <= lp < action.end and not progress.parked.get(key):
                del progress.inherited[key]
                progress.parked.pop(key, None)
        for lp, key in action.keys:
            if key not in progress.parked:
                progress.parked[key] = []
                progress.inherited[key] = lp
                progress.holders = {
                    token: held
                    for token, held in progress.holders.items()
                    if not held[0].first <= lp < held[0].end
                }

    def _unparked(self, action: LaneUnpark) -> None:
        part = self.parts[action.partition]
        progress = part.groups.get(action.group)
        if progress is None or action.key not in progress.parked:
            return
        sequences = progress.parked.pop(action.key)
        inherited = progress.inherited.pop(action.key, 0)
        lp = part.messages[sequences[0]].lp if sequences else inherited
        progress.holders = {
            token: held
            for token, held in progress.holders.items()
            if not held[0].first <= lp < held[0].end
        }
        if action.replays and sequences:
            progress.done.difference_update(sequences)
            self._simulation.checks.replays(
                action.group, action.key, [part.messages[each].number for each in sequences]
            )
        elif sequences:
            self._simulation.checks.skipped.update(
                (action.group, action.partition, each) for each in sequences
            )

    # --- questions --------------------------------------------------------------------------------

    def note_fence(self, key: str, now_ms: int) -> None:
        """A fence was put."""
        self.parts[int(key[len(FENCES) :].rsplit("/", 1)[1])].fenced_ms = now_ms

    def find(self, number: int, sequence: int) -> Message | None:
        """A committed message."""
        part = self.parts.get(number)
        return (
            part.messages[sequence]
            if part is not None and 0 <= sequence < len(part.messages)
            else None
        )


Where = tuple[str, int, int]
"""Group, partition, sequence."""


@dataclass(slots=True)
class Line:
    """One group's view of one key. `seen` are message numbers, ascending; `at` is the last
    delivered one.
    """

    seen: list[int] = field(default_factory=list)
    at: int = 0
    aside: set[int] = field(default_factory=set)
    """Set aside with their key, and perhaps given back: they may come behind newer ones from
    partitions of later versions.
    """


class Checks:
    """See the module."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self.sent: dict[bytes, int] = {}
        """How many messages of each key were sent."""
        self.stored: dict[tuple[bytes, int], tuple[int, int]] = {}
        """Acknowledged: where they are."""
        self.refused: dict[tuple[bytes, int], None] = {}
        """Failed, certainly not stored."""
        self.unknown: dict[tuple[bytes, int], None] = {}
        self.finished: set[Where] = set()
        self.failed: set[Where] = set()
        self.skipped: set[Where] = set()
        """Parked, and not given back: an operator skipped the key."""
        self._lines: dict[tuple[str, bytes], Line] = {}
        self._done: set[tuple[str, int, int]] = set()
        self.handed_count = self.again_count = 0

    # --- producers --------------------------------------------------------------------------------

    def acknowledged(self, key: bytes, number: int, partition: int, sequence: int) -> None:
        """A producer got the answer that a message is stored."""
        found = self._simulation.ledger.find(partition, sequence)
        if found is None or (found.key, found.number) != (key, number):
            raise Violation(
                f"acknowledged: message {number} of {key!r} is reported in partition "
                f"{partition} at {sequence}; there is {found}"
            )
        self.stored[key, number] = partition, sequence

    # --- handlers ---------------------------------------------------------------------------------

    def handed(self, group: str, consumer: str, message: OrderedMessage) -> None:
        """A handler is given a message."""
        ledger = self._simulation.ledger
        self.handed_count += 1
        found = ledger.find(message.partition, message.sequence)
        if found is None or message.body != b"%s/%d" % (found.key, found.number):
            raise Violation(
                f"handed out: {consumer} is given {message!r}, {message.body!r}; committed "
                f"there is {found}"
            )
        name = (
            f"message {found.number} of {found.key!r} (partition {message.partition}, "
            f"{found.sequence})"
        )
        progress = ledger.parts[message.partition].groups.get(group)
        if progress is None or found.sequence < progress.begins_at:
            raise Violation(
                f"handed out: {consumer} of group {group} is given {name}, where the group "
                "does not begin"
            )
        if found.key in progress.parked:
            raise Violation(
                f"parked: {consumer} of group {group} is given {name}, while the key is parked"
            )
        for number, part in ledger.parts.items():
            if (
                number < message.partition
                and group in part.groups
                and part.groups[group].parked.get(found.key)
            ):
                raise Violation(
                    f"parked: {consumer} of group {group} is given {name}, while the key is "
                    f"parked in partition {number}"
                )
        for sequence in ledger.parts[message.partition].by_key[found.key]:
            if sequence >= found.sequence:
                break
            if not (
                sequence < progress.begins_at
                or sequence in progress.done
                or (group, message.partition, sequence) in self.finished
            ):
                raise Violation(
                    f"overtaken: {consumer} of group {group} is given {name}, and nobody has "
                    f"finished the one at {sequence}"
                )
        self._require_before(group, consumer, message.partition, found.lp, name)
        self.require_order(group, consumer, found.key, found.number, name)

    def _require_before(self, group: str, consumer: str, number: int, lp: int, name: str) -> None:
        """Everything of the versions before is done in the logical partition."""
        ledger, routes = self._simulation.ledger, self._simulation.routes
        if (group, number, lp) in self._done:
            return
        since = ledger.parts[number].since
        for version in range(routes.groups[group].since, since):
            before = routes.routes[version].holder(lp).number
            if before != number and not ledger.parts[before].is_finished(group, lp):
                raise Violation(
                    f"versions: {consumer} of group {group} is given {name} of version "
                    f"{since}, and partition {before} of {version} "
                    f"is not finished in logical partition {lp}, as committed"
                )
        self._done.add((group, number, lp))

    def require_order(self, group: str, consumer: str, key: bytes, number: int, name: str) -> None:
        line = self._lines.setdefault((group, key), Line())
        seen = line.seen
        told = (
            f"order: {consumer} of group {group} is given {name} behind {line.at}; seen are "
            f"{seen[-8:]}"
        )
        to_replay = [each for each in seen[bisect_right(seen, line.at) :] if each not in line.aside]
        if number in line.aside or (key, number) in self.unknown:
            if number not in seen:
                seen.insert(bisect_right(seen, number), number)
            line.at = max(line.at, number)
            return
        if not seen or number > seen[-1]:
            if to_replay:
                raise Violation(f"{told}: it is new, and the replay has not come so far")
            is_whole = self._simulation.routes.groups[group].record.start != "latest"
            missing = [
                each
                for each in range(seen[-1] + 1 if seen else 1, number)
                if (key, each) in self.stored and each not in line.aside
            ]
            if missing and (seen or is_whole):
                raise Violation(f"{told}: {missing} were acknowledged and are left out")
            seen.append(number)
        else:
            self.again_count += 1
            if number not in seen:
                raise Violation(f"{told}: it is seen for the first time behind newer ones")
            if number > line.at and to_replay[0] != number:
                raise Violation(f"{told}: the replay leaves something out")
        line.at = number

    def set_aside(self, group: str, key: bytes, number: int) -> None:
        """A message was parked with its key."""
        self._lines.setdefault((group, key), Line()).aside.add(number)

    def replays(self, group: str, key: bytes, numbers: list[int]) -> None:
        """An operator gives parked messages back."""
        self._done = {each for each in self._done if each[0] != group}
        part = self._simulation.ledger
        for number in numbers:
            for partition, message in part.by_key[key][number]:
                self.finished.discard((group, partition, message.sequence))

    # --- the end ----------------------------------------------------------------------------------

    def survived(self) -> None:
        """At the end."""
        ledger = self._simulation.ledger
        for (key, number), (partition, sequence) in self.stored.items():
            found = ledger.find(partition, sequence)
            if found is None or (found.key, found.number) != (key, number):
                raise Violation(
                    f"durability: message {number} of {key!r} was acknowledged at {sequence} "
                    f"of {partition}, there is {found}"
                )
            places = [
                (partition, message.sequence) for partition, message in ledger.by_key[key][number]
            ]
            for group in (
                self._simulation.plan.groups if self._simulation.plan.give_back_every_ms else ()
            ):
                if not any(
                    (group, *place) in self.finished or (group, *place) in self.skipped
                    for place in places
                ):
                    raise Violation(
                        f"lost: no handler of group {group} has finished message {number} of "
                        f"{key!r} in {places}"
                    )
        for key, number in self.refused:
            if ledger.by_key.get(key, {}).get(number):
                raise Violation(
                    f"refused: message {number} of {key!r} was reported as not stored, and "
                    f"is in {ledger.by_key[key][number]}"
                )

    def undrained(self) -> list[str]:
        """For each group a short description of what is not done yet."""
        ledger, routes = self._simulation.ledger, self._simulation.routes
        found: list[str] = []
        for name, group in routes.groups.items():
            for number, part in ledger.parts.items():
                if not any(
                    route.partition(number)
                    for version, route in routes.routes.items()
                    if version >= group.since
                ):
                    continue
                progress = part.groups.get(name)
                begin = progress.begins_at if progress is not None else 0
                left = [
                    m.sequence
                    for m in part.messages[begin:]
                    if progress is None or m.sequence not in progress.done
                ]
                if left:
                    found.append(
                        f"group {name} has {len(left)} messages left in partition {number}, "
                        f"from {left[0]} on"
                    )
        return found
