"""A process whose wall clock jumps by an hour keeps its time."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from system.faketime import SHARED_MEMORY, FakeTime

HOUR = 3_600_000
SLACK = 60_000
"""Milliseconds that a look may take on a busy machine, both ways."""

PROGRAM = """
import sys, time
from qmq.broker.timekeeper import SteadyClock, boot_ms, wall_ms
clock = SteadyClock()
for line in sys.stdin:
    command = line.split()
    if command[0] == "witness":
        now = boot_ms()
        clock.witness(command[1], int(command[2]), now, now)
    print(wall_ms(), clock.time_ms(), time.monotonic_ns() // 1_000_000, boot_ms(), clock.step_ms, flush=True)
"""  # noqa: E501


class Look(NamedTuple):
    """The clocks as the process reads them."""

    wall_ms: int
    kept_ms: int
    monotonic_ms: int
    boot_ms: int
    step_ms: int


class Process:
    """A Python process with a SteadyClock, asked line by line."""

    def __init__(self, fake: FakeTime) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=fake.environment,
        )

    def ask(self, command: str = "look") -> Look:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        return Look(*map(int, self._process.stdout.readline().split()))

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate(timeout=30)

    def stop(self) -> None:
        self._process.communicate(timeout=30)


@pytest.fixture
def fake(tmp_path: Path) -> FakeTime:
    return FakeTime(tmp_path)


@pytest.fixture
def process(fake: FakeTime) -> Iterator[Process]:
    process = Process(fake)
    yield process
    process.stop()


def true_ms() -> int:
    return time.time_ns() // 1_000_000


def close(one: int, two: int) -> bool:
    return abs(one - two) < SLACK


@pytest.mark.parametrize("jump", [HOUR, -HOUR])
def test_a_process_whose_clock_jumps_an_hour_keeps_its_time(
    fake: FakeTime, process: Process, jump: int
) -> None:
    before = process.ask(f"witness a {true_ms()}")
    assert close(before.wall_ms, true_ms())
    fake.jump(jump / 1000)
    jumped = process.ask()
    assert close(jumped.wall_ms, true_ms() + jump)
    assert close(jumped.kept_ms, true_ms())
    assert close(jumped.step_ms, jump)
    fake.jump(0)
    back = process.ask()
    assert close(back.wall_ms, true_ms())
    assert close(back.kept_ms, true_ms())
    assert close(back.step_ms, 0)


def test_a_clock_jump_that_others_confirm_is_accepted(fake: FakeTime, process: Process) -> None:
    process.ask(f"witness a {true_ms()}")
    fake.jump(3600)
    assert close(process.ask().kept_ms, true_ms())
    accepted = process.ask(f"witness a {process.ask().wall_ms}")
    assert close(accepted.kept_ms, true_ms() + HOUR)
    assert close(accepted.step_ms, 0)


def test_a_process_started_while_its_clock_is_ahead_is_put_right_by_a_witness(
    fake: FakeTime,
) -> None:
    fake.jump(3600)
    process = Process(fake)
    try:
        assert close(process.ask().kept_ms, true_ms() + HOUR)
        assert close(process.ask(f"witness a {true_ms()}").kept_ms, true_ms())
    finally:
        process.stop()


def test_no_other_clock_jumps(fake: FakeTime, process: Process) -> None:
    before = process.ask()
    fake.jump(3600)
    after = process.ask()
    assert 0 <= after.monotonic_ms - before.monotonic_ms < SLACK
    assert 0 <= after.boot_ms - before.boot_ms < SLACK
    assert close(after.monotonic_ms, time.monotonic_ns() // 1_000_000)
    assert close(after.boot_ms, time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000)


def test_the_sweep_removes_everything_that_a_killed_process_left(fake: FakeTime) -> None:
    process = Process(fake)
    process.ask()
    process.kill()
    assert list(SHARED_MEMORY.glob(f"*faketime*_{process.pid}"))
    fake.sweep(process.pid)
    assert not list(SHARED_MEMORY.glob(f"*faketime*_{process.pid}"))
