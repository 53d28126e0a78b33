"""Decides which batches of a producer a broker takes: in any queue a number names one batch, and in a partition of an ordered subject these
rules keep the order of writes. No I/O except reading a duplicate's checksum.

    number n, other content      refused for good, in any queue: NumberTaken
    sealed                       a stored batch is answered again; any other is refused for good: RouteChanged
    number n of a producer       taken if n - 1 was its last one here, or n is the first of a newer session than that (or of any, if it
                                 never sent here, or was forgotten and does not say AGAIN); a stored batch is answered again
    of an older session          refused for good: ProducerFenced. The producer gave it up, and it must not follow newer batches
    anything else                refused: OutOfSequence
    lease lapsed                 where the subject's fencing is by lease: RightLapsed

If one batch is refused, all later batches of the producer are therefore refused too, and the broker knows one position of its stream.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from qmq_ordering.routes import LpRange, PhysicalPartition

from qmq.errors import NumberTaken, OutOfSequence, ProducerFenced, RightLapsed, RouteChanged
from qmq.log.queue import Queue
from qmq.log.store import Intake, Store
from qmq.model import begins_session, session_of
from qmq.wire.batch import ENVELOPE_BYTES, region_crc_of
from qmq.wire.batch_columns import REGION_BYTES, BatchFlag, RegionHeader, is_same_batch


class Routing(Protocol):
    """The data about ordered subjects in the coordination store."""

    def partition(self, subject: str, number: int) -> PhysicalPartition | None:
        """The partition, if any version of the route has it on this broker group; else None."""
        ...

    def is_open(self, subject: str, group: str, number: int, lps: LpRange, version: int) -> bool:
        """Whether the group reads `version` in the range, and the partition belongs to that version there."""
        ...

    async def closes(self, subject: str, number: int, change_id: str, to_version: int) -> bool:
        """Whether the store has this route change, and it closes the partition. Raises CoordinationError."""
        ...

    async def group_revision(self, subject: str, group: str) -> int:
        """The current revision of the group's record in the store, 0 without a record; `is_open` uses nothing older from then on."""
        ...


class NoRouting:
    """For a broker without ordered subjects."""

    def partition(self, _subject: str, _number: int) -> PhysicalPartition | None:
        """Always None."""
        return None

    def is_open(self, _subject: str, _group: str, _number: int, _lps: LpRange, _version: int) -> bool:
        return False

    async def closes(self, _subject: str, _number: int, _change_id: str, _to_version: int) -> bool:
        """Always False."""
        return False

    async def group_revision(self, _subject: str, _group: str) -> int:
        return 0


Key = tuple[int, int, int]
"""(queue, producer id, batch number)."""


class Admission:
    """Decides for the batches of one write, in their order, whether they may be appended."""

    def __init__(self, store: Store, has_right: Callable[[Queue], bool]) -> None:
        self._store = store
        self._has_right = has_right
        self._admitted: dict[Key, int] = {}
        """The checksum of each batch admitted in this write."""
        self._newest: dict[tuple[int, int], int] = {}
        """The last number of each producer in this write, by queue."""

    def admit(self, batches: list[Intake]) -> None:
        """Admit all batches of a request, or none. Raises RouteChanged, OutOfSequence, ProducerFenced, NumberTaken, RightLapsed."""
        admitted, newest = dict[Key, int](), dict[tuple[int, int], int]()
        for batch in batches:
            if not self._is_stored(batch, admitted):
                queue, header = batch.queue, batch.header
                if queue.is_ordered:
                    self._require(batch, newest)
                    newest[id(queue), header.producer_id] = header.batch_sequence
                admitted[id(queue), header.producer_id, header.batch_sequence] = batch.region_crc
        self._admitted |= admitted
        self._newest |= newest

    def _is_stored(self, batch: Intake, admitted: dict[Key, int]) -> bool:
        queue, header = batch.queue, batch.header
        key = (id(queue), header.producer_id, header.batch_sequence)
        crc = admitted.get(key)
        if crc is None:
            crc = self._admitted.get(key)
        if crc is not None:
            is_same = crc == batch.region_crc
        else:
            found = queue.find_duplicate(header)
            if found is None:
                return False
            is_same = _is_stored_at(self._store, found.base_sequence, batch)
        if not is_same:
            raise NumberTaken(
                f"batch {header.batch_sequence} of producer {header.producer_id:016x} is in {queue.id} with other content: nothing was "
                "stored; two senders use one producer id"
            )
        return True

    def _require(self, batch: Intake, newest: dict[tuple[int, int], int]) -> None:
        queue, header = batch.queue, batch.header
        if queue.sealed is not None:
            raise RouteChanged(f"{queue.id} is sealed: route version {queue.sealed.to_version} says which partition has its keys now")
        last = newest.get((id(queue), header.producer_id), self._newest.get((id(queue), header.producer_id)))
        if last is None:
            window = queue.producers.window(header.producer_id)
            last = window.newest if window is not None else self._last_before_silence(queue, header)
        number = header.batch_sequence
        if session_of(number) < session_of(last):
            raise ProducerFenced(
                f"batch {number} of producer {header.producer_id:016x} to {queue.id} is of session {session_of(number)}, and "
                f"session {session_of(last)} has begun there: the producer gave this batch up, and it is not stored"
            )
        if number != last + 1 and not (begins_session(number) and number > last):
            raise OutOfSequence(f"batch {header.batch_sequence} of producer {header.producer_id:016x} to {queue.id}: {last + 1} comes next")
        if not self._has_right(queue):
            raise RightLapsed(f"{queue.id} takes no messages: this master has lost its lease in the coordination store; try again soon")

    @staticmethod
    def _last_before_silence(queue: Queue, header: RegionHeader) -> int:
        """For a batch with AGAIN the producer's window may have expired; the log knows the producer's last number."""
        return queue.index.newest_of(header.producer_id) if header.flags & BatchFlag.AGAIN else -1


def _is_stored_at(store: Store, sequence: int, batch: Intake) -> bool:
    """Whether this very batch is stored there; a batch that retention deleted counts as the same. Reads the disk, so it is called for
    duplicates only.
    """
    index = batch.queue.index
    if sequence < batch.queue.start_sequence or index.count == index.first:
        return True
    entry = index.entry(index.find_sequence(sequence))
    if entry.base_sequence != sequence or entry.position < store.messages.start:
        return True
    cached = store.cache.get(entry.position)
    stored = b"".join(cached) if cached is not None else store.messages.read(entry.position, ENVELOPE_BYTES + REGION_BYTES)
    return is_same_batch(batch.region, batch.region_crc, stored[ENVELOPE_BYTES:], region_crc_of(stored))
