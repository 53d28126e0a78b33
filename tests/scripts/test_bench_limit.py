"""How scripts/bench/limit.py limits the CPU time of a process."""

from __future__ import annotations

import os
import time

import pytest

from bench import limit as bench_limit


def test_a_limited_process_gets_its_part_of_a_core() -> None:
    allowance, used_s, runs = bench_limit.Allowance(0.25, now=0.0, used_s=0.0), 0.0, []
    for tick in range(1, 4_001):
        runs.append(allowance.may_run(tick * 0.005, used_s))
        used_s += 0.005 if runs[-1] else 0.0
    assert used_s == pytest.approx(0.25 * 20, abs=0.01)
    assert runs.count(True) == pytest.approx(1_000, abs=2)


def test_a_limited_process_that_rested_may_use_no_more_than_one_burst() -> None:
    allowance = bench_limit.Allowance(0.25, now=0.0, used_s=0.0)
    assert allowance.may_run(60.0, 0.0)
    assert not allowance.may_run(60.0, bench_limit.BURST_S)


def test_the_kernel_tells_the_cpu_time_of_a_process_with_all_its_threads() -> None:
    before_s = time.process_time()
    found_s = bench_limit.cpu_s(os.getpid())
    assert before_s <= found_s <= time.process_time()
