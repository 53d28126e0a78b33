"""What a broker counts: its work since the process began (docs/METRICS.md), and the load of
partitions.

Counters of work are plain integers, incremented once for each request.

*Stored* messages need no counter: a queue's numbers only grow while its broker serves, so the
difference to their values at the beginning is what was stored. Entries that came from another
master do not count, nor do command messages.

Counters continue when a broker loses and regains the mastership. They start again with the process,
as Prometheus expects.

`LoadMeters` count the load of each partition of an ordered subject, by logical partition, for
splitting by load. Not replicated: a new master starts counting at zero. Counts decay: every
`STEP_MS` they are multiplied so that half is left after `HALF_LIFE_MS`. A rate is the decayed count
over the time it stands for (an exponentially weighted average: sum * ln 2 / half-life, corrected
for the time before counting began).
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from qmq.errors import QmqError
from qmq.log.queue import Queue
from qmq.log.reading import logical_partitions
from qmq.log.store import Intake, Store
from qmq.metrics.figures import Durations
from qmq.model import base_group
from qmq.process.event_loop import Clock
from qmq.wire.batch_columns import BatchFlag, Layout
from qmq.wire.frame_payloads import Settlement, Verdict


class Stored(NamedTuple):
    """Counts of messages stored in a subject."""

    messages: int
    bytes: int
    batches: int

    def plus(self, other: Stored | None) -> Stored:
        return (
            self
            if other is None
            else Stored(
                self.messages + other.messages,
                self.bytes + other.bytes,
                self.batches + other.batches,
            )
        )


_NOTHING = Stored(0, 0, 0)


@dataclass(slots=True)
class GroupCounters:
    """The counters of a consumer group on one subject."""

    pulled: int = 0
    """Messages handed out."""
    pulled_bytes: int = 0
    retried: int = 0
    """The pulled messages that were handed out and worked on before."""
    filtered: int = 0
    """Messages that the group's tag filter left out."""
    acked: int = 0
    nacked: int = 0
    """Verdicts NACK."""
    released: int = 0
    dead: int = 0
    """Messages that failed for good."""
    uncopied: int = 0
    """The dead messages that could not be copied into the dead-letter queue."""
    leases_lost: int = 0
    lanes_granted: int = 0

    def handed_out(self, messages: int, size: int, retried: int) -> None:
        """A pull was answered."""
        self.pulled += messages
        self.pulled_bytes += size
        self.retried += retried

    def settled(self, settlements: Sequence[Settlement], stale: int) -> None:
        """Verdicts arrived. The consumer no longer held `stale` of their messages, mostly because
        the request was sent again.
        """
        for each in settlements:
            verdict, count = each.verdict, each.last - each.first + 1
            if stale:
                late = min(stale, count)
                count, stale = count - late, stale - late
            if verdict == Verdict.ACK:
                self.acked += count
            elif verdict == Verdict.RELEASE:
                self.released += count
            else:
                self.nacked += count


class BrokerCounters:
    """All counters of a broker."""

    def __init__(self) -> None:
        self.groups: dict[tuple[str, str], GroupCounters] = {}
        """By subject and group; all consumers of a broadcast group together."""
        self.refused: dict[str, int] = {}
        """Requests that were answered with an error, by the error's name."""
        self.accepted = 0
        """Accepted connections."""
        self.flushes = Durations()
        self.commits = Durations()
        """From written on this replica to committed."""
        self.checkpoints = 0
        self.checkpoint_ms = 0
        """When the last checkpoint was written, milliseconds since 1970."""
        self.files_deleted = 0
        self.retention_failures = 0
        """Queues that retention could not examine and files that it could not delete,
        counted each time.
        """
        self.damaged = 0
        """Entries that the scrubber found damaged."""
        self.stored: dict[str, Stored] = {}
        """Messages stored in earlier times as master, by subject; see `more`."""
        self._marks: dict[tuple[bytes, int], Stored] | None = None
        self.uncommitted: deque[tuple[int, float]] = deque()
        """The writes whose commit is awaited: their last index, and when they were written."""

    # --- stored -----------------------------------------------------------------------------------

    def begin(self, store: Store) -> None:
        """The broker begins to serve from this store."""
        self._marks = {
            key: _reached(queue) for key, queue in store.queues.items() if queue.next_sequence
        }
        self.uncommitted.clear()

    def end(self, store: Store) -> None:
        for queue in store.queues.values():
            more = self.more(queue)
            if more is not None:
                self.stored[queue.id.subject] = more.plus(self.stored.get(queue.id.subject))
        self._marks = None
        self.uncommitted.clear()

    def more(self, queue: Queue) -> Stored | None:
        """Count the entries stored in a queue since `begin`. None if there are none, or if the
        broker does not serve.
        """
        if self._marks is None:
            return None
        mark, now = (
            self._marks.get((queue.id.subject.encode(), queue.id.partition), _NOTHING),
            _reached(queue),
        )
        if now.batches == mark.batches:
            return None
        return Stored(
            now.messages - mark.messages, now.bytes - mark.bytes, now.batches - mark.batches
        )

    # --- counting ---------------------------------------------------------------------------------

    def group(self, subject: str, group: str) -> GroupCounters:
        """The counters of a group; made if absent."""
        return self.groups.setdefault((subject, base_group(group)), GroupCounters())

    def refuse(self, failure: QmqError) -> None:
        """A request was answered with an error."""
        name = type(failure).__name__
        self.refused[name] = self.refused.get(name, 0) + 1

    def checkpoint_written(self, now_ms: int) -> None:
        """A checkpoint is on disk."""
        self.checkpoints += 1
        self.checkpoint_ms = now_ms

    def wrote(self, index: int) -> None:
        """Entries up to `index` were written, and wait for their commit."""
        self.uncommitted.append((index, time.perf_counter()))

    def committed(self, index: int) -> None:
        """Everything up to `index` is committed."""
        written = self.uncommitted
        if written and written[0][0] <= index:
            now = time.perf_counter()
            while written and written[0][0] <= index:
                self.commits.note(now - written.popleft()[1])


def _reached(queue: Queue) -> Stored:
    """The end of a queue, without its command message."""
    command = queue.sealed is not None
    return Stored(
        queue.next_sequence - command, queue.cumulative_bytes, queue.index.count - command
    )


HALF_LIFE_MS: Final = 20_000
STEP_MS: Final = 1_000


@dataclass(slots=True)
class LoadMeter:
    """The load of one partition; `lps` is by logical partition, from 0."""

    since_ms: int
    at_ms: int
    messages: float = 0.0
    bytes: float = 0.0
    bent: int = 0
    """Bent messages stored so far."""
    lps: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))

    def decay(self, now_ms: int) -> None:
        if now_ms - self.at_ms < STEP_MS:
            return
        left = 0.5 ** ((now_ms - self.at_ms) / HALF_LIFE_MS)
        self.messages *= left
        self.bytes *= left
        self.lps *= left
        self.at_ms = now_ms

    def per_s(self, count: float) -> float:
        """A decayed count as a rate."""
        lived: float = 1.0 - 0.5 ** (max(self.at_ms - self.since_ms, STEP_MS) / HALF_LIFE_MS)
        return float(count) * math.log(2) / (HALF_LIFE_MS / 1000) / lived


class LoadMeters:
    """The meters of all partitions."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._loads: dict[int, LoadMeter] = {}

    def note(self, batches: list[Intake]) -> None:
        """Count batches that are about to be stored."""
        now_ms = self._clock.monotonic_ms()
        for batch in batches:
            if batch.queue.is_ordered:
                self._note(batch, now_ms)

    def _note(self, batch: Intake, now_ms: int) -> None:
        load = self._loads.get(id(batch.queue))
        if load is None:
            load = self._loads[id(batch.queue)] = LoadMeter(now_ms, now_ms)
        load.decay(now_ms)
        header = batch.header
        load.messages += header.count
        load.bytes += len(batch.region)
        if header.flags & BatchFlag.BENT:
            load.bent += header.count
        found = np.bincount(
            logical_partitions(batch.region, Layout.walk(batch.region, header), header.count),
            minlength=len(load.lps),
        )
        if len(found) > len(load.lps):
            grown = np.zeros(len(found))
            grown[: len(load.lps)] = load.lps
            load.lps = grown
        load.lps += found

    def of(self, queue: Queue) -> LoadMeter:
        """The current load of a partition."""
        now_ms = self._clock.monotonic_ms()
        load = self._loads.get(id(queue)) or LoadMeter(now_ms, now_ms)
        load.decay(now_ms)
        return load
