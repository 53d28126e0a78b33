"""The committed entries, read from the logs and interpreted independently of the product: all checks compare with this.

For each partition the ledger has its messages and its command message, and for each consumer group the grants, settled messages and parked
keys. It checks each entry when it appears:

    no entry follows a command message; nobody appends to a partition after it was fenced
    in real time, no message of a key is appended to a partition after one of the key was appended to a later version's partition
    a second copy exists only if the first one's partition was fenced, and has the same message id
    grants never overlap, tokens grow, and a void token settles nothing
    a settled message was handed to a handler and finished there
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from qmq_coordination.ordered_records import FENCES
from qmq_ordering.routes import LpRange, PhysicalPartition

from ordersim.committed import CommittedLogs
from ordersim.violation import Violation
from qmq.log import command_messages
from qmq.log.actions import LaneBegin, LaneDone, LaneGrant, LaneInherit, LanePark, LaneRelease, LaneUnpark, decode_actions
from qmq.log.envelopes import Entry, unwrap
from qmq.model import MessageId
from qmq.wire.batch import BatchView, Kind

if TYPE_CHECKING:
    from ordersim.group import BrokerGroup
    from ordersim.run import Simulation
    from qmq.log.store import Store


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
        """Whether the group has done everything of a logical partition here, the command message too."""
        found = self.groups.get(group)
        if self.sealed_at == 0:
            return True  # nothing was ever in it
        if found is None or self.sealed_at < 0 or lp not in found.end_done:
            return False
        return all(sequence in found.done or sequence < found.begins_at for sequence in self.by_lp.get(lp, ()))


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

    # --- reading ---------------------------------------------------------------------------------------------------------

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

    # --- messages --------------------------------------------------------------------------------------------------------

    def _stored(self, group: BrokerGroup, view: BatchView) -> None:
        part = self.parts[view.header.partition]
        at_ms = view.envelope.append_time_ms
        where = f"batch {view.header.batch_sequence} of producer {view.header.producer_id} in partition {part.part.number}"
        if part.sealed_at >= 0:
            raise Violation(f"sealed: {where} was committed at {view.base_sequence}, behind the command message at {part.sealed_at}")
        if 0 <= part.fenced_ms < at_ms:
            raise Violation(f"fence: {where} was appended at {at_ms} ms, and the fence was put at {part.fenced_ms} ms")
        assert view.base_sequence == len(part.messages), (view.base_sequence, len(part.messages))
        keys, lps = view.keys() or [], view.logical_partitions() or ()
        ids = view.message_ids() or [
            MessageId(view.header.producer_id, view.header.batch_sequence, index).to_bytes() for index in range(view.count)
        ]
        for index, body in enumerate(view.bodies()):
            number = int(body.rpartition(b"/")[2])
            last = part.last_numbers.get(keys[index], 0)
            if number <= last:
                raise Violation(f"written: {where} has message {number} of {keys[index]!r} at {view.base_sequence + index}, behind {last}")
            part.last_numbers[keys[index]] = max(number, last)
            message = Message(keys[index], number, lps[index], view.base_sequence + index, ids[index], at_ms)
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
                    f"stored twice: {name} is in partition {number} at {other.sequence} (id {other.id.hex()}), and in partition "
                    f"{part.part.number} at {message.sequence} (id {message.id.hex()})"
                )
        copies.append((part.part.number, message))
        times = self._appended.setdefault(message.key, [])
        for since, at_ms in times:
            if (since > part.since and at_ms < message.append_ms) or (since < part.since and at_ms > message.append_ms):
                raise Violation(
                    f"both written: {name} was appended to partition {part.part.number} of version {part.since} at {message.append_ms} ms, "
                    f"and one of version {since} has the key at {at_ms} ms"
                )
        times[:] = [each for each in times if each[0] != part.since] + [(part.since, message.append_ms)]

    def _sealed(self, view: BatchView) -> None:
        part = self.parts[view.header.partition]
        sealed = command_messages.read(view.region, view.base_sequence)
        if part.sealed_at >= 0:
            raise Violation(f"sealed: partition {part.part.number} has a second command message at {view.base_sequence}")
        part.sealed_at = sealed.sequence
        self._simulation.tell(part.part.group, f"partition {part.part.number} is sealed at {sealed.sequence}, committed")

    # --- lanes -----------------------------------------------------------------------------------------------------------

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
                f"beginning: group {action.group} begins at {action.sequence} in partition {action.partition} of version {part.since}, "
                f"and began to read at version {begins}"
            )
        part.groups[action.group] = Progress(action.sequence)

    def _granted(self, action: LaneGrant, progress: Progress) -> None:
        lps = LpRange(action.first, action.end)
        for token, (other, consumer) in progress.holders.items():
            if other.overlaps(lps):
                raise Violation(
                    f"lanes: {lps} of partition {action.partition} is granted to {action.consumer}, and {consumer} has {other} ({token})"
                )
        progress.last_token += 1
        progress.holders[progress.last_token] = (lps, action.consumer)

    def _settled(self, action: LaneDone | LanePark, progress: Progress) -> None:
        part, group = self.parts[action.partition], action.group
        held = progress.holders.get(action.token)
        if held is None:
            raise Violation(
                f"token: {action.consumer} of group {group} settles in partition {action.partition} with {action.token}, which is void "
                f"({sorted(progress.holders)} hold)"
            )
        lps, _ = held
        ranges = action.ranges if isinstance(action, LaneDone) else ((action.sequence, action.sequence),)
        for first, last in ranges:
            for sequence in range(first, last + 1):
                if sequence == part.sealed_at:
                    progress.end_done.update(range(*lps))
                elif lps.first <= part.messages[sequence].lp < lps.end and sequence not in progress.done:
                    self._message_settled(action, part, progress, part.messages[sequence])

    def _message_settled(self, action: LaneDone | LanePark, part: Part, progress: Progress, message: Message) -> None:
        where = (action.group, part.part.number, message.sequence)
        name = f"message {message.number} of {message.key!r} (partition {part.part.number}, {message.sequence}) for group {action.group}"
        checks = self._simulation.checks
        if isinstance(action, LanePark):
            if message.key not in progress.parked and where not in checks.failed:
                raise Violation(f"parked: {name} begins a parked key, and no handler failed on it")
            progress.parked.setdefault(message.key, []).append(message.sequence)
            checks.set_aside(action.group, message.key, message.number)
        elif where not in checks.finished and message.sequence >= progress.begins_at:
            raise Violation(f"settled: {action.consumer} settled {name}, which no handler has finished")
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
                progress.holders = {token: held for token, held in progress.holders.items() if not held[0].first <= lp < held[0].end}

    def _unparked(self, action: LaneUnpark) -> None:
        part = self.parts[action.partition]
        progress = part.groups.get(action.group)
        if progress is None or action.key not in progress.parked:
            return
        sequences = progress.parked.pop(action.key)
        inherited = progress.inherited.pop(action.key, 0)
        lp = part.messages[sequences[0]].lp if sequences else inherited
        progress.holders = {token: held for token, held in progress.holders.items() if not held[0].first <= lp < held[0].end}
        if action.replays and sequences:
            progress.done.difference_update(sequences)
            self._simulation.checks.replays(action.group, action.key, [part.messages[each].number for each in sequences])
        elif sequences:
            self._simulation.checks.skipped.update((action.group, action.partition, each) for each in sequences)

    # --- questions -------------------------------------------------------------------------------------------------------

    def note_fence(self, key: str, now_ms: int) -> None:
        """A fence was put."""
        self.parts[int(key[len(FENCES) :].rsplit("/", 1)[1])].fenced_ms = now_ms

    def find(self, number: int, sequence: int) -> Message | None:
        """A committed message."""
        part = self.parts.get(number)
        return part.messages[sequence] if part is not None and 0 <= sequence < len(part.messages) else None
