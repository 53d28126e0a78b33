"""Delayed batches, a model of the schedule without files, and its log of entries for replays.

A schedule in memory, and threads that run when a test says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Coroutine, Generator, Iterable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from qmq.delay.batches import DueMessage, Places, SchedulePlace
from qmq.delay.buckets import INDEX_ROW, BucketInfo
from qmq.delay.schedule import Schedule
from qmq.log.actions import (
    Cancel,
    Close,
    PlanAction,
    PlanDone,
    PlanVoid,
    Postpone,
    Recur,
    ScheduleAction,
)
from qmq.log.disk import Disk
from qmq.model import PLANNED, SCHEDULE_ID, MessageId
from qmq.wire.batch import encode, sent_sizes
from qmq.wire.batch_columns import BatchFlag, Columns, Compression

SECOND = 1_000
START = 1_700_000_000_000
"""A whole second."""
PRODUCER = 7


def delayed(
    due_times_ms: Sequence[int],
    *,
    number: int = 0,
    subject: str = "orders",
    flags: int = 0,
    bodies: Sequence[bytes] | None = None,
    compression: Compression = Compression.NONE,
    **columns: Any,
) -> tuple[bytes, int]:
    """(region, its checksum) of a delayed batch."""
    found = (
        list(bodies)
        if bodies is not None
        else [b"body %d.%d" % (number, place) for place in range(len(due_times_ms))]
    )
    envelope, region = encode(
        subject.encode(),
        Columns(found, due_times_ms=due_times_ms, **columns),
        producer_id=PRODUCER,
        batch_sequence=number,
        create_time_ms=START,
        flags=flags,
        compression=compression,
    )
    return region, sent_sizes(envelope)[1]


def places(found: Iterable[SchedulePlace]) -> Places:
    every = list(found)
    buckets, ordinals = ([each[item] for each in every] for item in (0, 1))
    return Places(
        np.zeros(len(every), np.int64), np.array(buckets, np.int32), np.array(ordinals, np.uint32)
    )


def plan(number: int, *items: tuple[int, Sequence[int]], subject: str = "orders") -> PlanAction:
    """A plan of (bucket, ordinals)."""
    return PlanAction(
        number,
        subject,
        0,
        "g0",
        99,
        number,
        tuple((bucket, np.array(each, "<u4").tobytes()) for bucket, each in items),
    )


def opened(folder: Path, state: Any = None, *, bucket_ms: int = SECOND, **options: Any) -> Schedule:
    schedule = Schedule(folder, Disk(), bucket_ms, **options)
    schedule.load(state)
    return schedule


def checkpoint(schedule: Schedule) -> Any:
    taken = schedule.begin_checkpoint()
    taken.run()
    schedule.end_checkpoint(taken)
    return taken.state


def contents(schedule: Schedule) -> dict[str, bytes]:
    """The files of the buckets that are kept, byte for byte, when everything is filed."""
    while schedule.file_near(1 << 60):
        pass
    state = checkpoint(schedule)
    return {name: (schedule.folder / name).read_bytes() for name, _ in Schedule.files(state)}


@dataclass
class Entry:
    """One entry of the logs: a batch, or actions."""

    index: int
    time_ms: int
    region: bytes = b""
    crc: int = 0
    actions: tuple[ScheduleAction, ...] = ()

    def feed(self, schedule: Schedule) -> None:
        if self.region:
            schedule.take(self.index, self.time_ms, self.region, self.crc)
        for action in self.actions:
            schedule.act(self.index, self.time_ms, action)


@dataclass
class Model:
    """The schedule's expected state, in one dictionary."""

    bucket_ms: int = SECOND
    messages: dict[SchedulePlace, DueMessage] = field(default_factory=dict)
    states: dict[SchedulePlace, str] = field(default_factory=dict)
    aliases: dict[bytes, SchedulePlace] = field(default_factory=dict)
    moves: dict[SchedulePlace, SchedulePlace] = field(default_factory=dict)
    plans: dict[int, PlanAction] = field(default_factory=dict)
    closed_before: int = 0
    told: list[tuple[int, SchedulePlace]] = field(default_factory=list)

    def take(self, time_ms: int, found: Sequence[DueMessage]) -> None:
        """`found` have no place yet; in the batch's order."""
        where = [self._add(replace(each, append_ms=time_ms)) for each in found]
        self.told += [(each.due_ms, place) for each, place in zip(found, where, strict=True)]

    def _add(self, message: DueMessage) -> SchedulePlace:
        bucket = max(message.due_ms // self.bucket_ms, self.closed_before)
        place = SchedulePlace(bucket, sum(each.bucket == bucket for each in self.messages))
        self.messages[place] = replace(message, place=place)
        self.states[place] = "pending"
        return place

    def act(self, time_ms: int, action: ScheduleAction) -> None:
        if isinstance(action, PlanAction):
            self.plans[action.number] = action
            self._mark(action, "planned")
        elif isinstance(action, PlanDone | PlanVoid):
            for number in action.numbers:
                if number in self.plans:
                    self._mark(
                        self.plans.pop(number),
                        "delivered" if isinstance(action, PlanDone) else "pending",
                    )
        elif isinstance(action, Close):
            self._close(action.before)
        else:
            self._single(time_ms, SchedulePlace(action.bucket, action.ordinal), action)

    def _mark(self, found: PlanAction, state: str) -> None:
        for bucket, ordinals in found.items:
            for each in np.frombuffer(ordinals, "<u4").tolist():
                self._set(SchedulePlace(bucket, each), state)

    def _set(self, place: SchedulePlace, state: str) -> None:
        self.states[place] = state
        if state not in ("pending", "planned"):
            self.aliases = {each: where for each, where in self.aliases.items() if where != place}

    def _single(
        self, time_ms: int, place: SchedulePlace, action: Cancel | Postpone | Recur
    ) -> None:
        if isinstance(action, Cancel):
            if self.states.get(place) == "pending":
                self._set(place, "cancelled")
            return
        message = self.messages[place]
        known_as = message.message_id
        if message.flags & BatchFlag.RECURRING and SCHEDULE_ID in message.headers:
            known_as = bytes.fromhex(message.headers[SCHEDULE_ID].decode())
        if isinstance(action, Postpone):
            if self.states[place] != "pending":
                return
            headers = message.headers
            if message.flags & BatchFlag.RECURRING and SCHEDULE_ID in headers:
                at_ms = int(headers.get(PLANNED, b"%d/" % message.due_ms).partition(b"/")[0])
                headers = {name: value for name, value in headers.items() if name != PLANNED}
                headers |= (
                    {PLANNED: b"%d/%d" % (at_ms, action.due_ms)} if at_ms != action.due_ms else {}
                )
            new = self._add(
                replace(message, due_ms=action.due_ms, append_ms=time_ms, headers=headers)
            )
            self.moves[place] = new
            self._set(place, "moved")
        else:
            digest = blake2b(
                known_as + action.due_ms.to_bytes(8, "little"), digest_size=16
            ).digest()
            headers = {
                name: value
                for name, value in message.headers.items()
                if name not in (SCHEDULE_ID, PLANNED)
            }
            headers[SCHEDULE_ID] = known_as.hex().encode()
            new = self._add(
                replace(
                    message,
                    due_ms=action.due_ms,
                    append_ms=time_ms,
                    message_id=digest,
                    headers=headers,
                )
            )
        self.aliases[known_as] = new
        self.told.append((action.due_ms, new))

    def _close(self, before: int) -> None:
        left = [
            place.bucket for place, state in self.states.items() if state in ("pending", "planned")
        ]
        self.closed_before = max(self.closed_before, min([before, *left]))
        for place in [each for each in self.messages if each.bucket < self.closed_before]:
            del self.messages[place], self.states[place]

    # --- comparing --------------------------------------------------------------------------------

    def pending(self) -> list[SchedulePlace]:
        return [place for place, state in self.states.items() if state == "pending"]

    def compare(self, schedule: Schedule) -> None:
        """Everything that can be asked."""
        schedule.check()
        assert schedule.closed_before == self.closed_before
        assert schedule.plans == self.plans
        assert list(schedule.plans) == sorted(self.plans)
        every = sorted(self.messages)
        assert schedule.read(places(every)) == [self.messages[each] for each in every]
        assert [schedule.state_of(each) for each in every] == [self.states[each] for each in every]
        assert schedule.are_pending(places(every)).tolist() == [
            self.states[each] == "pending" for each in every
        ]
        numbers = sorted({each.bucket for each in every})
        assert [(info.bucket, info.messages, info.pending) for info in schedule.buckets()] == [
            (
                number,
                sum(each.bucket == number for each in every),
                sum(
                    each.bucket == number and self.states[each] in ("pending", "planned")
                    for each in every
                ),
            )
            for number in numbers
        ]
        for number in numbers:
            assert schedule.settled(number).tolist() == [
                self.states[each] != "pending" for each in every if each.bucket == number
            ]
            due_times_ms = [self.messages[each].due_ms for each in every if each.bucket == number]
            rows = schedule.reader(number).read(0, len(due_times_ms))
            assert rows["due"].tolist() == due_times_ms
        assert {each: schedule.alias(each) for each in self.aliases} == self.aliases
        left = [
            self.messages[place].subject
            for place, state in self.states.items()
            if state in ("pending", "planned")
        ]
        assert schedule.pending.all() == Counter(left)

    def follow(self, place: SchedulePlace) -> SchedulePlace:
        while place in self.moves:
            place = self.moves[place]
        return place

    def due(self, from_ms: int, to_ms: int) -> list[DueMessage]:
        """The result of a scan."""
        found = [self.messages[each] for each in self.pending()]
        return sorted(
            (each for each in found if from_ms <= each.due_ms < (to_ms or 1 << 62)),
            key=lambda each: (each.due_ms, each.place),
        )


def messages_of(
    due_times_ms: Sequence[int],
    number: int,
    *,
    flags: int = 0,
    headers: Sequence[dict[str, bytes]] | None = None,
    bodies: Sequence[bytes] | None = None,
    keys: Sequence[bytes] | None = None,
) -> list[DueMessage]:
    """The messages that `delayed` puts into a batch."""
    return [
        DueMessage(
            SchedulePlace(-1, -1),
            due,
            "orders",
            bodies[place] if bodies else b"body %d.%d" % (number, place),
            keys[place] if keys else b"",
            (),
            headers[place] if headers else {},
            START,
            MessageId(PRODUCER, number, place).to_bytes(),
            flags,
        )
        for place, due in enumerate(due_times_ms)
    ]


_T = TypeVar("_T")


class Kept:
    """One bucket."""

    def __init__(self) -> None:
        self.due_times_ms: list[int] = []
        self.settled: list[bool] = []
        self.is_closed = False


class Reader:
    """A reader that fails if its bucket is closed before it reads, as with a deleted file."""

    def __init__(self, kept: Kept) -> None:
        self._kept = kept
        self.count = len(kept.due_times_ms)

    def read(self, first: int, end: int) -> npt.NDArray[np.void]:
        assert end <= self.count
        if self._kept.is_closed:
            raise FileNotFoundError("the bucket is closed")
        rows = np.zeros(end - first, INDEX_ROW)
        rows["due"] = self._kept.due_times_ms[first:end]
        return rows


class FakeSchedule:
    """What a loader reads of a schedule. `readings` has the buckets that were read."""

    def __init__(self, bucket_ms: int) -> None:
        self.bucket_ms = bucket_ms
        self.closed_before = 0
        self.kept: dict[int, Kept] = {}
        self.readings: list[int] = []
        self.on_pending: Callable[[Places], None] = lambda _: None

    def store(self, due_times_ms: list[int]) -> list[SchedulePlace]:
        found = []
        for due in due_times_ms:
            bucket = max(due // self.bucket_ms, self.closed_before)
            kept = self.kept.setdefault(bucket, Kept())
            found.append(SchedulePlace(bucket, len(kept.due_times_ms)))
            kept.due_times_ms.append(due)
            kept.settled.append(False)
        buckets, ordinals = zip(*found, strict=True)
        self.on_pending(
            Places(
                np.array(due_times_ms, np.int64),
                np.array(buckets, np.int32),
                np.array(ordinals, np.uint32),
            )
        )
        return found

    def settle(self, place: SchedulePlace) -> None:
        self.kept[place.bucket].settled[place.ordinal] = True

    def close(self, before: int) -> None:
        left = [bucket for bucket, kept in self.kept.items() if not all(kept.settled)]
        self.closed_before = max(self.closed_before, min([before, *left]))
        for bucket in [each for each in self.kept if each < self.closed_before]:
            self.kept.pop(bucket).is_closed = True

    def buckets(self) -> list[BucketInfo]:
        return [
            BucketInfo(each, len(kept.due_times_ms), kept.settled.count(False), 0)
            for each, kept in sorted(self.kept.items())
        ]

    def count(self, bucket: int) -> int:
        return len(self.kept[bucket].due_times_ms) if bucket in self.kept else 0

    def reader(self, bucket: int) -> Reader:
        self.readings.append(bucket)
        return Reader(self.kept[bucket])

    def rows(self, bucket: int, first: int, end: int) -> npt.NDArray[np.void]:
        return Reader(self.kept[bucket]).read(first, end)

    def settled(self, bucket: int) -> npt.NDArray[np.bool_]:
        return np.array(self.kept[bucket].settled, np.bool_)


class Later(Generic[_T]):
    """A call that runs at a chosen moment, and its result at another."""

    def __init__(self, run: Callable[[], _T]) -> None:
        self._run = run
        self._result: _T
        self._failure: BaseException | None = None
        self.is_run = False

    def run(self) -> None:
        if not self.is_run:
            self.is_run = True
            try:
                self._result = self._run()
            except OSError as failure:
                self._failure = failure

    def __await__(self) -> Generator[Later[_T], None, _T]:
        yield self
        assert self.is_run, "resumed before the thread was through"
        if self._failure is not None:
            raise self._failure
        return self._result


class Step:
    """A coroutine of the loader, gone through by hand: `begin` up to the thread, `read` in it,
    `finish`.
    """

    def __init__(self) -> None:
        self._coroutine: Coroutine[Any, Any, Any] | None = None
        self._later: Later[Any]
        self.result: Any = None

    @property
    def is_under_way(self) -> bool:
        return self._coroutine is not None

    def begin(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        assert self._coroutine is None
        self._coroutine = coroutine
        self._go_on()

    def read(self) -> None:
        if self._coroutine is not None:
            self._later.run()

    def finish(self) -> None:
        if self._coroutine is not None:
            self._later.run()
            self._go_on()

    def _go_on(self) -> None:
        assert self._coroutine is not None
        try:
            self._later = self._coroutine.send(None)
        except StopIteration as end:
            self._coroutine, self.result = None, end.value
        except BaseException:
            self._coroutine = None
            raise
