"""Dead letters: copies of messages that failed for good, into the group's dead-letter queue, each
exactly once (docs/DELIVERY.md).

    DEAD is committed ──▶ copies appended, numbered as they died ──▶ DEAD_LETTERED

Rules:
* A message is copied only after the entry with its death is committed: otherwise a new master might
  not know of the death, and the copy would be wrong.
* The producer id of a share's copies follows from subject, partition, group and the group's
  creation; the number of a batch is the number of its first dead message. After a crash, the next
  master recognises the copies that are stored, however they were batched, and continues behind
  them.
* Messages that cannot be read stay dying, and are retried from time to time. Messages that
  retention deleted cannot be copied.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final, NamedTuple

from qmq import limits, model
from qmq.broker.dispatch.sessions import QueueGroup
from qmq.broker.parts import ServingBroker
from qmq.errors import InvalidArgument, LogDamaged, QmqError
from qmq.log.actions import DeadLettered
from qmq.log.consume_log import IndexEntry
from qmq.log.group_state import Dying
from qmq.log.queue import Queue
from qmq.log.store import Intake
from qmq.model import MessageId, dead_letter_subject
from qmq.process.files import refusal_of
from qmq.rpc.channel import failures
from qmq.wire.batch import (
    CREATED_SPAN_MS,
    BatchView,
    columns_of_copies,
    encode,
    sent_sizes,
    size_of_copy,
)
from qmq.wire.batch_columns import Compression, parse_header, tag_bloom, tag_hash

log = logging.getLogger("qmq.broker")

BATCH_MESSAGES: Final = 500
BATCH_BYTES: Final = 4 * limits.MIB
ROUNDS: Final = 4
"""Batches copied for one share before others get a turn."""
_OTHERS_BYTES: Final = 600
"""The most that a copy adds to a message, besides its error."""
AGAIN_MS: Final = 10_000
"""Pause for a share whose dead messages could not be copied."""
_PRODUCER_BIT: Final = 1 << 62


@dataclass(slots=True)
class PendingCopies:
    """A share with dying messages: those before number `deaths` may be copied, and more when the
    indexes in `steps` are committed.
    """

    state: QueueGroup
    deaths: int = 0
    steps: deque[tuple[int, int]] = field(default_factory=deque)
    """(index of an entry, number of deaths up to it), in order."""
    not_before_ms: int = 0

    def committed(self, index: int) -> None:
        """Everything up to `index` is committed."""
        while self.steps and self.steps[0][0] <= index:
            self.deaths = self.steps.popleft()[1]


class Opened:
    """A batch with its columns decoded once, for all its messages."""

    def __init__(self, view: BatchView) -> None:
        count = view.count
        self.bodies = view.bodies()
        self.keys = view.keys() or [b""] * count
        self.tags = view.tags() or [()] * count
        self.headers = view.headers() or [{}] * count
        self.created_ms = view.create_times_ms()
        self.is_directed = view.header.is_directed
        self.compression = Compression(view.header.compression)
        self._header, self._ids = view.header, view.message_ids()

    def id_of(self, place: int) -> bytes:
        """The id of one message. Ids are made one by one,
        because usually one message of many is dead.
        """
        if self._ids is not None:
            return self._ids[place]
        return MessageId(self._header.producer_id, self._header.batch_sequence, place).to_bytes()


class Letter(NamedTuple):
    """One dead message and its properties."""

    number: int
    dying: Dying
    sequence: int
    batch: Opened
    place: int


class DeadLetterWriter:
    """Copies the dead letters of one broker while it serves."""

    def __init__(self, broker: ServingBroker) -> None:
        self._store = broker.store
        self._clock = broker.clock
        self._report_damage = broker.report_damage
        self._broker = broker
        self.fresh: dict[int, QueueGroup] = {}
        """Groups whose messages began to die in actions that are not in the log yet; `written` is
        called when they are.
        """
        self._pending: dict[int, PendingCopies] = {}
        self.copied = 0
        """Copies made here."""

    def died(self, state: QueueGroup) -> None:
        """Messages of a share died in this turn."""
        self.fresh[id(state)] = state

    def found(self, state: QueueGroup) -> None:
        """A share was loaded; all its dying messages are committed."""
        if state.share.dying:
            self._pending[id(state)] = PendingCopies(state, state.share.deaths)

    def written(self, index: int) -> None:
        """The actions of this turn are in the log, up to `index`."""
        for key, state in self.fresh.items():
            self._pending.setdefault(key, PendingCopies(state)).steps.append(
                (index, state.share.deaths)
            )
        self.fresh = {}

    def work(self) -> None:
        """Copy what may be copied, a few batches for each share in turn."""
        if not self._pending:
            return
        now_ms = self._clock.monotonic_ms()
        for key, pending in list(self._pending.items()):
            pending.committed(self._store.committed_index)
            if now_ms < pending.not_before_ms:
                continue
            try:
                for _ in range(ROUNDS):
                    if not self._copy_next(pending):
                        if not pending.steps:
                            del self._pending[key]
                        break
            except QmqError as failure:
                pending.not_before_ms = now_ms + AGAIN_MS
                waiting, state = pending.state.share.dying_messages(), pending.state
                log.warning(
                    (
                        "%d dead messages of group %s on %s wait for their copy to the "
                        "dead-letter queue: %s"
                    ),
                    waiting,
                    state.name,
                    state.queue.id,
                    failure,
                )
                if isinstance(failure, LogDamaged):
                    self._report_damage(failure)
            except (AssertionError, OSError):
                raise
            except Exception:
                pending.not_before_ms = now_ms + AGAIN_MS
                log.exception(
                    "copying dead messages of group %s on %s failed",
                    pending.state.name,
                    pending.state.queue.id,
                )

    def _copy_next(self, pending: PendingCopies) -> bool:
        """Copy one batch. Returns whether there was any. Raises QmqError: then the messages stay
        dying, and are retried.
        """
        state = pending.state
        if not state.share.dying or state.share.dying[0].number >= pending.deaths:
            return False
        try:
            letters, done = self._letters(state, pending.deaths)
        except OSError as cause:
            raise refusal_of(cause) from cause
        if letters:
            copies = self._copies(state, letters)
            count = (
                self._append(copies)
                if copies is not None
                else self._set_aside(state, letters[0].sequence, 1)
            )
            done.append((letters[0].number, count))
        queue_id = state.queue.id
        self._store.act(
            DeadLettered(queue_id.subject, queue_id.partition, state.name, "", tuple(done))
        )
        self._broker.schedule()
        return True

    def _letters(
        self, state: QueueGroup, deaths: int
    ) -> tuple[list[Letter], list[tuple[int, int]]]:
        """The next messages to be copied together, with consecutive numbers; and (number, count) of
        deleted ones. Raises LogDamaged.
        """
        letters, gone, size, low, high = list[Letter](), list[tuple[int, int]](), 0, 0, 0
        opened_at, batch = -1, None
        for item in state.share.dying:
            number, sequence, end = (
                item.number,
                item.first,
                item.first + min(item.count, deaths - item.number),
            )
            while sequence < end:
                entry = self._entry(state, sequence)
                lost = (min(entry.base_sequence, end) if entry is not None else end) - sequence
                if lost > 0:
                    if letters:
                        return letters, gone
                    log.warning(
                        (
                            "retention deleted %d dead messages of group %s on %s before they "
                            "were copied to the dead-letter queue"
                        ),
                        lost,
                        state.name,
                        state.queue.id,
                    )
                    gone.append((number, lost))
                    number, sequence = number + lost, sequence + lost
                    continue
                assert entry is not None
                if opened_at != entry.position:
                    opened_at, batch = entry.position, self._opened(state, entry)
                if batch is None:
                    if letters:
                        return letters, gone
                    count = min(end, entry.next_sequence) - sequence
                    gone.append((number, self._set_aside(state, sequence, count)))
                    number, sequence = number + count, sequence + count
                    continue
                for place in range(
                    sequence - entry.base_sequence,
                    min(end, entry.next_sequence) - entry.base_sequence,
                ):
                    size += _size_of(batch, place, item.error)
                    created = batch.created_ms[place]
                    low, high = (
                        (min(low, created), max(high, created)) if letters else (created, created)
                    )
                    is_full = (
                        len(letters) >= BATCH_MESSAGES
                        or size > BATCH_BYTES
                        or high - low >= CREATED_SPAN_MS
                    )
                    if letters and (is_full or letters[-1].number + 1 != number):
                        return letters, gone
                    letters.append(Letter(number, item, sequence, batch, place))
                    number, sequence = number + 1, sequence + 1
        return letters, gone

    def _entry(self, state: QueueGroup, sequence: int) -> IndexEntry | None:
        """The index entry of a message, or of the next kept one; None behind the last."""
        queue = state.queue
        number = state.reader.number_of(max(sequence, queue.start_sequence))
        return state.reader.entry(number) if number < queue.index.count else None

    def _opened(self, state: QueueGroup, entry: IndexEntry) -> Opened | None:
        """None if the entry is not a batch of messages. Raises LogDamaged; InvalidArgument if a
        library is not installed.
        """
        stored = self._store.read(state.queue, entry)
        try:
            return Opened(BatchView.parse(b"".join(stored)))
        except (InvalidArgument, AssertionError, OSError, MemoryError):
            raise
        except Exception as cause:
            log.error(
                "the batch at sequence %d of %s cannot be read: %r",
                entry.base_sequence,
                state.queue.id,
                cause,
            )
            return None

    def _copies(self, state: QueueGroup, letters: list[Letter]) -> Intake | None:
        """One batch with copies of all letters, or, if they do not fit, of the first; None if that
        cannot be copied either.
        """
        subject = dead_letter_subject(state.name)
        queue = self._store.open_queue(subject, 0)
        for part in (letters, letters[:1]):
            try:
                return intake_of(subject, queue, state, part)
            except (AssertionError, OSError, MemoryError):
                raise
            except Exception as cause:
                log.error(
                    "message %d of %s, or a later one of its batch, cannot be copied: %r",
                    part[0].sequence,
                    state.queue.id,
                    cause,
                )
        return None

    def _set_aside(self, state: QueueGroup, sequence: int, count: int) -> int:
        """Record dead messages that cannot be copied as dead-lettered, so that later ones can be
        copied. Returns `count`.
        """
        log.error(
            "%d dead messages of group %s from sequence %d of %s on cannot be copied",
            count,
            state.name,
            sequence,
            state.queue.id,
        )
        state.counters.uncopied += count
        return count

    def _append(self, copies: Intake) -> int:
        """Append copies. Returns how many of them, from the first on, are now in the dead-letter
        queue. Raises DiskFull.
        """
        produced = self._broker.append_own([copies])[0]
        entry = copies.queue.index.entry(copies.queue.index.find_sequence(produced.base_sequence))
        self.copied += entry.count
        return min(entry.count, copies.header.count)


def _size_of(batch: Opened, place: int, error: str) -> int:
    """The largest size of a copy in bytes: uncompressed, with the added headers."""
    copy = size_of_copy(
        batch.bodies[place], batch.keys[place], batch.tags[place], batch.headers[place]
    )
    return copy + 4 * len(error) + _OTHERS_BYTES


def intake_of(subject: str, queue: Queue, state: QueueGroup, letters: list[Letter]) -> Intake:
    """The batch of copies, compressed as the first one's batch is: copies must not take a thousand
    times the bytes of their originals.
    """
    tags = [each.batch.tags[each.place] for each in letters]
    columns, first = columns_of_copies(
        [each.batch.bodies[each.place] for each in letters],
        [each.batch.keys[each.place] for each in letters],
        tags,
        [_headers(state, each) for each in letters],
        [each.batch.created_ms[each.place] for each in letters],
        [each.batch.id_of(each.place) for each in letters],
    )
    envelope, region = encode(
        subject.encode(),
        columns,
        producer_id=producer_id(state),
        batch_sequence=letters[0].number,
        create_time_ms=first,
        compression=letters[0].batch.compression,
    )
    bloom = tag_bloom({tag_hash(tag) for each in tags for tag in each})
    return Intake(queue, region, sent_sizes(envelope)[1], parse_header(region), bloom)


def producer_id(state: QueueGroup) -> int:
    """The producer id of a share's dead letters:
    the same on every replica, and different from any application's.
    """
    queue_id = state.queue.id
    text = f"{queue_id.subject}/{queue_id.partition}/{state.name}/{state.share.born_ms}"
    return (
        _PRODUCER_BIT | int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 2
    )


def _headers(state: QueueGroup, letter: Letter) -> dict[str, bytes]:
    own = letter.batch.headers[letter.place]
    attempt = letter.dying.attempt + (failures(own) if letter.batch.is_directed else 0)
    return {
        **own,
        model.SUBJECT: state.queue.id.subject.encode(),
        model.SEQUENCE: b"%d" % letter.sequence,
        model.GROUP: state.name.encode(),
        model.ATTEMPT: b"%d" % attempt,
        model.ERROR: letter.dying.error.encode(),
        model.DEAD_MS: b"%d" % letter.dying.died_ms,
    }
