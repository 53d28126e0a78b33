"""Whether the batches of a producer may be stored, and in which queue: each batch by itself, when
it arrives, and all batches of a write together, by `Admission`. No I/O except reading a duplicate's
checksum.

A batch is accepted or refused as a whole. The broker never decodes single messages: it checks the
producer's checksum, finds the columns, and checks each column's offsets as a vector, so that no
later reader of the log reads outside the batch.

A destination is a queue of this broker, with the conditions for a batch. `BrokerSubjects` looks it
up once, and again after the settings of its subject, or any route, have changed.

In any queue a number names one batch, and in a partition of an ordered subject these rules keep the
order of writes (`Admission`):

    number n, other content      refused for good, in any queue: NumberTaken
    sealed                       a stored batch is answered again; any other is refused for good:
                                 RouteChanged
    number n of a producer       taken if n - 1 was its last one here, or n is the first of a newer
                                 session than that (or of any, if it never sent here, or was
                                 forgotten and does not say AGAIN); a stored batch is answered again
    of an older session          refused for good: ProducerFenced. The producer gave it up, and it
                                 must not follow newer batches
    anything else                refused: OutOfSequence
    lease lapsed                 where the subject's fencing is by lease: RightLapsed

If one batch is refused, all later batches of the producer are therefore refused too, and the broker
knows one position of its stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from struct import unpack_from
from typing import Final, NamedTuple

import numpy as np
from qmq_ordering.routes import LpRange, PhysicalPartition

from qmq import limits
from qmq.errors import (
    CorruptBatch,
    InvalidArgument,
    MessageTooLarge,
    NumberTaken,
    OrderMismatch,
    Outcome,
    OutOfSequence,
    ProducerFenced,
    RightLapsed,
    RouteChanged,
    UnknownSubject,
)
from qmq.log.queue import Queue
from qmq.log.reading import logical_partitions
from qmq.log.store import Intake, Store
from qmq.model import (
    BATCH_NUMBERS,
    DEAD_LETTERS,
    Fencing,
    Order,
    SubjectConfig,
    SubjectFlush,
    begins_session,
    check_name,
    is_dead_letters,
    session_of,
)
from qmq.rpc import channel
from qmq.wire.batch import BATCH_BYTES_MIN, ENVELOPE_BYTES, region_crc_of, sent_sizes
from qmq.wire.batch_columns import (
    ONE_ITEM,
    REGION_BYTES,
    BatchFlag,
    Compression,
    Layout,
    RegionHeader,
    check_region,
    int_column,
    is_same_batch,
    parse_header,
    tag_bloom,
)


class Routing:
    """The data about ordered subjects in the coordination store.
    This one knows no ordered subject.
    """

    def partition(self, subject: str, number: int) -> PhysicalPartition | None:
        """The partition, if any version of the route has it on this broker group; else None."""
        return None

    def is_open(self, subject: str, group: str, number: int, lps: LpRange, version: int) -> bool:
        """Whether the group reads `version` in the range,
        and the partition belongs to that version there.
        """
        return False

    async def closes(self, subject: str, number: int, change_id: str, to_version: int) -> bool:
        """Whether the store has this route change, and it closes the partition.
        Raises CoordinationError.
        """
        return False

    async def group_revision(self, subject: str, group: str) -> int:
        """The current revision of the group's record in the store, 0 without a record; `is_open`
        uses nothing older from then on.
        """
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
        """Admit all batches of a request, or none. Raises RouteChanged, OutOfSequence,
        ProducerFenced, NumberTaken, RightLapsed.
        """
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
                f"batch {header.batch_sequence} of producer {header.producer_id:016x} "
                f"is in {queue.id} with other content: nothing was stored; "
                "two senders use one producer id"
            )
        return True

    def _require(self, batch: Intake, newest: dict[tuple[int, int], int]) -> None:
        queue, header = batch.queue, batch.header
        if queue.sealed is not None:
            raise RouteChanged(
                f"{queue.id} is sealed: route version {queue.sealed.to_version} says which "
                "partition has its keys now"
            )
        last = newest.get(
            (id(queue), header.producer_id), self._newest.get((id(queue), header.producer_id))
        )
        if last is None:
            window = queue.producers.windows.get(header.producer_id)
            last = window.newest if window is not None else self._last_before_silence(queue, header)
        number = header.batch_sequence
        if session_of(number) < session_of(last):
            raise ProducerFenced(
                f"batch {number} of producer {header.producer_id:016x} to {queue.id} is of "
                f"session {session_of(number)}, and session {session_of(last)} has begun there: "
                "the producer gave this batch up, and it is not stored"
            )
        if number != last + 1 and not (begins_session(number) and number > last):
            raise OutOfSequence(
                f"batch {header.batch_sequence} of producer {header.producer_id:016x} to "
                f"{queue.id}: {last + 1} comes next"
            )
        if not self._has_right(queue):
            raise RightLapsed(
                f"{queue.id} takes no messages: this master has lost its lease in the "
                "coordination store; try again soon"
            )

    @staticmethod
    def _last_before_silence(queue: Queue, header: RegionHeader) -> int:
        """For a batch with AGAIN the producer's window may have expired; the log knows the
        producer's last number.
        """
        return queue.index.newest_of(header.producer_id) if header.flags & BatchFlag.AGAIN else -1


def _is_stored_at(store: Store, sequence: int, batch: Intake) -> bool:
    """Whether this very batch is stored there; a batch that retention deleted counts as the same.
    Reads the disk, so it is called for duplicates only.
    """
    index = batch.queue.index
    if sequence < batch.queue.start_sequence or index.count == index.first:
        return True
    entry = index.entry(index.find_sequence(sequence))
    if entry.base_sequence != sequence or entry.position < store.messages.start:
        return True
    cached = store.cache.get(entry.position)
    stored = (
        b"".join(cached)
        if cached is not None
        else store.messages.read(entry.position, ENVELOPE_BYTES + REGION_BYTES)
    )
    return is_same_batch(
        batch.region, batch.region_crc, stored[ENVELOPE_BYTES:], region_crc_of(stored)
    )


_VECTOR_MIN: Final = 32
"""For fewer offsets a loop is faster than numpy."""
_LEAST: Final = np.minimum.reduce
_MOST: Final = np.maximum.reduce
_COMPRESSIONS: Final = frozenset(map(int, Compression))
_DEAD_LETTERS: Final = DEAD_LETTERS.encode()

CheckDueTimes = Callable[[bytes, RegionHeader, Layout], None]
"""(region, its header, its layout). Raises CallerError."""


class Destination(NamedTuple):
    """The queue of a batch, and its conditions."""

    queue: Queue
    body_bytes_max: int
    lps: LpRange | None = None
    """On an ordered subject: the partition's range."""
    needs_right: bool = False
    """Whether a batch needs the master's write lease."""
    check_due_times: CheckDueTimes | None = None
    """On a delay server: checks a delayed batch. None: delayed batches are refused."""
    awaits_flush: bool = False
    """Whether producers are answered only when a majority has flushed the batch."""


FindQueue = Callable[[bytes, int], Destination]
"""(subject as bytes, partition) -> where it is.
Raises UnknownSubject, InvalidName, OrderMismatch, RouteChanged.
"""


def may_pass_drain(batch: Intake) -> bool:
    """A retry of a stored batch is answered also while drained; and a partition takes messages
    until it was moved away.
    """
    if batch.queue.is_ordered:
        return True
    return batch.queue.find_duplicate(batch.header) is not None


def read_batches(payload: memoryview, find_queue: FindQueue) -> list[Intake]:
    """The checked batches of a PRODUCE.

    Raises: CorruptBatch: a checksum or an offset does not hold. MessageTooLarge: a body is over the
    subject's limit. InvalidArgument, OrderMismatch: an invalid directed batch. UnknownSubject,
    InvalidName: from `find_queue`.
    """
    found: list[Intake] = []
    at = 0
    while at < len(payload):
        total, region_crc = sent_sizes(payload, at)
        region = bytes(payload[at + ENVELOPE_BYTES : at + total])
        if len(region) != total - ENVELOPE_BYTES:
            raise CorruptBatch(f"the frame ends within a batch of {total} bytes")
        found.append(read_batch(region, region_crc, find_queue))
        at += total
    if not found:
        raise InvalidArgument(f"PRODUCE without a batch (the smallest has {BATCH_BYTES_MIN} bytes)")
    return found


def read_batch(region: bytes, region_crc: int, find_queue: FindQueue) -> Intake:
    """One batch, checked. Raises as `read_batches`."""
    check_region(region, region_crc)
    header = parse_header(region)
    if (
        header.compression not in _COMPRESSIONS
        or header.batch_sequence >= BATCH_NUMBERS
        or not 0 <= header.create_time_ms < limits.CREATE_TIME_MS_END
    ):
        raise _unusable(header)
    layout = Layout.walk(region, header)
    subject = region[REGION_BYTES : REGION_BYTES + header.subject_bytes]
    if subject.startswith(_DEAD_LETTERS):  # before a queue is created for it
        raise InvalidArgument(
            "only brokers write to dead-letter queues: let a message fail, or reject it"
        )
    queue, body_bytes_max, lps, _, check_due_times, awaits_flush = find_queue(
        subject, header.partition
    )
    stored = limits.BATCH_BYTES_MAX if header.compression else header.body_bytes
    longest = _check_offsets(
        region, layout.body, header.count, stored, exact=not header.compression
    )
    if longest > body_bytes_max:
        raise MessageTooLarge(
            f"a body of {longest} bytes to {subject.decode()!r}, whose limit is {body_bytes_max}: "
            "send a reference to the content instead, or raise the limit with `qmq subject alter`"
        )
    bloom = _check_columns(region, header, layout) if header.columns else 0
    if header.is_directed:
        channel.check(region, header, to_partition=lps is not None)
        bloom = channel.LOOK_INSIDE
    if check_due_times is not None:
        check_due_times(region, header, layout)
    elif layout.due >= 0:
        raise InvalidArgument(
            "a delayed batch must go to a delay group, not to a broker: locate with `delayed`"
        )
    if lps is not None:
        _check_order(region, header, layout, lps)
    return Intake(queue, region, region_crc, header, bloom, awaits_flush)


def _unusable(header: RegionHeader) -> InvalidArgument:
    """The refusal of values that readers of the log could not use: dead letters and delayed
    messages are built from stored ones.
    """
    if header.compression not in _COMPRESSIONS:
        return InvalidArgument(
            f"compression {header.compression} is unknown: 0 is none, 1 zstd, 2 lz4"
        )
    if header.batch_sequence >= BATCH_NUMBERS:
        return InvalidArgument(
            f"batch number {header.batch_sequence} is over {BATCH_NUMBERS - 1}: begin again "
            "under a new producer id"
        )
    return InvalidArgument(
        f"create time {header.create_time_ms} is not a valid number of milliseconds since "
        "1970: check the producer's clock"
    )


def _check_order(region: bytes, header: RegionHeader, layout: Layout, lps: LpRange) -> None:
    """Check that all messages for a partition of an ordered subject have keys, and belong to its
    logical partitions.
    """
    if layout.key < 0 or layout.logical_partition < 0:
        raise OrderMismatch(
            "messages to an ordered subject need keys and logical partitions: send them with "
            "mq.ordered_producer"
        )
    found = logical_partitions(region, layout, header.count)
    if int(found.min()) < lps.first or int(found.max()) >= lps.end:
        raise InvalidArgument(
            f"messages of logical partitions {found.min()} to {found.max()} were sent to a "
            f"partition that holds {lps}"
        )


def _check_columns(region: bytes, header: RegionHeader, layout: Layout) -> int:
    """Check the offsets of the optional columns; give the bloom of the tags."""
    count = header.count
    if layout.key >= 0:
        longest = _check_offsets(region, layout.key, count, limits.BATCH_BYTES_MAX)
        if longest > limits.KEY_BYTES_MAX:
            raise MessageTooLarge(f"a key of {longest} bytes; the limit is {limits.KEY_BYTES_MAX}")
    if layout.header_list >= 0:
        _check_offsets(region, layout.header_list, count, limits.BATCH_BYTES_MAX)
        total = _last(region, layout.header_list, count)
        _check_offsets(region, layout.header_name, total, limits.BATCH_BYTES_MAX)
        _check_offsets(region, layout.header_value, total, limits.BATCH_BYTES_MAX)
        _check_header_bytes(region, layout, count, total)
    if layout.tag_list < 0:
        return 0
    most = _check_offsets(region, layout.tag_list, count, limits.BATCH_BYTES_MAX)
    if most > limits.TAGS_MAX:
        raise InvalidArgument(f"a message with {most} tags; the limit is {limits.TAGS_MAX}")
    total = _last(region, layout.tag_list, count)
    if _check_offsets(region, layout.tag, total, limits.BATCH_BYTES_MAX) > limits.TAG_BYTES_MAX:
        raise InvalidArgument(f"a tag has at most {limits.TAG_BYTES_MAX} bytes")
    return tag_bloom(set(int_column(region, layout.tag_hash, "Q", total)))


def _check_header_bytes(region: bytes, layout: Layout, count: int, total: int) -> None:
    """The headers of each message together. Offsets were checked before; a batch with few header
    bytes in all needs no closer check.
    """
    names, values = (
        _last(region, layout.header_name, total),
        _last(region, layout.header_value, total),
    )
    most = limits.STORED_HEADER_BYTES_MAX
    if names + values + total <= most:
        return
    marks = np.frombuffer(region, "<i4", count + 1, layout.header_list)
    begins = np.frombuffer(region, "<i4", total + 1, layout.header_name).astype(np.int64)
    begins += np.frombuffer(region, "<i4", total + 1, layout.header_value)
    begins += np.arange(total + 1)  # a byte for each header, so that empty ones are bounded, too
    longest = int(np.diff(begins[marks]).max())
    if longest > most:
        raise MessageTooLarge(f"headers of {longest} bytes; the limit is {limits.HEADER_BYTES_MAX}")


def _last(region: bytes, at: int, count: int) -> int:
    last: int = unpack_from("<i", region, at + 4 * count)[0]
    return last


def _check_offsets(region: bytes, at: int, count: int, end: int, *, exact: bool = False) -> int:
    """Offsets begin at 0, never decrease, and end at (or before) `end`. Returns the longest item.
    Raises CorruptBatch.
    """
    longest: int
    if count == 1:
        first, last = ONE_ITEM.unpack_from(region, at)
        shortest = longest = last - first
    elif count < _VECTOR_MIN:
        marks = unpack_from(f"<{count + 1}i", region, at)
        lengths = [b - a for a, b in pairwise(marks)]
        first, last, shortest, longest = (
            marks[0],
            marks[-1],
            min(lengths, default=0),
            max(lengths, default=0),
        )
    else:
        vector = np.frombuffer(region, "<i4", count + 1, at)
        steps = (
            vector[1:] - vector[:-1]
        )  # as np.diff, min and max, which take twice as long for so few numbers
        first, last, shortest, longest = (
            int(vector[0]),
            int(vector[-1]),
            int(_LEAST(steps)),
            int(_MOST(steps)),
        )
    if first != 0 or shortest < 0 or last > end or (exact and last != end):
        raise CorruptBatch(f"the offsets at byte {at} of a region do not rise from 0 to {end}")
    return longest


LookUpSubject = Callable[[str], SubjectConfig | None]
FindSubject = Callable[[str], SubjectConfig]
"""The subject's settings. Raises UnknownSubject."""


FindDestination = Callable[[Store, FindSubject, bytes, int], Destination]
"""(store, how to find a subject, subject, partition) -> where it is, in one kind of group:
`QueueDestinations.find`, or `qmq.delay.broker.DelayDestinations.find`. Raises InvalidArgument,
InvalidName, UnknownSubject, OrderMismatch, RouteChanged.
"""


class QueueDestinations:
    """The destinations of a broker group: the one queue of an unordered subject, or the partitions
    of an ordered subject on this broker.
    """

    def __init__(self, routing: Routing) -> None:
        self._routing = routing

    def find(
        self, store: Store, find_subject: FindSubject, subject: bytes, partition: int
    ) -> Destination:
        try:
            name = check_name("subject", subject.decode())
        except UnicodeDecodeError:
            raise InvalidArgument("a subject must be UTF-8") from None
        config = find_subject(name)
        if config.order is not Order.NONE:
            return self._find_ordered(store, config, partition)
        if partition != 0:
            raise InvalidArgument(f"subject {name!r} has only partition 0, not {partition}")
        return Destination(
            store.open_queue(name, partition),
            config.body_bytes_max,
            awaits_flush=config.flush is SubjectFlush.SYNC,
        )

    def _find_ordered(self, store: Store, config: SubjectConfig, number: int) -> Destination:
        if number == 0:
            raise OrderMismatch(
                f"subject {config.name!r} is ordered: send with mq.ordered_producer, consume "
                "with mq.ordered_consumer"
            )
        found = self._routing.partition(config.name, number)
        if found is None:
            raise _not_in_a_route(store.queue(config.name, number), config.name, number)
        queue = store.open_queue(config.name, number)
        awaits_flush = config.flush is SubjectFlush.SYNC
        return Destination(
            queue,
            config.body_bytes_max,
            found.range,
            config.fencing is Fencing.LEASE,
            awaits_flush=awaits_flush,
        )


def _not_in_a_route(queue: Queue | None, subject: str, number: int) -> RouteChanged:
    """The refusal for a partition that no known route has. If it has messages, the coordination
    store was put back to older routes: a batch that was sent before may be in it, and a sender that
    asks about that batch must not read the refusal as that of a sealed partition.
    """
    if queue is None or queue.is_blank:
        return RouteChanged(
            f"partition {number} of {subject!r} is not known here yet: ask the metaserver "
            "for the route"
        )
    text = (
        f"partition {number} of {subject!r} has messages, and no route has the partition any "
        "more: see `qmq doctor`"
    )
    return RouteChanged(text, outcome=Outcome.UNKNOWN)


class BrokerSubjects:
    """The subjects that a broker knows, and the destinations of their messages in one store. Made
    with the store that is served from.
    """

    def __init__(
        self,
        store: Store,
        look_up: LookUpSubject,
        find_destination: FindDestination,
        *,
        has_consumers: bool,
    ) -> None:
        self._store = store
        self._look_up = look_up
        self._find_destination = find_destination
        self._has_consumers = has_consumers
        self._unordered: dict[bytes, Destination] = {}
        """Destinations of partition 0, which follow from the subject's settings alone."""
        self._partitions: dict[tuple[bytes, int], Destination] = {}

    def find_queue(self, subject: bytes, partition: int) -> Destination:
        """Raises InvalidArgument, InvalidName, UnknownSubject, OrderMismatch, RouteChanged."""
        found = (
            self._partitions.get((subject, partition))
            if partition
            else self._unordered.get(subject)
        )
        if found is None:
            found = self._find_destination(self._store, self.settings, subject, partition)
            if partition:
                self._partitions[subject, partition] = found
            else:
                self._unordered[subject] = found
        return found

    def settings(self, name: str) -> SubjectConfig:
        """Raises UnknownSubject."""
        config = self._settings_or_none(name)
        if config is None:
            raise UnknownSubject(
                f"there is no subject {name!r}: create it with `qmq subject create {name}`"
            )
        return config

    def retention_settings(self, name: str) -> SubjectConfig | None:
        """The settings by which this broker keeps the subject's messages, if the subject exists.
        None in a delay group, which keeps messages until they are delivered, regardless of the
        subject's settings.
        """
        return self._settings_or_none(name) if self._has_consumers else None

    def _settings_or_none(self, name: str) -> SubjectConfig | None:
        """Settings of a dead-letter queue follow from its name."""
        return SubjectConfig(name) if is_dead_letters(name) else self._look_up(name)

    def forget(self, subjects: Iterable[str] | None = None) -> None:
        """The settings of these subjects, and routes, may have changed: look their destinations up
        again. None: of all subjects.

        Looking up 10,000 subjects again because another one was created takes as long as a thousand
        batches.
        """
        self._partitions.clear()
        if subjects is None:
            self._unordered.clear()
            return
        for subject in subjects:
            self._unordered.pop(subject.encode(), None)
