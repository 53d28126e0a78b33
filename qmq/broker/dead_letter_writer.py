"""Dead letters: copies of messages that failed for good, into the group's dead-letter queue, each exactly once (docs/DELIVERY.md).

    DEAD is committed ──▶ copies appended, numbered as they died ──▶ BURIED

Rules:
* Nothing is copied before the entry by which it died is committed: a copy of a message that a new master still holds to be alive would be
  one too many.
* The producer of a share's copies follows from subject, partition, group and the group's birth; the number of a batch is the number of its
  first dead message. Whoever buries again after a crash, however cut, finds what is there already, and goes on behind it.
* What cannot be read stays dying, and is tried again now and then. Of what retention took there is nothing left to copy.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final, NamedTuple

from qmq import headers, limits
from qmq.batch import BatchView, encode, sent_sizes
from qmq.batch_columns import parse_header, tag_bloom, tag_hash
from qmq.broker.serving_parts import ServingParts
from qmq.broker.sessions import QueueGroup
from qmq.copies import CREATED_SPAN_MS, columns_of_copies, size_of_copy
from qmq.errors import InvalidArgument, LogDamaged, QmqError
from qmq.file_descriptors import shortage_is_overload
from qmq.log.actions import Buried
from qmq.log.consume_log import IndexEntry
from qmq.log.queue import Queue
from qmq.log.share import Dying
from qmq.log.store import Intake
from qmq.model import MessageId, dead_letter_subject
from qmq.targeted import failures, is_directed
from qmq.wire.frame_payloads import Produced

log = logging.getLogger("qmq.broker")

BATCH_MESSAGES: Final = 500
BATCH_BYTES: Final = 4 * limits.MIB
ROUNDS: Final = 4
"""Batches that one share buries at a time."""
_OTHERS_BYTES: Final = 600
"""What is added to a copy at most, besides its error."""
AGAIN_MS: Final = 10_000
"""How long a share rests whose dead messages could not be copied."""
_PRODUCER_BIT: Final = 1 << 62

Append = Callable[[list[Intake]], list[Produced]]


@dataclass(slots=True)
class Grave:
    """A share with dying messages: those before number `deaths` may be copied, more when what is in `steps` is committed."""

    state: QueueGroup
    deaths: int = 0
    steps: deque[tuple[int, int]] = field(default_factory=deque)
    """(index of an entry, how many had died by then), in order."""
    not_before_ms: int = 0

    def committed(self, index: int) -> None:
        """Everything up to `index` is."""
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
        self.is_directed = is_directed(view.header)
        self._header, self._ids = view.header, view.message_ids()

    def id_of(self, place: int) -> bytes:
        """Made one by one: mostly one message of many is dead."""
        if self._ids is not None:
            return self._ids[place]
        return MessageId(self._header.producer_id, self._header.batch_sequence, place).to_bytes()


class Letter(NamedTuple):
    """One dead message, with what it had."""

    number: int
    dying: Dying
    sequence: int
    batch: Opened
    place: int


class DeadLetterWriter:
    """Of one broker, while it serves."""

    def __init__(self, parts: ServingParts, append: Append) -> None:
        """`append` stores what the broker itself sends; what is there already is not stored again. It raises DiskFull."""
        self._store = parts.store
        self._clock = parts.clock
        self._mends = parts.mends
        self._turns = parts.turns
        self._append_own = append
        self._fresh: dict[int, QueueGroup] = {}
        self._graves: dict[int, Grave] = {}
        self.buried = 0
        """Copies made here."""

    def died(self, state: QueueGroup) -> None:
        """Messages of a share died in this turn."""
        self._fresh[id(state)] = state

    def found(self, state: QueueGroup) -> None:
        """A share was loaded: what is dying in it is committed."""
        if state.share.dying:
            self._graves[id(state)] = Grave(state, state.share.deaths)

    def written(self, index: int) -> None:
        """What happened in this turn is in the log, up to `index`."""
        if self._fresh:
            for key, state in self._fresh.items():
                self._graves.setdefault(key, Grave(state)).steps.append((index, state.share.deaths))
            self._fresh = {}

    def work(self) -> None:
        """Copy what may be copied, some of each share: others have work too."""
        if not self._graves:
            return
        now_ms = self._clock.monotonic_ms()
        for key, grave in list(self._graves.items()):
            grave.committed(self._store.committed_index)
            if now_ms < grave.not_before_ms:
                continue
            try:
                for _ in range(ROUNDS):
                    if not self._bury(grave):
                        if not grave.steps:
                            del self._graves[key]
                        break
            except QmqError as failure:
                grave.not_before_ms = now_ms + AGAIN_MS
                waiting, state = grave.state.share.dying_messages(), grave.state
                log.warning(
                    "%d dead messages of group %s on %s wait for their copy to the dead-letter queue: %s",
                    waiting,
                    state.name,
                    state.queue.id,
                    failure,
                )
                if isinstance(failure, LogDamaged):
                    self._mends(failure)
            except (AssertionError, OSError):
                raise
            except Exception:
                grave.not_before_ms = now_ms + AGAIN_MS
                log.exception("copying dead messages of group %s on %s failed", grave.state.name, grave.state.queue.id)

    def _bury(self, grave: Grave) -> bool:
        """One batch; whether there was anything to do. Raises QmqError: they stay dying, and are tried again."""
        state = grave.state
        if not state.share.dying or state.share.dying[0].number >= grave.deaths:
            return False
        with shortage_is_overload():
            letters, done = self._letters(state, grave.deaths)
        if letters:
            copies = self._copies(state, letters)
            count = self._append(copies) if copies is not None else self._set_aside(state, letters[0].sequence, 1)
            done.append((letters[0].number, count))
        queue_id = state.queue.id
        self._store.act(Buried(queue_id.subject, queue_id.partition, state.name, "", tuple(done)))
        self._turns.schedule()
        return True

    def _letters(self, state: QueueGroup, deaths: int) -> tuple[list[Letter], list[tuple[int, int]]]:
        """The next messages to be copied together, numbered without a gap; (number, count) of those that are gone. Raises LogDamaged."""
        letters, gone, size, low, high = list[Letter](), list[tuple[int, int]](), 0, 0, 0
        opened_at, batch = -1, None
        for item in state.share.dying:
            number, sequence, end = item.number, item.first, item.first + min(item.count, deaths - item.number)
            while sequence < end:
                entry = self._entry(state, sequence)
                lost = (min(entry.base_sequence, end) if entry is not None else end) - sequence
                if lost > 0:
                    if letters:
                        return letters, gone
                    log.warning(
                        "retention deleted %d dead messages of group %s on %s before they were copied to the dead-letter queue",
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
                for place in range(sequence - entry.base_sequence, min(end, entry.next_sequence) - entry.base_sequence):
                    size += _size_of(batch, place, item.error)
                    created = batch.created_ms[place]
                    low, high = (min(low, created), max(high, created)) if letters else (created, created)
                    is_full = len(letters) >= BATCH_MESSAGES or size > BATCH_BYTES or high - low >= CREATED_SPAN_MS
                    if letters and (is_full or letters[-1].number + 1 != number):
                        return letters, gone
                    letters.append(Letter(number, item, sequence, batch, place))
                    number, sequence = number + 1, sequence + 1
        return letters, gone

    def _entry(self, state: QueueGroup, sequence: int) -> IndexEntry | None:
        """Where a message lies, or the next one that is kept; None behind the last."""
        queue = state.queue
        number = state.reader.number_of(max(sequence, queue.start_sequence))
        return state.reader.entry(number) if number < queue.index.count else None

    def _opened(self, state: QueueGroup, entry: IndexEntry) -> Opened | None:
        """None if what was stored there is no batch of messages. Raises LogDamaged; InvalidArgument: a library is not installed here."""
        stored = self._store.read(state.queue, entry)
        try:
            return Opened(BatchView.parse(b"".join(stored)))
        except (InvalidArgument, AssertionError, OSError, MemoryError):
            raise
        except Exception as cause:
            log.error("the batch at sequence %d of %s cannot be read: %r", entry.base_sequence, state.queue.id, cause)
            return None

    def _copies(self, state: QueueGroup, letters: list[Letter]) -> Intake | None:
        """A batch of copies of all, or, if there is none that holds them all, of the first one; None if that cannot be copied either."""
        subject = dead_letter_subject(state.name)
        queue = self._store.open_queue(subject, 0)
        for part in (letters, letters[:1]):
            try:
                return intake_of(subject, queue, state, part)
            except (AssertionError, OSError, MemoryError):
                raise
            except Exception as cause:
                log.error("message %d of %s, or a later one of its batch, cannot be copied: %r", part[0].sequence, state.queue.id, cause)
        return None

    def _set_aside(self, state: QueueGroup, sequence: int, count: int) -> int:
        """So many messages, from `sequence` on, are dead, and cannot be copied: they count as buried, so that others are. Gives `count`."""
        log.error("%d dead messages of group %s from sequence %d of %s on cannot be copied", count, state.name, sequence, state.queue.id)
        state.tally.uncopied += count
        return count

    def _append(self, copies: Intake) -> int:
        """How many of them, from the first one on, are in the dead-letter queue now. Raises DiskFull."""
        produced = self._append_own([copies])[0]
        entry = copies.queue.index.entry(copies.queue.index.find_sequence(produced.base_sequence))
        self.buried += entry.count
        return min(entry.count, copies.header.count)


def _size_of(batch: Opened, place: int, error: str) -> int:
    """Bytes of a copy, at most: not compressed, and with the headers that are added."""
    copy = size_of_copy(batch.bodies[place], batch.keys[place], batch.tags[place], batch.headers[place])
    return copy + 4 * len(error) + _OTHERS_BYTES


def intake_of(subject: str, queue: Queue, state: QueueGroup, letters: list[Letter]) -> Intake:
    """The batch of copies."""
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
        subject.encode(), columns, producer_id=producer_id(state), batch_sequence=letters[0].number, create_time_ms=first
    )
    bloom = tag_bloom({tag_hash(tag) for each in tags for tag in each})
    return Intake(queue, region, sent_sizes(envelope)[1], parse_header(region), bloom)


def producer_id(state: QueueGroup) -> int:
    """Who sends a share's dead letters: the same on every replica, and no application."""
    queue_id = state.queue.id
    text = f"{queue_id.subject}/{queue_id.partition}/{state.name}/{state.share.born_ms}"
    return _PRODUCER_BIT | int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 2


def _headers(state: QueueGroup, letter: Letter) -> dict[str, bytes]:
    own = letter.batch.headers[letter.place]
    attempt = letter.dying.attempt + (failures(own) if letter.batch.is_directed else 0)
    return {
        **own,
        headers.SUBJECT: state.queue.id.subject.encode(),
        headers.SEQUENCE: b"%d" % letter.sequence,
        headers.GROUP: state.name.encode(),
        headers.ATTEMPT: b"%d" % attempt,
        headers.ERROR: letter.dying.error.encode(),
        headers.DEAD_MS: b"%d" % letter.dying.died_ms,
    }
