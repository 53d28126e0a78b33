"""Serves FETCH (committed batches of a queue, for readers that keep their own position) and FIND
(which batches of a producer are stored).

Rules:
* Only committed batches are returned; never a command message, and directed batches only if they
  are asked for.
* Whole batches are sent, since their checksum is the producer's. A batch is skipped by its entry in
  the consume log if that shows that nothing in it is wanted, otherwise by its columns of hashes and
  of logical partitions. A returned batch may contain messages that are not wanted.
* A request is limited in entries, batches and bytes, so that it does not block the event loop for
  long. The answer says how far it looked.
* FIND considers everything that was appended when it arrived, and answers when that is committed.
  So it finds no batch that a new master could take back, and misses none that will stay.

`IndexMemory` says whether the consume logs have too many entries in memory. Adding up goes over all
queues, idle ones too, so it is done only when the sum may have reached the limit: since the last
time, at most one entry was added for each entry of the logs. Beside 10,000 idle queues a tick of
`Maintenance` took 36 times as many calls without this.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Sequence
from typing import Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from qmq import limits
from qmq.broker.dispatch.pull import TagFilter, check_tags
from qmq.broker.dispatch.sessions import Peer
from qmq.broker.parts import ServingBroker
from qmq.broker.reading.readers import Readers
from qmq.errors import InvalidArgument, LogDamaged, NotMaster, Overloaded, QmqError
from qmq.log.command_messages import COMMAND_PRODUCER
from qmq.log.consume_log import ENTRY_BYTES, IndexEntry
from qmq.log.queue import Queue
from qmq.log.reading import ColdRead, has_lps, has_tags, may_have_tags
from qmq.log.store import Store
from qmq.model import QueueId
from qmq.rpc.channel import LOOK_INSIDE
from qmq.wire import frame as frames
from qmq.wire import frame_payloads as wire
from qmq.wire.batch_columns import UNREADABLE, Layout, parse_header
from qmq.wire.frame import FrameKind

log = logging.getLogger("qmq.broker")

ENTRIES_MAX: Final = 16_384
"""Entries that one request examines."""
BATCHES_MAX: Final = 1_024
"""Batches that one request reads, some 10 µs each."""
FOUND_MAX: Final = 1_000
REMEMBERED_MAX: Final = 16_384

_RANGE: Final = re.compile(r"(\d{1,6})-(\d{1,6})")
_PRODUCER: Final = re.compile(r"[0-9a-f]{16}")

_K = TypeVar("_K")


class Selection(NamedTuple):
    """Which batches of a queue are wanted."""

    tags: TagFilter | None
    lps: tuple[tuple[int, int], ...]
    with_directed: bool
    only_directed: bool

    @classmethod
    def of(cls, request: wire.Fetch) -> Selection:
        """Raises InvalidArgument."""
        if len(request.lps) > limits.FETCH_RANGES_MAX:
            raise InvalidArgument(
                f"a fetch names at most {limits.FETCH_RANGES_MAX} ranges, not "
                f"{len(request.lps)}: join adjacent ranges"
            )
        check_tags([*request.tags_any, *request.tags_all])
        found = [_RANGE.fullmatch(each) for each in request.lps]
        if None in found:
            raise InvalidArgument(
                "logical partitions are ranges such as 0-512, not "
                f"{str(request.lps)[: limits.ERROR_VALUE_CHARS_MAX]}"
            )
        lps = tuple([(int(each[1]), int(each[2])) for each in found if each is not None])
        return cls(
            TagFilter.of(request.tags_any, request.tags_all),
            lps,
            request.directed != 0,
            request.directed == wire.ONLY_DIRECTED,
        )

    @property
    def entries_max(self) -> int:
        """Entries that one request examines:
        more if the entries alone show whether a batch is wanted.
        """
        return ENTRIES_MAX if self.tags is not None or self.only_directed else BATCHES_MAX

    def candidates(self, blooms: npt.NDArray[np.uint64]) -> list[int]:
        """Indexes of the batches that may be wanted, by their bloom filters:
        a vectorised `TagFilter.may_match`.
        """
        if self.only_directed:
            return np.flatnonzero(blooms == np.uint64(LOOK_INSIDE)).tolist()
        if self.tags is None:
            return list(range(len(blooms)))
        return np.flatnonzero(may_have_tags(blooms, self.tags.any_of, self.tags.all_of)).tolist()

    def needs_region(self, entry: IndexEntry) -> bool:
        """Whether the entry alone does not decide."""
        if self.tags is not None or self.lps or self.only_directed:
            return True
        return entry.tag_bloom == LOOK_INSIDE and not self.with_directed

    def wants(self, region: bytes) -> bool:
        """Whether a batch holds a wanted message. Raises CorruptBatch."""
        header = parse_header(region)
        if not (self.with_directed if header.is_directed else not self.only_directed):
            return False
        layout = Layout.walk(region, header)
        if self.tags is not None and not has_tags(
            region, header, layout, self.tags.any_of, self.tags.all_of
        ):
            return False
        return has_lps(region, header, layout, self.lps)


class Fetching:
    """Answers FETCH and FIND while the broker serves. It is created again each time the broker
    begins to serve.
    """

    def __init__(self, broker: ServingBroker) -> None:
        self._store = broker.store
        self._loop = broker.loop
        self._report_damage = broker.report_damage
        self._broker = broker
        self._subjects = broker.subjects
        self.readers = Readers(broker.clock)
        self._tasks: set[asyncio.Task[None]] = set()
        self._places: dict[tuple[QueueId, int], int] = {}
        """Where an answer ended: the entry number to begin with when that sequence is asked for
        next. A hint, which is checked.
        """
        self._absent: dict[tuple[QueueId, int], int] = {}
        """For producers that were not found: up to which entry. So a producer that asks before each
        batch does not cause a search of the whole queue each time.
        """

    # --- FETCH ------------------------------------------------------------------------------------

    def fetch(self, request: wire.Fetch) -> tuple[wire.Fetched, list[bytes]]:
        """(the header before the batches, the buffers of the batches). Raises ColdRead if not even
        the first batch is here.
        """
        self._broker.require_serving()
        selection = Selection.of(request)
        queue = self._store.queue(request.subject, request.partition)
        if queue is None:
            self._subjects.settings(request.subject)
            return wire.Fetched(0, request.sequence, 0, 0, 0, False, 0), []
        start, end, is_sealed = bounds(queue)
        if request.reader and is_sealed and request.done >= end:
            self.readers.forget(queue.id, request.reader)
        elif request.reader:
            self.readers.note(queue.id, request.reader, request.done, request.lost)
        sequence = max(request.sequence, start)
        if request.sequence < start:
            start = before_mark(queue, start)
        if request.since_ms:
            sequence = max(sequence, _first_since(queue, request.since_ms, end))
        until = min(request.until, end)
        buffers: list[bytes] = []
        if request.bytes_max > 0 and sequence < until and queue.index.count > queue.index.first:
            bytes_max = min(request.bytes_max, limits.PULL_BYTES_MAX)
            sequence, buffers = self._collect(queue, selection, sequence, until, bytes_max)
        stored_bytes = _stored_bytes(queue, start) if not request.bytes_max else 0
        return wire.Fetched(
            start, sequence, end, stored_bytes, queue.last_append_ms, is_sealed, len(buffers) // 2
        ), buffers

    def _collect(
        self, queue: Queue, selection: Selection, sequence: int, until: int, bytes_max: int
    ) -> tuple[int, list[bytes]]:
        """(next sequence, envelope and region of each batch)."""
        number = self._number_of(queue, sequence)
        table = queue.index.table(number, selection.entries_max)
        table = table[table["base_sequence"] < until]
        buffers: list[bytes] = []
        size = read = looked = 0
        for at in selection.candidates(table["tag_bloom"]):
            entry = IndexEntry._make(table[at].tolist())
            if size >= bytes_max or read >= limits.PULL_BYTES_MAX or looked >= BATCHES_MAX:
                self._note(queue, entry.base_sequence, number + at)
                return entry.base_sequence, buffers
            try:
                envelope, region = self._store.read(queue, entry)
            except ColdRead:
                if not buffers:
                    raise
                return entry.base_sequence, buffers
            except LogDamaged as damage:
                if not buffers:
                    self._damaged(damage)
                return entry.base_sequence, buffers
            read, looked = read + entry.total_bytes, looked + 1
            if not selection.needs_region(entry) or self._wants(selection, queue, entry, region):
                buffers += (envelope, region)
                size += entry.total_bytes
        following = int(table["base_sequence"][-1]) + int(table["count"][-1])
        self._note(queue, following, number + len(table))
        return following, buffers

    @staticmethod
    def _wants(selection: Selection, queue: Queue, entry: IndexEntry, region: bytes) -> bool:
        try:
            return selection.wants(region)
        except UNREADABLE as cause:
            log.error(
                "the batch at sequence %d of %s cannot be read and is skipped: %r",
                entry.base_sequence,
                queue.id,
                cause,
            )
            return False

    def _number_of(self, queue: Queue, sequence: int) -> int:
        """The number of the entry that holds a sequence.
        A reader that continues is found by its sequence.
        """
        index, number = queue.index, self._places.pop((queue.id, sequence), -1)
        if index.first <= number < index.count:
            entry = index.entry(number)
            if entry.base_sequence <= sequence < entry.next_sequence:
                return number
        return index.find_sequence(sequence)

    def _note(self, queue: Queue, sequence: int, number: int) -> None:
        _remember(self._places, (queue.id, sequence), number)

    def _damaged(self, damage: LogDamaged) -> None:
        if self._report_damage(damage):
            raise Overloaded(
                f"{damage.message}; it is being repaired from another replica: try again soon",
                retry_after_ms=200,
            ) from damage
        raise damage

    # --- FIND -------------------------------------------------------------------------------------

    def find(self, peer: Peer, request_id: int, request: wire.Find) -> None:
        """Answer when everything appended until now is committed. Raises UnknownSubject,
        InvalidArgument, NotMaster.
        """
        self._broker.require_serving()
        if not _PRODUCER.fullmatch(request.producer_id) or not 0 < request.most <= FOUND_MAX:
            raise InvalidArgument(
                f"a producer id is 16 hexadecimal digits, and `most` is 1 to {FOUND_MAX}: {request}"
            )
        queue = self._store.queue(request.subject, request.partition)
        if queue is None:
            self._subjects.settings(request.subject)
        task = self._loop.create_task(self._answer_find(peer, request_id, queue, request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer_find(
        self, peer: Peer, request_id: int, queue: Queue | None, request: wire.Find
    ) -> None:
        store, count = self._store, queue.index.count if queue is not None else 0
        try:
            await self._broker.committed()
            found = await self._find(store, queue, request, count) if queue is not None else []
        except QmqError as failure:
            self._broker.answer_error(peer, request_id, failure)
        except (AssertionError, OSError) as cause:
            self._broker.fatal(cause)
        except Exception as cause:
            log.exception("answering a FIND failed: %s", request)
            self._broker.answer_error(
                peer, request_id, QmqError(f"the search failed: {type(cause).__name__}: {cause}")
            )
        else:
            peer.send(frames.frame(FrameKind.FOUND, request_id, wire.FoundBatches(found).pack()))

    async def _find(
        self, store: Store, queue: Queue, request: wire.Find, count: int
    ) -> list[list[int]]:
        """The producer's window has the newest numbers, and the consume log the number of messages
        of each. For older numbers the whole consume log is searched, because a number may be stored
        after higher ones: when a batch was refused and sent again after others. `count` is the
        number of committed entries.
        """
        producer_id = int(request.producer_id, 16)
        found, down_to = _of_window(queue, producer_id, request)
        key = queue.id, producer_id
        absent, is_there = self._absent.get(key, 0), producer_id in queue.producers.windows
        before = queue.index.count
        while before > max(queue.index.first, absent):
            before, sent = queue.index.of_producer(producer_id, before)
            is_there |= bool(sent)
            for entry in sent:
                number = entry.batch_sequence
                if (
                    number < request.before
                    and entry.next_sequence <= queue.visible_sequence
                    and not found.get(number, _NOTHING)[2]
                ):
                    found[number] = [
                        number,
                        entry.base_sequence,
                        entry.count if entry.base_sequence >= queue.start_sequence else 0,
                    ]
            if before == queue.index.first or queue.index.entry(before).base_sequence <= down_to:
                break
            await asyncio.sleep(0)
            if self._broker.store is not store or not self._broker.is_serving:
                raise NotMaster(
                    "this broker lost the mastership during the search: ask the new master"
                )
        if not is_there:
            _remember(self._absent, key, count)
        return [found[number] for number in sorted(found, reverse=True)[: request.most]]


_NOTHING: Final = [0, 0, 0]


def _remember(known: dict[_K, int], key: _K, number: int) -> None:
    """Remember a number for a key; the oldest are forgotten."""
    if len(known) >= REMEMBERED_MAX:
        known.clear()
    known[key] = number


def _of_window(
    queue: Queue, producer_id: int, request: wire.Find
) -> tuple[dict[int, list[int]], int]:
    """The numbers in the producer's window, without counts; and the sequence down to which the
    consume log must be searched as well.
    """
    window = queue.producers.windows.get(producer_id)
    if window is None:
        return {}, 0
    known = [
        each
        for each in window.stored_below(request.before)
        if each[1].base_sequence < queue.visible_sequence
    ][: request.most]
    found = {number: [number, where.base_sequence, 0] for number, where in known}
    is_enough = window.tells_from == 0 or len(known) == request.most
    return found, min(
        [where.base_sequence for _, where in known], default=queue.next_sequence
    ) if is_enough else 0


def bounds(queue: Queue) -> tuple[int, int, bool]:
    """(oldest kept sequence, end, whether it is closed for good), as applications may see them."""
    end, sealed = queue.visible_sequence, queue.sealed
    is_sealed = sealed is not None and sealed.sequence < end
    if sealed is not None and is_sealed:
        end = sealed.sequence
    return min(queue.start_sequence, end), end, is_sealed


def before_mark(queue: Queue, start: int) -> int:
    """The oldest sequence from which on no message is missing. The mark of a purge has the sequence
    before the oldest kept message, and a reader that has read everything before the purge continues
    there.
    """
    index = queue.index
    if index.first < index.count:
        entry = index.entry(index.find_sequence(start - 1))
        if entry.producer_id == COMMAND_PRODUCER and entry.next_sequence == start:
            return entry.base_sequence
    return start


def _first_since(queue: Queue, time_ms: int, end: int) -> int:
    number = queue.index.find_time(time_ms)
    return min(queue.index.entry(number).base_sequence, end) if number < queue.index.count else end


def _stored_bytes(queue: Queue, start: int) -> int:
    if queue.index.count == queue.index.first or start >= queue.next_sequence:
        return 0
    return (
        queue.cumulative_bytes
        - queue.index.entry(queue.index.find_sequence(start)).cumulative_bytes
    )


def messages_in(buffers: Sequence[bytes]) -> int:
    """How many messages the batches of an answer hold."""
    return sum([parse_header(region).count for region in buffers[1::2]])


def pack(found: tuple[wire.Fetched, Sequence[bytes]], request_id: int) -> tuple[bytes, ...]:
    """The frame of a FETCHED."""
    head, buffers = wire.pack_fetched(found[0]), found[1]
    size = len(head) + sum(map(len, buffers))
    return frames.header(FrameKind.FETCHED, request_id, size) + head, *buffers


class IndexMemory:
    """Remembers the bytes of entries in memory at the last addition."""

    def __init__(self) -> None:
        self._store: Store | None = None
        self._bytes = self._index = 0

    def exceeds(self, store: Store, bytes_max: int) -> bool:
        """Whether the consume logs of the store have more than `bytes_max` bytes of
        entries in memory.
        """
        if store is self._store:
            added = store.applied_index - self._index
            if self._bytes + added * ENTRY_BYTES <= bytes_max:
                return False
        self._store, self._index = store, store.applied_index
        self._bytes = sum([queue.index.tail_bytes for queue in store.queues.values()])
        return self._bytes > bytes_max
