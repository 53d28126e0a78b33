"""The load of each partition of an ordered subject, by logical partition, for splitting by load. Not replicated: a new master starts
counting at zero.

Counts decay: every `STEP_MS` they are multiplied so that half is left after `HALF_LIFE_MS`. A rate is the decayed count over the time it
stands for (an exponentially weighted average: sum * ln 2 / half-life, corrected for the time before counting began).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from qmq.batch_columns import BatchFlag, Layout
from qmq.clock import Clock
from qmq.log.batch_filter import logical_partitions
from qmq.log.queue import Queue
from qmq.log.store import Intake

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
        found = np.bincount(logical_partitions(batch.region, Layout.walk(batch.region, header), header.count), minlength=len(load.lps))
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
