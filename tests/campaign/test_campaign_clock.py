"""A process's wall clock jumps, swings and drifts while it runs, and its other clocks stay."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from campaign.faults.clock import COMPILER, NS, TRUE, VARIABLE, ClockPage, WrongClock, library
from campaign.machine import missing

pytestmark = pytest.mark.skipif(bool(missing({COMPILER})), reason=missing({COMPILER}))

PROGRAM = """
import sys, time
for line in sys.stdin:
    print(time.time_ns(), time.monotonic_ns(), time.clock_gettime_ns(time.CLOCK_BOOTTIME), flush=True)
"""  # noqa: E501
HOUR_NS = 3_600 * NS
SLACK_NS = 60 * NS
"""What a look may take on a busy machine."""


class ClockProcess:
    """A process that reads its clocks when it is asked."""

    def __init__(self, path: Path) -> None:
        self.page = ClockPage(path)
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "LD_PRELOAD": str(library()), VARIABLE: str(path)},
        )

    def ask(self) -> tuple[int, int, int]:
        """(wall, monotonic, boot) in nanoseconds."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("look\n")
        self._process.stdin.flush()
        wall, monotonic, boot = map(int, self._process.stdout.readline().split())
        return wall, monotonic, boot

    def ahead_ns(self) -> int:
        """How far the process's wall clock is ahead."""
        return self.ask()[0] - time.time_ns()

    def stop(self) -> None:
        self._process.communicate(timeout=30)


@pytest.fixture
def process(tmp_path: Path) -> Iterator[ClockProcess]:
    found = ClockProcess(tmp_path / "clock")
    yield found
    found.stop()


def close(one: int, two: int) -> bool:
    return abs(one - two) < SLACK_NS


@pytest.mark.parametrize("jump_ns", [HOUR_NS, -HOUR_NS])
def test_a_clock_jumps_and_comes_back_and_the_readings_are_counted(
    process: ClockProcess, jump_ns: int
) -> None:
    assert close(process.ahead_ns(), 0)
    assert process.page.reads == 0
    process.page.set(WrongClock(offset_ns=jump_ns))
    assert close(process.ahead_ns(), jump_ns)
    assert process.page.reads > 0
    process.page.set(TRUE)
    assert close(process.ahead_ns(), 0)


def test_the_clocks_that_count_from_a_start_stay_true(process: ClockProcess) -> None:
    process.page.set(WrongClock(offset_ns=HOUR_NS, drift_ppm=4_000_000))
    _, monotonic, boot = process.ask()
    assert close(monotonic, time.monotonic_ns())
    assert close(boot, time.clock_gettime_ns(time.CLOCK_BOOTTIME))


def test_a_clock_swings_between_two_times(process: ClockProcess) -> None:
    process.page.set(WrongClock(swing_ns=HOUR_NS, period_ns=NS // 1000))
    seen = {round(process.ahead_ns() / HOUR_NS) for _ in range(1_000)}
    assert seen == {0, 1}


def test_a_clock_drifts(process: ClockProcess) -> None:
    """By a thousand hours an hour, so that a slow machine is not taken for a drift."""
    process.page.set(WrongClock(drift_ppm=1_000_000_000))
    before = process.ask()
    while (after := process.ask())[1] - before[1] < NS // 10:
        pass
    rate = (after[0] - before[0]) / (after[1] - before[1])
    assert 900 < rate < 1_100
