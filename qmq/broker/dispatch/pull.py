"""Decides what a consumer gets next, and builds the answer. Pure, except for reading batches.

Requeued messages go first (the longest due first), then the group's next new messages. Whole batches are sent, because their checksum is
the producer's; a range says which messages of a batch are meant. Batches that cannot match the consumer's tags are skipped by their index
entry and their column of hashes, without decoding a message. Batches that are directed to another group (`qmq/rpc/channel.py`) are
skipped as well; until then they count as waiting messages of this group.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from qmq import limits
from qmq.errors import InvalidArgument, LogDamaged, MessagesExpired
from qmq.log.actions import Pulled
from qmq.log.consume_log import IndexEntry
from qmq.log.group_state import EXPIRED, GroupState, Requeued
from qmq.log.queue import Queue
from qmq.log.reading import matching
from qmq.log.store import Store
from qmq.rpc.channel import LOOK_INSIDE, group_of
from qmq.wire.batch_columns import UNREADABLE, Layout, parse_header, tag_bloom, tag_hash
from qmq.wire.frame_payloads import Range

log = logging.getLogger("qmq.broker")

_ENTRIES_AHEAD: Final = 256
_FOUND_MAX: Final = 20_000
_ENTRIES_MAX: Final = 2_000
"""Batches that one pull may skip before others get a turn."""


@dataclass(frozen=True, slots=True)
class TagFilter:
    """Selects messages that have any of some tags and all of others. By hash in the broker, by string in the client."""

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
    if len(tags) > limits.FETCH_TAGS_MAX or not all(0 < len(tag) <= limits.TAG_BYTES_MAX for tag in tags):
        raise InvalidArgument(f"a filter has up to {limits.TAGS_MAX} tags of 1 to {limits.TAG_BYTES_MAX} bytes each way")


class PulledRange(NamedTuple):
    """The messages `first` to `first + count - 1`, which are in the batch of `entry`."""

    entry: IndexEntry
    first: int
    count: int  # type: ignore[assignment]
    attempt: int


@dataclass(slots=True)
class PullResult:
    """The messages to hand out: `pulled` for the action log, `pieces` for the answer; both have the same messages in the same order."""

    pulled: list[Pulled] = field(default_factory=list)
    pieces: list[PulledRange] = field(default_factory=list)
    messages: int = 0
    bytes: int = 0
    retried: int = 0
    """Messages that were handed out and worked on before."""
    filtered: int = 0
    """New messages that the tag filter leaves out: those of skipped batches, and those that are handed out with their batch, because the
    client acknowledges them at once.
    """

    def add(self, piece: PulledRange) -> None:
        if not self.pieces or self.pieces[-1].entry.position != piece.entry.position:
            self.bytes += piece.entry.total_bytes
        self.pieces.append(piece)
        self.messages += piece.count


class BatchReader:
    """Reads one queue's index forward for one group, and remembers its place."""

    __slots__ = ("_ahead", "_found", "_number", "_queue")

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._ahead: dict[int, IndexEntry] = {}
        self._found: dict[int, int] = {}
        """Searched sequences: a failed message is looked up at every verdict and every attempt."""
        self._number = -1

    def number_of(self, sequence: int) -> int:
        """The number of the entry that holds `sequence`, or of the next one; the number of entries if there is none."""
        place = self._number
        for number in (place, place + 1, place - 1):  # the last pull looked at the entry behind its end, or at no further one
            if self._holds(number, sequence):
                break
        else:
            number = self._search(sequence)
        self._number = number
        return number

    def _search(self, sequence: int) -> int:
        index = self._queue.index
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
        index = self._queue.index
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
            for at, each in enumerate(self._queue.index.entries(number, _ENTRIES_AHEAD)):
                self._ahead[number + at] = each
            found = self._ahead[number]
        return found

    def entries(self, sequence: int) -> Iterator[IndexEntry]:
        """The entries of committed batches, from the one that holds `sequence` on. The place is remembered, because the next pull begins
        where this one ends, and a search reads the index's files.
        """
        number, index = self.number_of(sequence), self._queue.index
        while number < index.count:
            self._number = number
            entry = self.entry(number)
            if entry.next_sequence > self._queue.visible_sequence:
                return
            yield entry
            number += 1

    def forget(self) -> None:
        """The index has changed: forget what was read."""
        self._ahead.clear()
        self._found.clear()
        self._number = -1


def collect(
    store: Store,
    queue: Queue,
    group: str,
    share: GroupState,
    reader: BatchReader,
    tags: TagFilter | None,
    messages_max: int,
    bytes_max: int,
    now_ms: int,
) -> PullResult:
    """What the group's next pull gets; `share` is the group's. `pulled` is empty if no message is available. Raises
    MessagesExpired, LogDamaged.
    """
    delivery = PullResult()
    for item in share.due(now_ms, messages_max):
        if delivery.bytes >= bytes_max:
            break
        _collect_requeued(queue, reader, item, delivery)
    if delivery.messages < messages_max and delivery.bytes < bytes_max and not share.is_full:
        _collect_new(store, queue, group.encode(), share, reader, tags, delivery, messages_max, bytes_max)
    return delivery


def _collect_requeued(queue: Queue, reader: BatchReader, item: Requeued, delivery: PullResult) -> None:
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
    queue: Queue,
    group: bytes,
    share: GroupState,
    reader: BatchReader,
    tags: TagFilter | None,
    delivery: PullResult,
    messages_max: int,
    bytes_max: int,
) -> None:
    begin = sequence = share.next_sequence
    if sequence < queue.start_sequence:
        raise MessagesExpired(
            f"messages {sequence} to {queue.start_sequence - 1} of {queue.id} were deleted by retention before this group "
            "consumed them; to continue with the oldest remaining message: qmq group reset --to earliest"
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


def _chosen(store: Store, queue: Queue, entry: IndexEntry, tags: TagFilter) -> npt.NDArray[np.bool_]:
    """For each message of a batch, whether it matches; empty for a batch that cannot be read."""
    region = store.read(queue, entry)[1]
    try:
        return tags.matching(region)
    except UNREADABLE as cause:
        _pass_over(queue, entry, cause)
        return np.zeros(0, np.bool_)


def _pass_over(queue: Queue, entry: IndexEntry, cause: Exception) -> None:
    log.error("the batch at sequence %d of %s cannot be read and is skipped: %r", entry.base_sequence, queue.id, cause)


def _extend(pulled: list[Pulled], first: int, count: int, begin: int) -> None:
    """Add a range of new messages; it is joined to the previous one if that is new too and adjacent."""
    if pulled and first > begin:
        last = pulled[-1]
        if last.first_sequence >= begin and last.first_sequence + last.count == first:
            pulled[-1] = Pulled(last.first_sequence, last.count + count, 1)
            return
    pulled.append(Pulled(first, count, 1))


def lay_out(store: Store, queue: Queue, delivery: PullResult, kept: int = -1) -> tuple[list[Range], list[bytes], int]:
    """(ranges, buffers of the batches, number of batches) of the answer, without the batch that begins at sequence `kept`. Raises
    LogDamaged.
    """
    entries = {piece.entry.position: piece.entry for piece in delivery.pieces if piece.entry.base_sequence != kept}
    buffers = [buffer for entry in entries.values() for buffer in store.read(queue, entry)]
    places = {position: place for place, position in enumerate(entries)}
    count = len(places)
    ranges = [Range(each.first, each.count, each.attempt, places.get(each.entry.position, count)) for each in delivery.pieces]
    return ranges, buffers, count


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
