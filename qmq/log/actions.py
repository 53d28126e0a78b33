"""Actions: the consumers' operations, as recorded in the action log. All consumption state follows
from them (`qmq.log.queue`). Pure.

An entry of the action log holds actions as MessagePack arrays, one after another:

    [kind, subject, partition, group, consumer, ...]
                                        the rest by kind, in the order of the class's fields

    JOIN     incarnation, lease_ms,     a consumer came; messages that its earlier incarnation held
             received                   go back. Its pull sequences begin above `received`, the
                                        highest it says it ever got, and above all of the group's
    RETURN   received                   it reconnected and never got what it was handed behind pull
                                        sequence `received`
    PULL     ranges                     it was handed [first_sequence, count, attempt] ranges; they
                                        get its next pull sequences
    SETTLE   now_ms, settlements,       [first, last, verdict, delay_ms] on pull sequences, as the
             errors, cause              master decided; [number of the settlement, text] of those
                                        that failed; whose decision it is (`Cause`)
    LEAVE    expired                    it went (or its lease did); what it held goes back
    BEGIN    sequence, now_ms           the group is new on this queue and begins here
    RESET    sequence                   an operator moved the group; everything handed out is void
    DEAD_LETTERED  [first, count]*      messages that died, by their numbers: their copies are in
                                        the dead-letter queue
    FORGET                              the group is deleted: a consumer of a broadcast group that
                                        stayed away
    DROP_QUEUE                          the queue's subject was deleted: every group is gone
                                        (`group` is empty)

On partitions of ordered subjects (qmq/log/lane_state.py):

    LANE_BEGIN    first, end, sequence, expired    the group is new on this partition (of this
                                                   range) and begins here
    LANE_GRANT    first, end, incarnation, lease   the range is the consumer's alone, under the next
                                                   token
    LANE_RELEASE  token                            the lane has no owner
    LANE_DONE     token, [first, last]*            sequences, of the token's range
    LANE_FAIL     token, sequence, attempts        a message failed so many times
    LANE_PARK     token, sequence, lp, key         a message is set aside with its key
    LANE_UNPARK   key, replays                     an operator gives a key's messages back, or drops
                                                   them
    LANE_RESET    first, end, sequence             an operator moved the group

On the queue of steps (docs/adr/0025); group and consumer are empty:

    STEP_PLAN     number, target, target_partition, broker_group, producer_id, batch_sequence,
                  [sequence, first, count]*    these effects will be sent so: of the step with this
                                               sequence, the target's effects from number `first` on
    STEP_DONE     numbers               these plans are stored where they were to go
    STEP_VOID     numbers               these certainly are not: their effects wait again

On delay servers (docs/DELAY.md), [kind, ...] without the five; `bucket` and `ordinal` name a
delayed message:

    PLAN          number, subject, partition, broker_group, producer_id, batch_sequence,
                  [bucket, ordinals]*   it will be sent so
    PLAN_DONE     numbers               these plans are stored where they were to go
    PLAN_VOID     numbers               these certainly are not: their messages are pending again
    CANCEL        bucket, ordinal       the message is not to be delivered
    POSTPONE      bucket, ordinal, due_ms    it is to be delivered at another time
    RECUR         bucket, ordinal, due_ms    a run of a recurring message is planned: the next one
                                             is due then
    CLOSE         before                the buckets before this one have nothing left

On a full disk actions that are applied wait in `UnwrittenActions`, each encoded once, until there
is room.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from enum import IntEnum
from typing import Final, NamedTuple

import msgspec

from qmq.errors import CorruptBatch
from qmq.limits import BATCH_BYTES_MAX, KIB
from qmq.log.segment_index import UNREADABLE


class ActionKind(IntEnum):
    """The first item of every action."""

    BEGIN = 0
    JOIN = 1
    RETURN = 2
    PULL = 3
    SETTLE = 4
    LEAVE = 5
    RESET = 6
    LANE_BEGIN = 7
    LANE_GRANT = 8
    LANE_RELEASE = 9
    LANE_DONE = 10
    LANE_FAIL = 11
    LANE_PARK = 12
    LANE_UNPARK = 13
    LANE_RESET = 14
    LANE_INHERIT = 15
    PLAN = 20
    PLAN_DONE = 21
    PLAN_VOID = 22
    CANCEL = 23
    POSTPONE = 24
    RECUR = 25
    CLOSE = 26
    DEAD_LETTERED = 30
    FORGET = 31
    DROP_QUEUE = 32
    STEP_PLAN = 40
    STEP_DONE = 41
    STEP_VOID = 42


class Cause(IntEnum):
    """The reason why messages were settled."""

    VERDICT = 0
    """The consumer sent a verdict."""
    LOST = 1
    """The consumer's lease ended, and the master put its messages back,
    as for the following causes.
    """
    LEFT = 2
    """The consumer left without settling them."""
    AGAIN = 3
    """The consumer came back as another incarnation."""


class Action(msgspec.Struct, array_like=True, frozen=True, tag_field="kind"):
    """The fields of all actions: the group's share of one queue, and the consumer ("" where there
    is none).
    """

    subject: str
    partition: int
    group: str
    consumer: str


class Begin(Action, frozen=True, tag=int(ActionKind.BEGIN)):
    sequence: int
    now_ms: int = 0


class Join(Action, frozen=True, tag=int(ActionKind.JOIN)):
    incarnation: str
    lease_ms: int
    received: int


class Return(Action, frozen=True, tag=int(ActionKind.RETURN)):
    received: int


class Pulled(msgspec.Struct, array_like=True, frozen=True):
    """A range of consecutive sequences handed out together."""

    first_sequence: int
    count: int
    attempt: int


class PullAction(Action, frozen=True, tag=int(ActionKind.PULL)):
    ranges: tuple[Pulled, ...]


class SettleAction(Action, frozen=True, tag=int(ActionKind.SETTLE)):
    now_ms: int
    settlements: tuple[tuple[int, int, int, int], ...]
    errors: tuple[tuple[int, str], ...] = ()
    cause: int = 0


class Leave(Action, frozen=True, tag=int(ActionKind.LEAVE)):
    expired: bool


class Reset(Action, frozen=True, tag=int(ActionKind.RESET)):
    sequence: int


class DeadLettered(Action, frozen=True, tag=int(ActionKind.DEAD_LETTERED)):
    numbers: tuple[tuple[int, int], ...]


class Forget(Action, frozen=True, tag=int(ActionKind.FORGET)):
    pass


class DropQueue(Action, frozen=True, tag=int(ActionKind.DROP_QUEUE)):
    pass


class LaneBegin(Action, frozen=True, tag=int(ActionKind.LANE_BEGIN)):
    first: int
    end: int
    sequence: int
    expired: int


class LaneGrant(Action, frozen=True, tag=int(ActionKind.LANE_GRANT)):
    first: int
    end: int
    incarnation: str
    lease_ms: int


class LaneRelease(Action, frozen=True, tag=int(ActionKind.LANE_RELEASE)):
    token: int


class LaneDone(Action, frozen=True, tag=int(ActionKind.LANE_DONE)):
    token: int
    ranges: tuple[tuple[int, int], ...]


class LaneFail(Action, frozen=True, tag=int(ActionKind.LANE_FAIL)):
    token: int
    sequence: int
    attempts: int


class LanePark(Action, frozen=True, tag=int(ActionKind.LANE_PARK)):
    token: int
    sequence: int
    lp: int
    key: bytes


class LaneUnpark(Action, frozen=True, tag=int(ActionKind.LANE_UNPARK)):
    key: bytes
    replays: bool


class LaneReset(Action, frozen=True, tag=int(ActionKind.LANE_RESET)):
    first: int
    end: int
    sequence: int


class LaneInherit(Action, frozen=True, tag=int(ActionKind.LANE_INHERIT)):
    first: int
    end: int
    keys: tuple[tuple[int, bytes], ...]


class StepPlan(Action, frozen=True, tag=int(ActionKind.STEP_PLAN)):
    """A batch of effects that will be sent to a partition of a broker group, under a producer's
    number, in this order.
    """

    number: int
    """Plans are numbered from 1, over all masters of the broker group."""
    target: str
    target_partition: int
    broker_group: str
    producer_id: int
    batch_sequence: int
    items: tuple[tuple[int, int, int], ...]
    """(sequence of the step, number of the first effect, count), in the order of the messages."""


class StepDone(Action, frozen=True, tag=int(ActionKind.STEP_DONE)):
    numbers: tuple[int, ...]


class StepVoid(Action, frozen=True, tag=int(ActionKind.STEP_VOID)):
    numbers: tuple[int, ...]


class ScheduleStruct(msgspec.Struct, array_like=True, frozen=True, tag_field="kind"):
    """The actions of a delay server's master."""


class PlanAction(ScheduleStruct, frozen=True, tag=int(ActionKind.PLAN)):
    """A batch that will be sent to a partition of a broker group, under a producer's number, with
    these messages in this order.
    """

    number: int
    """Plans of a delay group are numbered from 1, over all its masters."""
    subject: str
    partition: int
    broker_group: str
    producer_id: int
    batch_sequence: int
    items: tuple[tuple[int, bytes], ...]
    """(bucket, ordinals as little-endian u32), in the order of the messages."""


class PlanDone(ScheduleStruct, frozen=True, tag=int(ActionKind.PLAN_DONE)):
    numbers: tuple[int, ...]


class PlanVoid(ScheduleStruct, frozen=True, tag=int(ActionKind.PLAN_VOID)):
    numbers: tuple[int, ...]


class Cancel(ScheduleStruct, frozen=True, tag=int(ActionKind.CANCEL)):
    bucket: int
    ordinal: int


class Postpone(ScheduleStruct, frozen=True, tag=int(ActionKind.POSTPONE)):
    bucket: int
    ordinal: int
    due_ms: int


class Recur(ScheduleStruct, frozen=True, tag=int(ActionKind.RECUR)):
    bucket: int
    ordinal: int
    due_ms: int


class Close(ScheduleStruct, frozen=True, tag=int(ActionKind.CLOSE)):
    before: int
    """The first bucket that is kept."""


ScheduleAction = PlanAction | PlanDone | PlanVoid | Cancel | Postpone | Recur | Close
LaneAction = (
    LaneBegin
    | LaneGrant
    | LaneRelease
    | LaneDone
    | LaneFail
    | LanePark
    | LaneUnpark
    | LaneReset
    | LaneInherit
)
StepAction = StepPlan | StepDone | StepVoid
ShareAction = (
    Begin
    | Join
    | Return
    | PullAction
    | SettleAction
    | Leave
    | Reset
    | DeadLettered
    | Forget
    | DropQueue
)
AnyAction = ShareAction | LaneAction | StepAction | ScheduleAction
"""All kinds of actions in the action log."""

_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(list[AnyAction])


def encode_actions(actions: Iterable[AnyAction]) -> bytes:
    """One MessagePack array of actions."""
    return _ENCODER.encode(list(actions))


def decode_actions(payload: bytes) -> list[AnyAction]:
    """Decode what `encode_actions` made. Raises CorruptBatch."""
    try:
        return _DECODER.decode(payload)
    except UNREADABLE as cause:
        raise CorruptBatch(f"an entry of the action log cannot be read: {cause}") from cause


ENTRY_BYTES_MAX: Final = BATCH_BYTES_MAX - 64 * KIB
"""The actions of one turn are one entry, unless they are longer than this. No single action is."""
_WRITE_BYTES: Final = 8 * 1024 * KIB


class ActionEntry(NamedTuple):
    """The payload of an entry with `actions` actions, and those of a schedule among them."""

    payload: bytes
    actions: int
    scheduled: tuple[ScheduleAction, ...]


_MAY_WAIT: Final = (PullAction, SettleAction)


class UnwrittenActions:
    """`add` what is applied; then, to write it, take entries with `entries`,
    and report them with `written`.
    """

    __slots__ = ("_encoded", "_fresh", "_has_scheduled", "encoded_bytes", "is_due", "waits")

    def __init__(self) -> None:
        self._fresh: list[AnyAction] = []
        self._has_scheduled = False
        self._encoded: deque[ActionEntry] = deque()
        self.encoded_bytes = 0
        """The bytes that wait since an earlier attempt to write them."""
        self.waits = False
        """True while there are actions to write. An attribute, because each turn of a broker looks
        at it several times.
        """
        self.is_due = False
        """False while nobody waits for any of them: they are deliveries and verdicts. If those are
        lost, the messages are handed out again, and the verdicts are sent again.
        """

    def hurry(self) -> None:
        """Somebody waits for them: they are due, if there are any."""
        self.is_due = self.waits

    def add(self, action: AnyAction, *, is_scheduled: bool) -> None:
        self._fresh.append(action)
        self.waits = True
        if type(action) not in _MAY_WAIT:
            self.is_due = True
        if is_scheduled:
            self._has_scheduled = True

    def entries(self) -> list[ActionEntry]:
        """The oldest entries, as many as one write takes."""
        if self._fresh:
            for entry in _cut(self._fresh, has_scheduled=self._has_scheduled):
                self._encoded.append(entry)
                self.encoded_bytes += len(entry.payload)
            self._fresh = []
        found: list[ActionEntry] = []
        size = 0
        for entry in self._encoded:
            size += len(entry.payload)
            if found and size > _WRITE_BYTES:
                break
            found.append(entry)
        return found

    def written(self, count: int) -> None:
        """The oldest `count` entries are in the log."""
        for _ in range(count):
            self.encoded_bytes -= len(self._encoded.popleft().payload)
        self.waits = bool(self._fresh or self._encoded)
        self.is_due = self.is_due and self.waits


def _cut(actions: list[AnyAction], *, has_scheduled: bool) -> Iterator[ActionEntry]:
    payload = encode_actions(actions)
    if len(payload) <= ENTRY_BYTES_MAX or len(actions) == 1:
        yield ActionEntry(
            payload,
            len(actions),
            tuple([each for each in actions if isinstance(each, ScheduleAction)])
            if has_scheduled
            else (),
        )
        return
    half = len(actions) // 2
    yield from _cut(actions[:half], has_scheduled=has_scheduled)
    yield from _cut(actions[half:], has_scheduled=has_scheduled)
