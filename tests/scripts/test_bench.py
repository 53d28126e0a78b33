"""`scripts/bench`: what its names run, how it limits the CPU time of a process, and what it makes
of few messages.
"""

from __future__ import annotations

import os
import re
import time
from importlib import import_module
from pathlib import Path

import pytest

from bench import __main__ as bench_program
from bench import processes, security

PAGE = Path(__file__).parents[2] / "docs" / "BENCH.md"


def test_the_page_has_every_scenario_and_every_program() -> None:
    named = re.findall(r"^\| `(\w+)` \|", PAGE.read_text(), re.MULTILINE)
    assert named == [*bench_program.every(1), *bench_program.PROGRAMS]


@pytest.mark.parametrize("name", bench_program.PROGRAMS)
def test_a_program_explains_its_options(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        import_module(f"bench.{name}").main(["--help"])
    assert f"usage: scripts/bench {name}" in capsys.readouterr().out


def test_a_limited_process_gets_its_part_of_a_core() -> None:
    allowance, used_s, runs = processes.Allowance(0.25, now=0.0, used_s=0.0), 0.0, []
    for tick in range(1, 4_001):
        runs.append(allowance.may_run(tick * 0.005, used_s))
        used_s += 0.005 if runs[-1] else 0.0
    assert used_s == pytest.approx(0.25 * 20, abs=0.01)
    assert runs.count(True) == pytest.approx(1_000, abs=2)


def test_a_limited_process_that_rested_may_use_no_more_than_one_burst() -> None:
    allowance = processes.Allowance(0.25, now=0.0, used_s=0.0)
    assert allowance.may_run(60.0, 0.0)
    assert not allowance.may_run(60.0, processes.BURST_S)


def test_the_kernel_tells_the_cpu_time_of_a_process_with_all_its_threads() -> None:
    before_s = time.process_time()
    found_s = processes.cpu_s(os.getpid())
    assert before_s <= found_s <= time.process_time()


def test_a_few_messages_are_measured_as_one_batch() -> None:
    assert [
        security.batches(count, size) for count, size in ((1, 100), (1_999, 1_024), (200_000, 100))
    ] == [1, 1, 100]
