"""The schedule: where each delayed message is, and its state. It is the projection of a delay
group's logs (qmq/log/store.py).

The schedule is a pure function of the entries, in the order of the index: replicas have the same
bytes in the files of the buckets, regardless of flushes and restarts, though perhaps not equally
many of them yet (spread.py). So nothing in this module may depend on
time, randomness, or the number of bytes written to disk.

    take    a batch: to the bucket of its messages' due times, or cut into several, at once or
            later (spread.py)
    act     PLAN, DONE, VOID, CANCEL, POSTPONE, RECUR, CLOSE: changes of a message's state
            (docs/DELAY.md). An action that does not apply is ignored

*Bucket* of a message: `max(due_ms // bucket_ms, closed_before)`. Only the first kept bucket
therefore has messages that were due before it begins, and the order of buckets is the order of due
times too.

*Aliases* lead from a message id to the message's current place, if it was moved, or is a recurring
message's next run, as long as it is pending or planned. A recurring message's alias is its first
id.

A checkpoint has the lengths of files, open plans, aliases, and how many messages of each subject
are pending (`ScheduleState`); a `SchedulePlan` writes it.

A schedule that came from another replica has a *mark* in its folder: the state of its files. The
mark counts until one of this replica's own checkpoints contains a schedule.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from struct import Struct, unpack_from
from typing import Any, Final, cast

import msgspec
import numpy as np
import numpy.typing as npt
from google_crc32c import value as crc32c

from qmq.delay import buckets
from qmq.delay.batches import (
    BatchCache,
    DueMessage,
    Pieces,
    Places,
    SchedulePlace,
    cut_by_bucket,
    first_id,
)
from qmq.delay.buckets import (
    ROW_BYTES,
    Bucket,
    BucketInfo,
    BucketReader,
    Buckets,
    DispatchMark,
    ReadAhead,
    ReadAheadPiece,
    ReadAheadResult,
    ScheduledBatch,
    name_of,
)
from qmq.delay.files import (
    DONE,
    IDX,
    LOG,
    AppendFiles,
    Leftovers,
    UnwrittenTail,
    cut_back,
    delete_all,
    unlink,
)
from qmq.delay.spread import RUN_MESSAGES_MIN, RUNS_MAX, Spread, due_column, runs_of
from qmq.errors import InvalidArgument, InvariantBroken, LogDamaged, MessageNotFound, check
from qmq.limits import MIB
from qmq.log.actions import (
    Cancel,
    Close,
    PlanAction,
    PlanDone,
    PlanVoid,
    Postpone,
    Recur,
    ScheduleAction,
    decode_actions,
    encode_actions,
)
from qmq.log.disk import Disk
from qmq.log.segment_index import UNREADABLE as UNREADABLE_PAYLOAD
from qmq.log.segment_index import checked_payload, with_checksum
from qmq.log.store import ProjectionPlan
from qmq.model import DelayedId
from qmq.process.files import make_private
from qmq.wire.batch_columns import REGION, REGION_BYTES, UNREADABLE, BatchFlag, Column

VERSION: Final = 1
VERSION_WITH_RUNS: Final = 2
MARK_FILE: Final = "adopted.qms"
_MAGIC: Final = b"QMS1"
_BUCKET_ROW: Final = Struct("<iQIQI")
"""bucket, log_bytes, count, done_bytes, settled"""
_ALIAS_ROW: Final = Struct("<16siI")
_ALIASED: Final = Struct("<iI")


class ScheduleState(msgspec.Struct, array_like=True):
    """Everything about a schedule except the content of its files. `buckets` and `aliases` are
    packed: see FORMAT.md.
    """

    version: int
    bucket_ms: int
    index: int
    closed_before: int
    next_plan: int
    plans: bytes
    """The open plans, in the form of an action log entry."""
    aliases: bytes
    buckets: bytes
    pending: dict[str, int] = {}
    """Undelivered messages by subject; a state of an older version has none."""
    runs: bytes = b""
    in_runs: bytes = b""
    filed: bytes = b""

    def open_plans(self) -> dict[int, PlanAction]:
        """By number, ascending."""
        return {
            each.number: each for each in decode_actions(self.plans) if isinstance(each, PlanAction)
        }

    def places_by_id(self) -> dict[bytes, SchedulePlace]:
        return {
            each: SchedulePlace(bucket, ordinal)
            for each, bucket, ordinal in _ALIAS_ROW.iter_unpack(self.aliases)
        }

    def rows(self) -> Iterator[tuple[int, int, int, int, int]]:
        """(bucket, log_bytes, count, done_bytes, settled), ascending."""
        return cast(
            "Iterator[tuple[int, int, int, int, int]]", _BUCKET_ROW.iter_unpack(self.buckets)
        )

    def lengths(self) -> list[tuple[str, int]]:
        """The files with their lengths; empty files are left out."""
        found: list[tuple[str, int]] = []
        for bucket, log_bytes, count, done_bytes, _ in self.rows():
            name = name_of(bucket, self.bucket_ms)
            found += ((name + LOG, log_bytes), (name + IDX, count * ROW_BYTES))
            if done_bytes:
                found.append((name + DONE, done_bytes))
        return found + [(each.file.name, each.size) for each in runs_of(self.runs)]


def restore(bucket_ms: int | None, state: Any) -> ScheduleState:
    """A state from a checkpoint or another replica. Raises LogDamaged if it does not fit this
    schedule (None: any).
    """
    if isinstance(state, ScheduleState):
        return state
    try:
        found = msgspec.convert(state, ScheduleState)
    except UNREADABLE_PAYLOAD as cause:
        raise LogDamaged(
            f"the checkpoint's schedule cannot be read ({cause}): delete the checkpoint"
        ) from cause
    if found.version not in (VERSION, VERSION_WITH_RUNS):
        raise LogDamaged(
            f"the schedule has version {found.version}, this program supports "
            f"{VERSION_WITH_RUNS}: use the program that wrote it"
        )
    if bucket_ms not in (None, found.bucket_ms):
        raise LogDamaged(
            f"the schedule's buckets last {found.bucket_ms} ms, not {bucket_ms}: a delay "
            "group's bucket length is fixed when it is created"
        )
    return found


def read_mark(folder: Path, bucket_ms: int) -> ScheduleState | None:
    """The mark of an adopted schedule; None without a valid one."""
    try:
        data = (folder / MARK_FILE).read_bytes()
    except FileNotFoundError:
        return None
    payload = checked_payload(_MAGIC, data)
    if payload is None:
        return None
    try:
        state = msgspec.msgpack.decode(payload)
    except UNREADABLE_PAYLOAD:
        return None
    return restore(bucket_ms, state)


def write_mark(disk: Disk, folder: Path, state: bytes) -> None:
    """Mark the folder's files as those of `state` (MessagePack). Raises DiskFull, FlushFailed."""
    disk.replace(folder / MARK_FILE, with_checksum(_MAGIC, state))


class PendingCounts:
    """How many messages of each subject a delay group still has to deliver: pending or planned.

    A batch counts when it is stored, a recurring message's next run when it is written. A message
    no longer counts when it is delivered or cancelled; one that is moved still counts. A checkpoint
    of an older version has no counts: what was stored before it then counts for nothing, and no
    count falls below 0.
    """

    __slots__ = ("_counts",)

    def __init__(self, counts: Mapping[str, int] | None = None) -> None:
        self._counts = dict(counts or {})

    def of(self, subject: str) -> int:
        return self._counts.get(subject, 0)

    def all(self) -> dict[str, int]:
        """A copy of the counts of all subjects with pending messages."""
        return dict(self._counts)

    def add(self, subject: str, messages: int) -> None:
        """Count new pending messages."""
        self._counts[subject] = self._counts.get(subject, 0) + messages

    def take(self, subject: str, messages: int) -> None:
        """Count messages that were delivered or cancelled."""
        left = self._counts.get(subject, 0) - messages
        if left > 0:
            self._counts[subject] = left
        else:
            self._counts.pop(subject, None)


@dataclass(frozen=True, slots=True)
class SchedulePlan:
    """A captured schedule; see `qmq.log.store.ProjectionPlan`."""

    state: Any
    files: AppendFiles
    tails: list[UnwrittenTail]
    unsynced: dict[str, int]
    unnamed: frozenset[str] = frozenset()
    """Files that exist and that the state does not name."""

    def run(self) -> None:
        """Raises FlushFailed, DiskFull."""
        self.files.write_and_sync(self.tails, self.unsynced)


log = logging.getLogger("qmq.delay")

_DUE: Final = int(Column.DUE)
_FLAGS: Final = 0xFFFF
_NEVER_STAGED: Final = int(BatchFlag.HALF | BatchFlag.RECURRING)
"""Batches that are listed by these flags."""
SPREAD_BUCKETS_MIN: Final = 8
_ALWAYS: Final = 1 << 62
CHECKPOINTS_KEPT: Final = 2


def _never() -> int:
    return -1


class Schedule:
    """`folder` is the store's folder `schedule`. For one thread, except what `reader` returns."""

    def __init__(
        self,
        folder: Path,
        disk: Disk,
        bucket_ms: int,
        *,
        buffer_bytes_max: int = 64 * MIB,
        run_messages_min: int = RUN_MESSAGES_MIN,
        runs_max: int = RUNS_MAX,
    ) -> None:
        if bucket_ms < 1000 or bucket_ms % 1000:
            raise InvalidArgument(f"a bucket lasts whole seconds, not {bucket_ms} ms")
        self.folder = folder
        self.bucket_ms = bucket_ms
        self._on_pending: Callable[[Places], None] | None = None
        self._until_ms: Callable[[], int] = _never
        self._disk = disk
        self._buffer_bytes_max = buffer_bytes_max
        self._run_messages_min, self._runs_max = run_messages_min, runs_max
        self._files = AppendFiles(disk, folder)
        self._reset()

    def _reset(self) -> None:
        self.is_whole = True
        """False if the log does not reach back far enough and there was no earlier schedule. Then
        entries are ignored.
        """
        self.index = 0
        self.closed_before = 0
        self.plans: dict[int, PlanAction] = {}
        self.next_plan = 1
        self.pending = PendingCounts()
        self._loaded_index = 0
        self._aliases: dict[bytes, SchedulePlace] = {}
        self._alias_of: dict[SchedulePlace, bytes] = {}
        self._files.close()
        self._files = AppendFiles(self._disk, self.folder)
        spread = Spread(self._files, self._run_messages_min, self._runs_max)
        self._buckets = Buckets(self._files, self.bucket_ms, self._buffer_bytes_max, spread)
        self._cache = BatchCache()
        self._read_ahead = ReadAhead(self._disk, self._buckets, self._cache)
        self._leftovers = Leftovers(self.folder)
        self._checkpoints = 0

    # --- opening and closing ----------------------------------------------------------------------

    def load(self, state: Any | None, replayed_from: int = 1) -> None:
        """See `Projection.load`. Cuts files back, reads none of them. Raises LogDamaged, and then
        nothing was changed.
        """
        self._reset()
        make_private(self.folder)
        found = (
            restore(self.bucket_ms, state) if state is not None else self._adopted(replayed_from)
        )
        if found is None:
            self.is_whole = replayed_from <= 1
            delete_all(self.folder)
            return
        first_kept = name_of(found.closed_before, self.bucket_ms)
        older = cut_back(self._disk, self.folder, dict(found.lengths()), first_kept, keep=MARK_FILE)
        self._leftovers = Leftovers(self.folder, older)
        self._restore(found)

    def _adopted(self, replayed_from: int) -> ScheduleState | None:
        found = read_mark(self.folder, self.bucket_ms)
        return found if found is not None and found.index + 1 >= replayed_from else None

    def _restore(self, found: ScheduleState) -> None:
        self.index = self._loaded_index = found.index
        self.closed_before = found.closed_before
        self.next_plan = found.next_plan
        self.plans = found.open_plans()
        self.pending = PendingCounts(found.pending)
        self._aliases = found.places_by_id()
        self._alias_of = {place: each for each, place in self._aliases.items()}
        self._buckets.restore(found.rows())
        self._buckets.spread.restore(found.runs, found.in_runs, found.filed)

    def close(self) -> None:
        self._files.close()

    # --- checkpoints ------------------------------------------------------------------------------

    def begin_checkpoint(self, index: int = 0) -> SchedulePlan:
        if not self.is_whole:
            return SchedulePlan(None, self._files, [], {})
        self._buckets.settle_stage()
        self._drop_runs()
        return SchedulePlan(
            self._captured(max(index, self.index)),
            self._files,
            self._buckets.tails(),
            self._files.unsynced(),
            self._leftovers.captured(),
        )

    def _captured(self, index: int) -> ScheduleState:
        """The current state, independent of later changes."""
        rows = [
            _BUCKET_ROW.pack(each.number, each.log.end, each.count, each.done.end, each.settled)
            for each in self._buckets
        ]
        aliases = [each + _ALIASED.pack(*place) for each, place in self._aliases.items()]
        spread = self._buckets.spread
        return ScheduleState(
            VERSION_WITH_RUNS if spread.runs else VERSION,
            self.bucket_ms,
            index,
            self.closed_before,
            self.next_plan,
            encode_actions(self.plans.values()),
            b"".join(aliases),
            b"".join(rows),
            self.pending.all(),
            *spread.state(),
        )

    def end_checkpoint(self, plan: ProjectionPlan) -> None:
        """See `Projection.end_checkpoint`. Deletes files that only deleted checkpoints named."""
        if not isinstance(plan, SchedulePlan):
            raise InvariantBroken(f"{plan} is no plan of a schedule")
        if plan.state is None:
            return
        self._files.synced(plan.unsynced)
        self._buckets.wrote(plan.tails)
        self._checkpoints += 1
        if self._checkpoints == CHECKPOINTS_KEPT:
            unlink(self.folder, [MARK_FILE])
        self._leftovers.saved(plan.unnamed)

    @staticmethod
    def files(state: Any) -> list[tuple[str, int]]:
        """The names of a state's files, and the length of each. Raises LogDamaged."""
        return restore(None, state).lengths()

    @staticmethod
    def adopt(folder: Path, state: bytes, disk: Disk | None = None) -> None:
        """The folder has another replica's files, of `state` (MessagePack): the next opening takes
        them, if the log reaches back so far.

        They must have been synced. Raises DiskFull, FlushFailed.
        """
        write_mark(disk or Disk(), folder, state)

    # --- storing ----------------------------------------------------------------------------------

    def _bucket_of(self, due_ms: int) -> int:
        """The bucket of a message that is due then."""
        return max(due_ms // self.bucket_ms, self.closed_before)

    def _buckets_of(self, due_times_ms: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        return np.maximum(due_times_ms // self.bucket_ms, self.closed_before).astype(np.int32)

    def _near(self) -> int:
        """The last bucket whose messages are reported immediately."""
        return self._until_ms() // self.bucket_ms

    def take(self, index: int, append_time_ms: int, region: bytes, region_crc: int) -> None:
        if index <= self.index or not self.is_whole:
            return
        self.index = index
        _, _, flags, count, _, columns, _, body_bytes, subject_bytes, _, _ = REGION.unpack_from(
            region
        )
        if not columns & _DUE:
            return
        self.pending.add(
            region[REGION_BYTES : REGION_BYTES + subject_bytes].decode(errors="replace"), count
        )
        at = due_column(region, count, body_bytes)
        batch = ScheduledBatch(index, append_time_ms, region, region_crc, flags & _FLAGS)
        if count == 1:
            self._store_one(batch, unpack_from("<q", region, at)[0])
            return
        due_times_ms = np.frombuffer(region, "<i8", count, at)
        first = self._bucket_of(int(due_times_ms.min()))
        last = self._bucket_of(int(due_times_ms.max()))
        if self._are_far(first, last, flags):
            self._spread(batch, due_times_ms, first, last)
        elif last == first:
            ordinal = self._buckets.add(first, batch, due_times_ms)
            self._report_pending(
                due_times_ms,
                np.full(count, first, np.int32),
                np.arange(ordinal, ordinal + count, dtype=np.uint32),
            )
        else:
            self._cut(batch, due_times_ms)

    def subscribe(
        self, on_pending: Callable[[Places], None], until_ms: Callable[[], int] = lambda: _ALWAYS
    ) -> Callable[[], None]:
        """Report messages immediately when they become pending (stored, moved, or next runs).
        Messages of buckets that begin after `until_ms` need not be reported. Returns the function
        that ends this.
        """
        self._on_pending, self._until_ms = on_pending, until_ms

        def unsubscribe() -> None:
            if self._on_pending is on_pending:  # else an engine of a later term has subscribed
                self._on_pending, self._until_ms = None, _never

        return unsubscribe

    def _report_pending(
        self,
        due_times_ms: npt.NDArray[np.int64],
        buckets: npt.NDArray[np.int32],
        ordinals: npt.NDArray[np.uint32],
    ) -> None:
        if self._on_pending is not None:
            self._on_pending(Places(due_times_ms, buckets, ordinals))

    def _store_one(self, batch: ScheduledBatch, due_ms: int) -> SchedulePlace:
        number = self._bucket_of(due_ms)
        if self._are_far(number, number, batch.flags):
            place = SchedulePlace(number, self.count(number))
            self._spread(batch, np.array([due_ms], np.int64), number, number)
            return place
        ordinal = self._buckets.add(number, batch, due_ms)
        if self._on_pending is not None:
            self._report_pending(
                np.array([due_ms], np.int64),
                np.array([number], np.int32),
                np.array([ordinal], np.uint32),
            )
        return SchedulePlace(number, ordinal)

    def _cut(self, batch: ScheduledBatch, due_times_ms: npt.NDArray[np.int64]) -> None:
        numbers = self._buckets_of(due_times_ms)
        try:
            ordinals = self._add_pieces(
                Pieces(batch.region), batch, due_times_ms, numbers, range(len(numbers))
            )
        except UNREADABLE:
            # it can never be read; it is stored unchanged, and reading it raises the error
            numbers[:] = numbers.min()
            first = self._buckets.add(int(numbers[0]), batch, due_times_ms)
            ordinals = np.arange(first, first + len(due_times_ms), dtype=np.uint32)
        self._report_pending(due_times_ms, numbers, ordinals)

    def _add_pieces(
        self,
        pieces: Pieces,
        batch: ScheduledBatch,
        due_times_ms: npt.NDArray[np.int64],
        numbers: npt.NDArray[np.int32],
        which: Sequence[int],
    ) -> npt.NDArray[np.uint32]:
        index, append_ms, _, _, flags = batch
        add, ordinals = self._buckets.add, np.zeros(len(due_times_ms), np.uint32)
        for number, places, piece in cut_by_bucket(pieces, numbers, which):
            part = ScheduledBatch(index, append_ms, piece, crc32c(piece), flags)
            if len(places) == 1:
                ordinals[places[0]] = add(number, part, pieces.due_times_ms[places[0]])
            else:
                ordinal = add(number, part, due_times_ms[places])
                ordinals[places] = np.arange(ordinal, ordinal + len(places), dtype=np.uint32)
        return ordinals

    def _are_far(self, first: int, last: int, flags: int) -> bool:
        """Whether a batch of these buckets is staged (spread.py): it falls into many, or a bucket
        has messages that are not filed. What is near, or unusual, is not.
        """
        near = self._near()
        if last <= near or flags & _NEVER_STAGED:
            return False
        if last - max(first, near) >= SPREAD_BUCKETS_MIN:
            return True
        return any(map(self._buckets.spread.has, range(max(first, near + 1), last + 1)))

    def _spread(
        self, batch: ScheduledBatch, due_times_ms: npt.NDArray[np.int64], first: int, last: int
    ) -> None:
        """Stage the far messages of a batch of these buckets, and cut off the near ones."""
        numbers = self._buckets_of(due_times_ms)
        near = self._near()
        spread, which = self._buckets.spread, None
        if first <= near:
            which = np.flatnonzero(numbers > near)
        try:
            is_staged = spread.stage(
                batch.log_index,
                batch.append_ms,
                batch.region,
                due_times_ms,
                numbers,
                max(first, near + 1),
                last,
                which,
            )
        except UNREADABLE:
            is_staged = False
        if not is_staged:
            self._cut(batch, due_times_ms)
            return
        if which is not None:
            places = np.flatnonzero(numbers <= near)
            ordinals = self._add_pieces(
                Pieces(batch.region), batch, due_times_ms, numbers, places.tolist()
            )
            self._report_pending(due_times_ms[places], numbers[places], ordinals[places])
        self._buckets.file_surplus(len(due_times_ms))
        self._drop_runs()

    def _drop_runs(self) -> None:
        spread = self._buckets.spread
        self._leftovers.add(spread.over)
        spread.over.clear()
        for run in spread.new:
            self._leftovers.remove(run)
        spread.new.clear()

    # --- acting -----------------------------------------------------------------------------------

    def act(self, index: int, append_time_ms: int, action: ScheduleAction) -> None:
        """See `Projection.act`. The actions of one entry have one index."""
        if index <= self._loaded_index or index < self.index or not self.is_whole:
            return
        self.index = index
        if isinstance(action, PlanAction):
            self._plan(action)
        elif isinstance(action, PlanDone):
            self._done(action)
        elif isinstance(action, PlanVoid):
            self._void(action)
        elif isinstance(action, Cancel):
            self._cancel(SchedulePlace(action.bucket, action.ordinal))
        elif isinstance(action, Postpone):
            self._postpone(
                index, append_time_ms, SchedulePlace(action.bucket, action.ordinal), action.due_ms
            )
        elif isinstance(action, Recur):
            self._recur(
                index, append_time_ms, SchedulePlace(action.bucket, action.ordinal), action.due_ms
            )
        else:
            self._close_before(action)

    def _plan(self, plan: PlanAction) -> None:
        check(
            plan.number >= self.next_plan, f"plan {plan.number} comes behind {self.next_plan - 1}"
        )
        for number, ordinals in plan.items:
            bucket = self._marked(number)
            marks = bucket.marks()[np.frombuffer(ordinals, "<u4")]
            check(
                not marks.any(),
                f"plan {plan.number} is about messages of {bucket.log.name} that are not pending",
            )
            bucket.mark(DispatchMark.PLANNED, ordinals)
        self.plans[plan.number] = plan
        self.next_plan = plan.number + 1

    def _done(self, action: PlanDone) -> None:
        for number in action.numbers:
            plan = self.plans.get(number)
            if plan is not None:
                for bucket, ordinals in _by_bucket(plan).items():
                    self._settle(self._marked(bucket), DispatchMark.DELIVERED, ordinals)
                    self.pending.take(plan.subject, len(ordinals) // 4)
                del self.plans[number]

    def _void(self, action: PlanVoid) -> None:
        for number in action.numbers:
            plan = self.plans.get(number)
            if plan is not None:
                for bucket, ordinals in plan.items:
                    self._marked(bucket).mark(DispatchMark.PENDING, ordinals)
                del self.plans[number]

    def _cancel(self, place: SchedulePlace) -> None:
        if self._mark_of(place) is DispatchMark.PENDING:
            bucket = self._marked(place.bucket)
            self._settle(bucket, DispatchMark.CANCELLED, _u32(place.ordinal))
            self.pending.take(bucket.subject_of(place.ordinal), 1)

    def _settle(
        self,
        bucket: Bucket,
        mark: DispatchMark,
        ordinals: bytes,
        targets: tuple[SchedulePlace, ...] = (),
    ) -> None:
        bucket.settle(mark, ordinals, targets)
        self._buckets.grew(bucket)
        if self._alias_of:
            for ordinal in np.frombuffer(ordinals, "<u4").tolist():
                message_id = self._alias_of.pop(SchedulePlace(bucket.number, ordinal), None)
                if message_id is not None:
                    del self._aliases[message_id]

    def _postpone(self, index: int, append_ms: int, place: SchedulePlace, due_ms: int) -> None:
        if self._mark_of(place) is not DispatchMark.PENDING:
            return
        found = self._pieces(place)
        if found is None:
            return
        pieces, at = found
        known_as = first_id(pieces, at)
        pieces.decide()
        region = pieces.postponed(at, due_ms)
        flags = pieces.header.flags & _FLAGS
        batch = ScheduledBatch(index, append_ms, region, crc32c(region), flags)
        new = self._store_one(batch, due_ms)
        self._settle(self._marked(place.bucket), DispatchMark.MOVED, _u32(place.ordinal), (new,))
        self._alias(known_as, new)

    def _recur(self, index: int, append_ms: int, place: SchedulePlace, due_ms: int) -> None:
        found = self._pieces(place)
        if found is None:
            return
        pieces, at = found
        known_as = first_id(pieces, at)
        self.pending.add(self._marked(place.bucket).subject_of(place.ordinal), 1)
        region = pieces.next_run(at, known_as, due_ms)
        flags = pieces.header.flags & _FLAGS
        batch = ScheduledBatch(index, append_ms, region, crc32c(region), flags)
        self._alias(known_as, self._store_one(batch, due_ms))

    def _pieces(self, place: SchedulePlace) -> tuple[Pieces, int] | None:
        """The parsed batch, and the message's place in it; None if there is no such message, or the
        batch can never be parsed.

        Raises LogDamaged if the disk has changed it.
        """
        bucket = self._buckets.get(place.bucket)
        if bucket is None or place.ordinal >= bucket.count:
            return None
        batch, at = bucket.batch_of(place.ordinal, self._cache)
        try:
            return Pieces(batch.view.region), at
        except UNREADABLE as cause:  # its checksum is valid, so all replicas ignore it
            log.error(
                "message %d of schedule/%s cannot be changed and stays as it is: %r",
                place.ordinal,
                bucket.log.name,
                cause,
            )
            return None

    def _alias(self, message_id: bytes, place: SchedulePlace) -> None:
        before = self._aliases.get(message_id)
        if before is not None:
            del self._alias_of[before]
        self._aliases[message_id] = place
        self._alias_of[place] = message_id

    def _close_before(self, action: Close) -> None:
        """Close the buckets that have no pending messages.
        Messages may have come since the master checked.
        """
        left = next(
            (each.number for each in self._buckets if each.settled < each.count), action.before
        )
        unfiled = self._buckets.spread.first
        if unfiled is not None:
            left = min(left, unfiled)
        self.closed_before = max(self.closed_before, min(action.before, left))
        self._leftovers.add(self._buckets.drop_before(self.closed_before))

    # --- what became of them ----------------------------------------------------------------------

    def _marked(self, number: int) -> Bucket:
        """The bucket with the states of its messages loaded. Raises MessageNotFound, LogDamaged."""
        bucket = self._buckets.require(number)
        if not bucket.has_marks:
            bucket.load_marks(
                ordinals
                for plan in self.plans.values()
                for each, ordinals in plan.items
                if each == number
            )
        return bucket

    def _mark_of(self, place: SchedulePlace) -> DispatchMark | None:
        bucket = self._buckets.get(place.bucket)
        if bucket is None or place.ordinal >= bucket.count:
            return None
        if not bucket.settled and not self.plans:
            return DispatchMark.PENDING
        return self._marked(place.bucket).mark_of(place.ordinal)

    def state_of(self, place: SchedulePlace) -> str:
        """One of "pending", "planned", "delivered", "cancelled" or "moved". Raises MessageNotFound
        if its bucket is deleted, LogDamaged.
        """
        mark = self._mark_of(place)
        if mark is None:
            raise MessageNotFound(
                f"there is no message {place.ordinal} in bucket "
                f"{name_of(place.bucket, self.bucket_ms)}, or it was deleted"
            )
        return mark.name.lower()

    def are_pending(self, places: Places) -> npt.NDArray[np.bool_]:
        """For each message, whether it is pending (not planned). Raises LogDamaged."""
        found = np.zeros(len(places), np.bool_)
        for number in np.unique(places.buckets).tolist():
            if number in self._buckets:
                where = places.buckets == number
                found[where] = (
                    self._marked(number).marks()[places.ordinals[where]] == DispatchMark.PENDING
                )
        return found

    def settled(self, bucket: int) -> npt.NDArray[np.bool_]:
        """For each ordinal of the bucket whether it is planned, delivered, cancelled or moved. A
        copy. Raises LogDamaged.
        """
        return (
            self._marked(bucket).marks() != DispatchMark.PENDING
            if bucket in self._buckets
            else np.zeros(0, np.bool_)
        )

    # --- reading ----------------------------------------------------------------------------------

    def buckets(self) -> list[BucketInfo]:
        """All stored buckets, ascending."""
        spread = self._buckets.spread
        unfiled, unfiled_bytes = spread.counts(), spread.filed_bytes
        found = [
            BucketInfo(
                each.number,
                each.count + (more := unfiled.pop(each.number, 0)),
                each.count - each.settled + more,
                each.log.end + each.idx.end + each.done.end + more * unfiled_bytes,
            )
            for each in self._buckets
        ]
        if unfiled:
            found += [
                BucketInfo(number, more, more, more * unfiled_bytes)
                for number, more in unfiled.items()
            ]
            found.sort()
        return found

    def count(self, bucket: int) -> int:
        """The number of the bucket's messages; 0 if the bucket does not exist."""
        found = self._buckets.as_filed(bucket)
        return (0 if found is None else found.count) + self._buckets.spread.count(bucket)

    def file_near(self, until_ms: int) -> bool:
        """Do a part of the work that is left for buckets up to this time, so that what needs one
        of them does not wait for it. Returns whether there may be more. Raises LogDamaged.
        """
        is_more = self._buckets.file_near(until_ms // self.bucket_ms)
        self._drop_runs()
        return is_more

    def reader(self, bucket: int) -> BucketReader:
        """The bucket's index at this moment, for reading in a thread. Raises MessageNotFound."""
        return BucketReader(self._disk, self._files, self._buckets.require(bucket))

    def read(self, places: Places) -> list[DueMessage]:
        """The messages in the order of the places; each batch is read once.
        Raises MessageNotFound, LogDamaged.
        """
        found: list[DueMessage | None] = [None] * len(places)
        # so that a batch's messages are adjacent
        order = np.lexsort((places.ordinals, places.buckets))
        numbers, ordinals = places.buckets[order].tolist(), places.ordinals[order].tolist()
        wheres = iter(order.tolist())
        for number, same in groupby(zip(numbers, ordinals, strict=True), itemgetter(0)):
            messages = buckets.messages_of(
                self._buckets.require(number), self._cache, [each for _, each in same]
            )
            # in this order: it is the messages that end
            for message, where in zip(messages, wheres, strict=False):
                found[where] = message
        return [each for each in found if each is not None]

    def read_ahead(self, from_ms: int, to_ms: int) -> ReadAheadPiece | None:
        """The function to run in a thread so that messages due in this span can be read quickly;
        give its result to `note_read_ahead`. None: no messages have to be read ahead.
        """
        return self._read_ahead.next_piece(
            range(self._bucket_of(from_ms), self._bucket_of(to_ms) + 1)
        )

    def note_read_ahead(self, found: ReadAheadResult) -> None:
        """Take the result of reading a piece ahead."""
        self._read_ahead.note(found)

    def alias(self, message_id: bytes) -> SchedulePlace | None:
        """The current place of a moved or recurring message, by its first id (16 bytes); None for
        other messages and settled ones.
        """
        return self._aliases.get(message_id)

    def find(self, delayed: DelayedId) -> SchedulePlace:
        """The message's current or last place. Raises MessageNotFound, LogDamaged."""
        place = self._aliases.get(delayed.message_id.to_bytes())
        if place is not None:
            return place
        number = self._bucket_of(delayed.due_ms)
        bucket = self._buckets.get(number)
        place = (
            None
            if bucket is None
            else buckets.find(bucket, self._cache, delayed.append_ms, delayed.message_id.to_bytes())
        )
        while place is not None and self._mark_of(place) is DispatchMark.MOVED:
            place = self._marked(place.bucket).moved_to(place.ordinal)
        if place is None or place.bucket not in self._buckets:
            raise MessageNotFound(
                f"no delayed message {delayed} here: it never existed, or its bucket is deleted"
            )
        return place

    def scan(
        self, subject: str, from_ms: int = 0, to_ms: int = 0, *, flags: int = 0
    ) -> Iterator[DueMessage]:
        """Pending messages of the subject ("": of all) with from <= due < to (0: no limit), by due
        time. The schedule must not change meanwhile. With `flags`, only messages of batches that
        have all of these flags; other batches are not read. Unreadable messages are left out and
        logged. Raises LogDamaged if an index or a dispatch log cannot be read.
        """
        end_ms = to_ms or 1 << 62
        first = self._bucket_of(from_ms)
        with_files = {each.number for each in self._buckets}
        for number in sorted(
            with_files
            if flags & _NEVER_STAGED
            else with_files | self._buckets.spread.counts().keys()
        ):
            is_behind = number * self.bucket_ms >= end_ms and number > self.closed_before
            if number < first or is_behind:
                continue
            bucket = self._buckets.require(number)
            if bucket.settled < bucket.count:
                for places in buckets.pending(self._marked(bucket.number), from_ms, end_ms, flags):
                    yield from (
                        each
                        for each in buckets.readable(self.read, places)
                        if not subject or each.subject == subject
                    )

    # --- the invariant ----------------------------------------------------------------------------

    def check(self) -> None:
        """Check the whole invariant. Reads everything; for tests."""
        planned: dict[int, list[bytes]] = defaultdict(list)
        for plan in self.plans.values():
            check(plan.number < self.next_plan, "a plan of the future")
            for number, ordinals in plan.items:
                planned[number].append(ordinals)
        check(list(self.plans) == sorted(self.plans), "plans out of order")
        for bucket in self._buckets:
            number = bucket.number
            check(number >= self.closed_before, "a bucket that was closed")
            buckets.check(
                bucket, self._cache, planned.pop(number, []), self.bucket_ms, self.closed_before
            )
        check(not planned, "plans of buckets that are not here")
        self._buckets.check()
        check(
            {place: each for each, place in self._aliases.items()} == self._alias_of,
            "aliases and places differ",
        )
        check(
            all(
                self._mark_of(place) in (DispatchMark.PENDING, DispatchMark.PLANNED)
                for place in self._alias_of
            ),
            "an alias of what is settled",
        )
        check(
            not {file.name for bucket in self._buckets for file in bucket.growing}
            & set(self._leftovers),
            "a leftover that is in use",
        )


def _by_bucket(plan: PlanAction) -> dict[int, bytes]:
    """A plan's ordinals by bucket, in the order of the plan."""
    found: dict[int, bytes] = {}
    for number, ordinals in plan.items:
        found[number] = found.get(number, b"") + ordinals
    return found


def _u32(number: int) -> bytes:
    return number.to_bytes(4, "little")
