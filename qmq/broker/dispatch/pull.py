"""Decides what a consumer gets next and what it gets again, and how many bytes it may hold, and
builds the answer. Pure, except for reading batches and the index.

Requeued messages go first (the longest due first), then the group's next new messages. Whole
batches are sent, because their checksum is the producer's; a range says which messages of a batch
are meant. Batches that cannot match the consumer's tags are skipped by their index entry and their
column of hashes, without decoding a message. Batches that are directed to another group
(`qmq/rpc/channel.py`) are skipped as well; until then they count as waiting messages of this group.

The master decides about failed messages, and about messages of lost consumers, by the group's
settings (`decide`):

    NACK, attempt < attempts_max       requeued after its own delay, or the group's for this attempt
    NACK, attempt = attempts_max       dead
    lost, on its first attempt         requeued immediately: it is not known which messages had been
                                       begun
    lost, later, begun                 as NACK, with the group's delay
    lost, later, never begun           released: the attempt stays the same

The attempt of a directed message includes earlier failures: copies of long retries carry their
number (`failures_in`). All other verdicts pass unchanged, even on messages that the consumer does
not hold: the share ignores those.

A consumer's unacknowledged bytes, as stored in the log, are limited besides its messages
(`UnackedBytes`). A message counts for its part of its batch. Counting goes over all ranges that the
consumer holds, so it is not done for every pull: the last count plus everything handed out since is
an upper bound. Only when the bound reaches the limit is there another count; if that finds the
consumer at its limit, the next one waits until a part is settled. So a consumer far from the limit
costs one addition for each pull, and one at its limit a count for every 64th part that it settles.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from qmq import limits
from qmq.errors import InvalidArgument, LogDamaged, MessagesExpired
from qmq.log.actions import Pulled
from qmq.log.consume_log import ConsumeLog, IndexEntry
from qmq.log.group_state import EXPIRED, GroupState, HeldMessages, Requeued, ShareHolder
from qmq.log.queue import Queue
from qmq.log.reading import matching
from qmq.log.store import Store
from qmq.model import GroupSettings
from qmq.rpc.channel import LOOK_INSIDE, failures, group_of
from qmq.wire.batch import BatchView
from qmq.wire.batch_columns import UNREADABLE, Layout, parse_header, tag_bloom, tag_hash
from qmq.wire.frame_payloads import BY_GROUP_MS, Range, Settlement, Verdict

log = logging.getLogger("qmq.broker")

_ENTRIES_AHEAD: Final = 256
_FOUND_MAX: Final = 20_000
_ENTRIES_MAX: Final = 2_000
"""Batches that one pull may skip before others get a turn."""


@dataclass(frozen=True, slots=True)
class TagFilter:
    """Selects messages that have any of some tags and all of others. By hash in the broker, by
    string in the client.
    """

    any_of: tuple[int, ...] = ()
    all_of: tuple[int, ...] = ()

    @classmethod
    def of(cls, any_of: list[str], all_of: list[str]) -> TagFilter | None:
        """None if every message matches."""
        if not any_of and not all_of:
            return None
        return cls(tuple(map(tag_hash, any_of)), tuple(map(tag_hash, all_of)))

    def may_match(self, bloom: int) -> bool:
        """False if no message of a batch with this bloom can match."""
        if any(tag_bloom((each,)) & ~bloom for each in self.all_of):
            return False
        return not self.any_of or any(not tag_bloom((each,)) & ~bloom for each in self.any_of)

    def matching(self, region: bytes) -> npt.NDArray[np.bool_]:
        """For each message of a batch, whether it matches."""
        header = parse_header(region)
        return matching(region, header, Layout.walk(region, header), self.any_of, self.all_of)


def check_tags(tags: list[str]) -> None:
    """Check the tags of a filter. Raises InvalidArgument."""
    if len(tags) > limits.FETCH_TAGS_MAX or not all(
        0 < len(tag) <= limits.TAG_BYTES_MAX for tag in tags
    ):
        raise InvalidArgument(
            f"a filter has up to {limits.TAGS_MAX} tags of 1 to {limits.TAG_BYTES_MAX} bytes "
            "each way"
        )


class PulledRange(NamedTuple):
    """The messages `first` to `first + count - 1`, which are in the batch of `entry`."""

    entry: IndexEntry
    first: int
    count: int  # type: ignore[assignment]
    attempt: int


@dataclass(slots=True)
class PullResult:
    """The messages to hand out: `pulled` for the action log, `pieces` for the answer; both have the
    same messages in the same order.
    """

    pulled: list[Pulled] = field(default_factory=list)
    pieces: list[PulledRange] = field(default_factory=list)
    messages: int = 0
    bytes: int = 0
    retried: int = 0
    """Messages that were handed out and worked on before."""
    filtered: int = 0
    """New messages that the tag filter leaves out: those of skipped batches, and those that are
    handed out with their batch, because the client acknowledges them at once.
    """

    def add(self, piece: PulledRange) -> None:
        if not self.pieces or self.pieces[-1].entry.position != piece.entry.position:
            self.bytes += piece.entry.total_bytes
        self.pieces.append(piece)
        self.messages += piece.count


class BatchReader:
    """Reads one queue's index forward for one group, and remembers its place."""

    __slots__ = ("_ahead", "_found", "number", "queue")

    def __init__(self, queue: Queue) -> None:
        self.queue = queue
        self._ahead: dict[int, IndexEntry] = {}
        self._found: dict[int, int] = {}
        """Searched sequences: a failed message is looked up at every verdict and every attempt."""
        self.number = -1
        """Where the last read ended: the number of an entry, or -1."""

    def number_of(self, sequence: int) -> int:
        """The number of the entry that holds `sequence`, or of the next one; the number of entries
        if there is none.
        """
        place = self.number
        # the last pull looked at the entry behind its end, or at no further one
        for number in (place, place + 1, place - 1):
            if self._holds(number, sequence):
                break
        else:
            number = self._search(sequence)
        self.number = number
        return number

    def _search(self, sequence: int) -> int:
        index = self.queue.index
        number = self._found.get(sequence, -1)
        if number >= index.first:
            return number
        number = index.find_sequence(sequence) if index.count > index.first else index.count
        if number < index.count and self.entry(number).next_sequence <= sequence:
            number += 1
        if number < index.count:
            if len(self._found) >= _FOUND_MAX:
                self._found.clear()
            self._found[sequence] = number
        return number

    def _holds(self, number: int, sequence: int) -> bool:
        index = self.queue.index
        if not index.first <= number <= index.count:
            return False
        if number > index.first and self.entry(number - 1).next_sequence > sequence:
            return False
        return number == index.count or self.entry(number).next_sequence > sequence

    def entry(self, number: int) -> IndexEntry:
        """An index entry; the following ones are read ahead."""
        found = self._ahead.get(number)
        if found is None:
            if len(self._ahead) > 4 * _ENTRIES_AHEAD:
                self._ahead.clear()
            for at, each in enumerate(self.queue.index.entries(number, _ENTRIES_AHEAD)):
                self._ahead[number + at] = each
            found = self._ahead[number]
        return found

    def entries(self, sequence: int) -> Iterator[IndexEntry]:
        """The entries of committed batches, from the one that holds `sequence` on. The place is
        remembered, because the next pull begins where this one ends, and a search reads the index's
        files.
        """
        number, index = self.number_of(sequence), self.queue.index
        while number < index.count:
            self.number = number
            entry = self.entry(number)
            if entry.next_sequence > self.queue.visible_sequence:
                return
            yield entry
            number += 1

    def forget(self) -> None:
        """The index has changed: forget what was read."""
        self._ahead.clear()
        self._found.clear()
        self.number = -1


def collect(
    store: Store,
    reader: BatchReader,
    group: str,
    share: GroupState,
    tags: TagFilter | None,
    messages_max: int,
    bytes_max: int,
    now_ms: int,
) -> PullResult:
    """What the next pull of the group gets; `reader` and `share` are the group's. `pulled` is empty
    if no message is available. Raises MessagesExpired, LogDamaged.
    """
    delivery = PullResult()
    for item in share.due(now_ms, messages_max):
        if delivery.bytes >= bytes_max:
            break
        _collect_requeued(reader, item, delivery)
    if delivery.messages < messages_max and delivery.bytes < bytes_max and not share.is_full:
        _collect_new(store, reader, group.encode(), share, tags, delivery, messages_max, bytes_max)
    return delivery


def _collect_requeued(reader: BatchReader, item: Requeued, delivery: PullResult) -> None:
    queue = reader.queue
    gone = min(max(queue.start_sequence - item.first, 0), item.count)
    if gone:
        delivery.pulled.append(Pulled(item.first, gone, EXPIRED))
    if gone == item.count:
        return
    sequence, end = item.first + gone, item.first + item.count
    delivery.pulled.append(Pulled(sequence, end - sequence, item.attempt))
    number = reader.number_of(sequence)
    while sequence < end and number < queue.index.count:
        entry = reader.entry(number)
        sequence = max(sequence, entry.base_sequence)
        count = min(entry.next_sequence, end) - sequence
        delivery.add(PulledRange(entry, sequence, count, item.attempt))
        delivery.retried += count if item.attempt > 1 else 0
        sequence += count
        number += 1


def _collect_new(
    store: Store,
    reader: BatchReader,
    group: bytes,
    share: GroupState,
    tags: TagFilter | None,
    delivery: PullResult,
    messages_max: int,
    bytes_max: int,
) -> None:
    queue = reader.queue
    begin = sequence = share.next_sequence
    if sequence < queue.start_sequence:
        raise MessagesExpired(
            f"messages {sequence} to {queue.start_sequence - 1} of {queue.id} "
            "were deleted by retention before this group consumed them; "
            "to continue with the oldest remaining message: qmq group reset --to earliest"
        )
    if sequence >= queue.visible_sequence:
        return
    try:
        for entry in islice(reader.entries(sequence), _ENTRIES_MAX):
            if delivery.messages >= messages_max or delivery.bytes >= bytes_max:
                break
            first = max(sequence, entry.base_sequence)
            count = min(entry.next_sequence - first, messages_max - delivery.messages)
            if entry.tag_bloom == LOOK_INSIDE and not _is_for(store, queue, entry, group):
                sequence = entry.next_sequence
                continue
            if tags is not None and not tags.may_match(entry.tag_bloom):
                delivery.filtered += entry.next_sequence - first
                sequence = entry.next_sequence
                continue
            if tags is not None:
                chosen = _chosen(store, queue, entry, tags)[first - entry.base_sequence :]
                if not chosen.any():
                    delivery.filtered += len(chosen)
                    sequence = entry.next_sequence
                    continue
                delivery.filtered += count - int(np.count_nonzero(chosen[:count]))
            delivery.add(PulledRange(entry, first, count, 1))
            _extend(delivery.pulled, first, count, begin)
            sequence = first + count
    except LogDamaged:
        if not delivery.pulled and sequence == begin:
            raise
        # what comes before the damage is delivered first; the next pull gets the error
    last = delivery.pulled[-1] if delivery.pulled else None
    if sequence > begin and (last is None or sequence > last.first_sequence + last.count):
        delivery.pulled.append(Pulled(sequence, 0, 1))


def _is_for(store: Store, queue: Queue, entry: IndexEntry, group: bytes) -> bool:
    """Whether a batch that may be directed is for this group, or for all."""
    region = store.read(queue, entry)[1]
    try:
        return group_of(region) in (None, group)
    except UNREADABLE as cause:
        _pass_over(queue, entry, cause)
        return False


def _chosen(
    store: Store, queue: Queue, entry: IndexEntry, tags: TagFilter
) -> npt.NDArray[np.bool_]:
    """For each message of a batch, whether it matches; empty for a batch that cannot be read."""
    region = store.read(queue, entry)[1]
    try:
        return tags.matching(region)
    except UNREADABLE as cause:
        _pass_over(queue, entry, cause)
        return np.zeros(0, np.bool_)


def _pass_over(queue: Queue, entry: IndexEntry, cause: Exception) -> None:
    log.error(
        "the batch at sequence %d of %s cannot be read and is skipped: %r",
        entry.base_sequence,
        queue.id,
        cause,
    )


def _extend(pulled: list[Pulled], first: int, count: int, begin: int) -> None:
    """Add a range of new messages; it is joined to the previous one if that is
    new too and adjacent.
    """
    if pulled and first > begin:
        last = pulled[-1]
        if last.first_sequence >= begin and last.first_sequence + last.count == first:
            pulled[-1] = Pulled(last.first_sequence, last.count + count, 1)
            return
    pulled.append(Pulled(first, count, 1))


def lay_out(
    store: Store, queue: Queue, delivery: PullResult, kept: int = -1
) -> tuple[list[Range], list[bytes], int]:
    """(ranges, buffers of the batches, number of batches) of the answer, without the batch that
    begins at sequence `kept`. Raises LogDamaged.
    """
    entries = {
        piece.entry.position: piece.entry
        for piece in delivery.pieces
        if piece.entry.base_sequence != kept
    }
    buffers = [buffer for entry in entries.values() for buffer in store.read(queue, entry)]
    places = {position: place for place, position in enumerate(entries)}
    count = len(places)
    ranges = [
        Range(each.first, each.count, each.attempt, places.get(each.entry.position, count))
        for each in delivery.pieces
    ]
    return ranges, buffers, count


class LaidOut(NamedTuple):
    """A delivery as it is sent: `batches` buffers' batches, and the ranges of them."""

    found: PullResult
    ranges: list[Range]
    buffers: list[bytes]
    batches: int


SHARED_BYTES_MAX: Final = 64 * limits.KIB


class SharedDelivery:
    """The last delivery of all that is new in a queue. Groups that are at the same place get the
    same: it is found, read and laid out once for all of them. With 50 groups that saves a third of
    what a delivery costs.
    """

    __slots__ = ("_delivery", "_number", "_place")

    def __init__(self) -> None:
        self._place: object = None
        self._delivery: LaidOut | None = None
        self._number = -1

    def find(
        self, store: Store, reader: BatchReader, share: GroupState, messages_max: int, size_max: int
    ) -> LaidOut | None:
        """What a pull without a filter and without a kept batch gets; None if it is to be found."""
        delivery = self._delivery
        if (
            delivery is None
            or share.requeued
            or self._place != _place(store, reader.queue, share.next_sequence)
            or delivery.found.messages > messages_max
            or delivery.found.bytes > size_max
            or share.is_full
        ):
            return None
        reader.number = self._number
        return delivery

    def note(self, store: Store, reader: BatchReader, begin: int, delivery: LaidOut) -> None:
        """A pull of a group that was at `begin` got this, without a filter."""
        found, queue = delivery.found, reader.queue
        if (
            found.bytes <= SHARED_BYTES_MAX
            and found.pulled == [Pulled(begin, queue.visible_sequence - begin, 1)]
            and not any([each.entry.tag_bloom == LOOK_INSIDE for each in found.pieces])  # noqa: C419 - faster than a generator
        ):
            self._place, self._delivery = _place(store, queue, begin), delivery
            self._number = reader.number


def _place(store: Store, queue: Queue, begin: int) -> tuple[object, ...]:
    """What a delivery depends on. At the same index nothing was stored and no queue emptied."""
    return id(queue), begin, queue.start_sequence, queue.visible_sequence, store.index


def readable_messages(store: Store, queue: Queue, delivery: PullResult) -> int:
    """How many of the delivery's messages come before its first damaged batch."""
    count = 0
    for piece in delivery.pieces:
        try:
            store.read(queue, piece.entry)
        except LogDamaged:
            break
        count += piece.count
    return count


Failures = Callable[[int, int], Sequence[tuple[int, int]]]
"""(first sequence, count) -> [(count, failures before they were sent again)]: together all of them,
in order.
"""

RANGES_MIN: Final = 64
_pull_of: Final = attrgetter("pull")
_LOST_TEXT: Final = "its consumer was lost while it worked on it"


class Decided(NamedTuple):
    """Settlements in the form of the action log."""

    settlements: tuple[tuple[int, int, int, int], ...]
    errors: tuple[tuple[int, str], ...] = ()
    """(number of the settlement, error text), for dead messages."""


def decide(
    held: Sequence[HeldMessages],
    asked: Iterable[Settlement],
    settings: GroupSettings,
    failures: Failures,
    *,
    can_die: bool = True,
) -> Decided:
    """The decisions for a consumer's verdicts. Where messages cannot die, a rejection counts as one
    more failure.
    """
    found: list[Settlement] = []
    for given in asked:
        each = (
            given
            if can_die or given.verdict != Verdict.DEAD
            else given._replace(verdict=Verdict.NACK, delay_ms=BY_GROUP_MS)
        )
        if each.verdict == Verdict.NACK:
            found += _failed(held, each, settings, failures) or (each._replace(delay_ms=0),)
        else:
            found.append(each)
    return _joined(found)


def put_back(
    held: Sequence[HeldMessages],
    was_begun: Callable[[int], bool],
    settings: GroupSettings,
    failures: Failures,
) -> Decided:
    """The decisions for the messages of a lost consumer; `was_begun` tells for a pull sequence."""
    found: list[Settlement] = []
    for item in held:
        if item.attempt == 1:
            found.append(Settlement(item.pull, item.pull + item.count - 1, Verdict.NACK, 0))
            continue
        for first, last, is_begun in _runs(item, was_begun):
            if is_begun:
                nack = Settlement(first, last, Verdict.NACK, BY_GROUP_MS, _LOST_TEXT)
                found += _failed([item], nack, settings, failures)
            else:
                found.append(Settlement(first, last, Verdict.RELEASE, 0))
    return _joined(found)


def _runs(item: HeldMessages, was_begun: Callable[[int], bool]) -> Iterator[tuple[int, int, bool]]:
    """Ranges of pull sequences with the same attempt, reason and time of the next delivery."""
    first, end = item.pull, item.pull + item.count
    is_begun = was_begun(first)
    for pull in range(first + 1, end):
        if was_begun(pull) != is_begun:
            yield first, pull - 1, is_begun
            first, is_begun = pull, not is_begun
    yield first, end - 1, is_begun


def _failed(
    held: Sequence[HeldMessages], nack: Settlement, settings: GroupSettings, failures: Failures
) -> list[Settlement]:
    """A NACK, cut where attempts differ."""
    found: list[Settlement] = []
    begin = max(bisect_right(held, nack.first, key=_pull_of) - 1, 0)
    for at in range(begin, len(held)):  # not a slice: slicing for each of many NACKs is quadratic
        item = held[at]
        if item.pull > nack.last:
            break
        low, high = max(nack.first, item.pull), min(nack.last, item.pull + item.count - 1)
        if low > high:
            continue
        for count, failed in failures(item.first + low - item.pull, high - low + 1):
            attempt = item.attempt + failed
            is_dead = 0 < settings.attempts_max <= attempt
            delay_ms = (
                settings.delay_ms(attempt)
                if nack.delay_ms == BY_GROUP_MS
                else min(nack.delay_ms, limits.REQUEUE_MS_MAX)
            )
            verdict = (Verdict.DEAD, 0) if is_dead else (Verdict.NACK, delay_ms)
            found.append(Settlement(low, low + count - 1, *verdict, nack.error))
            low += count
    return found


def _joined(found: Iterable[Settlement]) -> Decided:
    """The fewest equivalent ranges. Error texts are kept for dead messages only."""
    parts: list[Settlement] = []
    for each in found:
        kept = each if each.verdict == Verdict.DEAD else each._replace(error="")
        last = parts[-1] if parts else None
        if last is not None and last.last + 1 == kept.first and last[2:] == kept[2:]:
            parts[-1] = last._replace(last=kept.last)
        else:
            parts.append(kept)
    settlements = tuple(
        [(each.first, each.last, int(each.verdict), each.delay_ms) for each in parts]
    )
    return Decided(
        settlements, tuple([(at, each.error) for at, each in enumerate(parts) if each.error])
    )


class Begun:
    """The pull sequences that one consumer has begun to work on, among those that failed before. In
    the master's memory only.
    """

    __slots__ = ("_prune_at", "_ranges")

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []
        self._prune_at = RANGES_MIN

    def add(self, first: int, last: int) -> None:
        """Both ends included."""
        if self._ranges and self._ranges[-1][0] <= first <= self._ranges[-1][1] + 1:
            self._ranges[-1] = self._ranges[-1][0], max(last, self._ranges[-1][1])
        else:
            self._ranges.append((first, last))

    def __contains__(self, pull: int) -> bool:
        return any(first <= pull <= last for first, last in self._ranges)

    def forget(self, held: Sequence[HeldMessages]) -> None:
        """Keep ranges that touch a held message; done only when the list has doubled."""
        if len(self._ranges) >= self._prune_at:
            self._ranges = [each for each in self._ranges if _touches(held, *each)]
            self._prune_at = max(2 * len(self._ranges), RANGES_MIN)


def _touches(held: Sequence[HeldMessages], first: int, last: int) -> bool:
    at = bisect_right(held, last, key=_pull_of) - 1
    return at >= 0 and held[at].pull + held[at].count > first


def failures_in(store: Store, queue: Queue, reader: BatchReader) -> Failures:
    """Returns a function that returns the failures for a range of the queue. Unreadable messages
    count as never failed: a damaged copy must not stop the caller.
    """

    def failures_of(sequence: int, count: int) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        end = sequence + count
        while sequence < end:
            number = reader.number_of(sequence)
            entry = reader.entry(number) if number < queue.index.count else None
            last = min(entry.next_sequence, end) if entry is not None else end
            own = (
                _failures_inside(store, queue, entry)
                if entry is not None and entry.tag_bloom == LOOK_INSIDE
                else []
            )
            if own and entry is not None and entry.base_sequence <= sequence:
                found += [
                    (1, each)
                    for each in own[sequence - entry.base_sequence : last - entry.base_sequence]
                ]
            else:
                found.append((last - sequence, 0))
            sequence = last
        return found

    return failures_of


def _failures_inside(store: Store, queue: Queue, entry: IndexEntry) -> list[int]:
    """The failures of each message of a batch that may be directed; empty if it is not."""
    try:
        view = BatchView.parse(b"".join(store.read(queue, entry)))
        return (
            [failures(each) for each in view.headers() or [{}] * view.count]
            if view.header.is_directed
            else []
        )
    except (LogDamaged, *UNREADABLE):
        return []


_PART: Final = 64
_ENTRIES: Final = 4096


class UnackedBytes:
    """The bytes of one session of a consumer."""

    __slots__ = ("_bytes", "_count_at", "_limit")

    def __init__(self, bytes_max: int = limits.CONSUMER_UNACKED_BYTES_MAX) -> None:
        self._limit = bytes_max
        self._bytes = bytes_max
        """An upper bound. What was handed out before this session is not known yet."""
        self._count_at = limits.CONSUMER_UNACKED_MAX
        """Count again when it holds no more messages than this."""

    def room(self, holder: ShareHolder, index: ConsumeLog) -> int:
        """The number of bytes that may be delivered now; 0 or less: none. Raises LogDamaged."""
        if not holder.unacked:
            self._bytes, self._count_at = 0, limits.CONSUMER_UNACKED_MAX
        elif self._bytes >= self._limit and holder.unacked <= self._count_at:
            self._bytes = bytes_of(index, holder.held)
            is_full = self._bytes >= self._limit
            self._count_at = (
                holder.unacked - max(holder.unacked // _PART, 1)
                if is_full
                else limits.CONSUMER_UNACKED_MAX
            )
        return self._limit - self._bytes

    def delivered(self, size: int) -> None:
        """Batches of `size` bytes were delivered."""
        self._bytes += size


def bytes_of(index: ConsumeLog, held: Sequence[HeldMessages]) -> int:
    """The bytes of the messages in these ranges, each its part of its batch. Deleted messages count
    as 0. Raises LogDamaged.
    """
    marks = np.array([[each.first, each.first + each.count] for each in held], np.int64).reshape(
        -1, 2
    )
    order = np.unique(marks)
    before = np.zeros(len(order))
    at = 0
    while at < len(order):
        at += _count_before(index, order, before, at)
    places = np.searchsorted(order, marks)
    return round(float((before[places[:, 1]] - before[places[:, 0]]).sum()))


def _count_before(
    index: ConsumeLog, order: npt.NDArray[np.int64], before: npt.NDArray[np.float64], at: int
) -> int:
    """Fill in, from `at` on, how many bytes of the queue lie before each sequence, as far as one
    read of the index reaches. Returns the number of filled places.
    """
    if index.count <= index.first:
        return len(order) - at
    number = index.find_sequence(int(order[at]))
    table = index.table(number, _ENTRIES)
    bases = table["base_sequence"].astype(np.int64)
    is_last = number + len(table) >= index.count
    known = len(order) - at if is_last else max(int(np.searchsorted(order[at:], bases[-1])), 1)
    wanted = order[at : at + known]
    rows = np.clip(np.searchsorted(bases, wanted, side="right") - 1, 0, None)
    parts = np.clip((wanted - bases[rows]) / table["count"][rows], 0, 1)
    before[at : at + known] = table["cumulative_bytes"][rows] + parts * table["total_bytes"][rows]
    return known
