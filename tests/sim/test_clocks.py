"""Clocks of brokers jump: nothing is deleted early, and planted bugs are found."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.forms import FORM, some

from qmq.broker.replica_time import ReplicaTime
from qmq.log.retention import Before
from qmq.log.retention_time import RetentionTime
from qmq.process.event_loop import Clock
from sim.clocks import Clocks, EarlyDeletion, LateDeletion, Machine

SEEDS = {"gate": 12, "ci": 24, "all": 400}[FORM]
"""So many, from 1 on."""
SEEDS_OF_BUGS = 40


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


class RetentionByOneClock(Clocks):
    def before(self, machine: Machine) -> Before:
        return lambda age_ms: self.now_ms + machine.off_ms - age_ms


class RetentionByTheLogsTime(Clocks):
    def before(self, machine: Machine) -> Before:
        before = super().before(machine)
        return lambda age_ms: max(before(age_ms), machine.store.last_time_ms - age_ms if machine.store is not None else 0)


class WallClock:
    """Follows every jump of a machine's clock."""

    def __init__(self, clocks: Clocks, machine: Machine) -> None:
        self._clocks, self._machine = clocks, machine

    def time_ms(self) -> int:
        return self._clocks.now_ms + self._machine.off_ms

    def monotonic_ms(self) -> int:
        return self._clocks.now_ms


class StampsByOneClock(Clocks):
    def stamp_clock(self, machine: Machine, clock: Clock) -> Clock:
        return WallClock(self, machine)


class AgreesWithItself(ReplicaTime):
    def _is_agreed(self, _: object) -> bool:
        return True


class NeverDoubts(ReplicaTime):
    def _note_leap(self, _: object, retention: RetentionTime) -> None:
        retention.doubts = []


BUGS: dict[str, tuple[type[Clocks], type[ReplicaTime]]] = {
    "retention counts by one machine's clock": (RetentionByOneClock, ReplicaTime),
    "retention counts by the log's newest time, which one master stamped": (RetentionByTheLogsTime, ReplicaTime),
    "entries are stamped by one machine's clock": (StampsByOneClock, ReplicaTime),
    "one machine is enough to agree": (Clocks, AgreesWithItself),
    "entries stamped before a leap count as certain": (Clocks, NeverDoubts),
}


@pytest.mark.parametrize("seed", range(1, SEEDS + 1))
def test_no_jump_of_a_clock_deletes_a_message_early(seed: int, tmp_path: Path) -> None:
    Clocks(seed, tmp_path).run()


@pytest.mark.parametrize("bug", some(BUGS))
def test_a_bug_that_trusts_one_clock_is_found(bug: str, tmp_path: Path) -> None:
    clocks_class, time_class = BUGS[bug]
    for seed in range(1, SEEDS_OF_BUGS + 1):
        try:
            clocks_class(seed, tmp_path / str(seed), time_class).run()
        except (EarlyDeletion, LateDeletion):
            return
    pytest.fail(f"{SEEDS_OF_BUGS} seeds did not find it")
