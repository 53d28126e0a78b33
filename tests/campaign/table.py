"""The table of all tests: each workload under the faults that it can see (`Workload.only`).

Modules of `workloads`, `faults`, `checkers` and `bugs` are found by their files; each has a tuple
WORKLOADS, FAULTS, CHECKERS or BUGS. A name that occurs twice is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any, Final

from campaign import emulator
from campaign.values import Bug, CampaignTest, Checker, Fault, Workload

HERE: Final = Path(__file__).parent
HOUR_MIN: Final = 60.0


def _found(package: str, variable: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path in sorted((HERE / package).glob("[a-z]*.py")):
        for each in getattr(import_module(f"campaign.{package}.{path.stem}"), variable, ()):
            if found.setdefault(each.name, each) is not each:
                raise ValueError(f"{package}: two are called {each.name}")
    return found


@cache
def workloads() -> dict[str, Workload]:
    """By name."""
    return _found("workloads", "WORKLOADS")


@cache
def faults() -> dict[str, Fault]:
    """By name."""
    return _found("faults", "FAULTS")


@cache
def checkers() -> dict[str, Checker]:
    """By name."""
    return _found("checkers", "CHECKERS")


@cache
def bugs() -> dict[str, Bug]:
    """By name. Imports servers of the product."""
    return _found("bugs", "BUGS")


@cache
def tests() -> dict[str, CampaignTest]:
    """By name, in the order of workloads, then faults."""
    return {each.name: each for each in _tests()}


def _tests() -> Iterator[CampaignTest]:
    for workload in workloads().values():
        for fault in faults().values():
            for durability in fault.durabilities:
                test = CampaignTest(workload=workload, fault=fault, durability=durability)
                if test.is_meant:
                    yield test
    yield emulator.TEST


def an_hour(seed: int) -> list[str]:
    """Names of tests that together take about an hour, others with each seed: every workload at
    first, each under a fault that no other one has, then as many more as there is time for.
    """
    random, left_min = Random(seed), HOUR_MIN
    waiting = [each for each in tests().values() if not each.workload.is_long]
    random.shuffle(waiting)
    chosen: list[CampaignTest] = []
    while waiting:
        workloads_seen = Counter(each.workload.name for each in chosen)
        faults_seen = Counter(each.fault.name for each in chosen)
        best = min(
            waiting,
            key=lambda each: (workloads_seen[each.workload.name], faults_seen[each.fault.name]),
        )
        if best.minutes > left_min:
            break
        left_min -= best.minutes
        waiting.remove(best)
        chosen.append(best)
    return sorted(each.name for each in chosen)
