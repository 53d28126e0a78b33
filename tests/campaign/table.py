"""The table of all tests: the product of workloads and faults, each pair that means something.

Modules of `workloads`, `faults`, `checkers` and `bugs` are found by their files; each has a tuple
WORKLOADS, FAULTS, CHECKERS or BUGS. A name that occurs twice is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from campaign.values import Bug, CampaignTest, Checker, Fault, Workload

HERE: Final = Path(__file__).parent


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
            if fault.name in workload.skips or not (fault.hits & workload.uses or not fault.hits):
                continue
            if workload.only and fault.name not in workload.only:
                continue
            for durability in fault.durabilities:
                yield CampaignTest(workload=workload, fault=fault, durability=durability)
