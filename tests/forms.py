"""The forms of a test run. `QMQ_TEST_FORM` names the form; `scripts/test` sets it.

    gate   scripts/test         every promise: no tests marked `long`, a quarter of the examples, few seeds, a third of the planted bugs and
                                a fifth of the tests that take turns, another fifth in each run
    ci     .ci/run              the same, the tests marked `long`, all planted bugs, a fifth of those that take turns, and changing seeds
    all    scripts/test --all   every test, also those marked `longest`, all examples, many seeds, and seeds that change from run to run

Tests take turns if they are marked `rotating`, are in tests/system, or share Spark, a browser or a cluster of processes (GROUPS_IN_TURN).
Quicker tests prove most of what they show; a test marked `smoke` is the one of its kind that every run has.

The changing seeds follow from `QMQ_TEST_SEED`. The end of a run prints it; setting it repeats the run.
"""

from __future__ import annotations

import os
import random
import zlib
from collections.abc import Iterable
from typing import Final

FORMS: Final = ("gate", "ci", "all")
FORM: Final = os.environ.get("QMQ_TEST_FORM", "gate")
if FORM not in FORMS:
    raise ValueError(f"QMQ_TEST_FORM is one of {', '.join(FORMS)}, not {FORM!r}")
PARTS: Final = {"gate": 5, "ci": 5, "all": 1}[FORM]
GROUPS_IN_TURN: Final = frozenset({"spark", "drivers", "faults", "chromium"})
"""Groups of xdist whose tests take turns."""
# xdist's workers inherit the environment of the process that starts them, so all of them have one seed.
SEED: Final = int(os.environ.setdefault("QMQ_TEST_SEED", str(random.randrange(1, 1 << 31))))


def examples(of_all: int) -> int:
    """The number of Hypothesis examples in this form, given the number in the form `all`."""
    return of_all if FORM == "all" else max(of_all // 4, 10)


def some(names: Iterable[str], parts: int = 3) -> list[str]:
    """Of what is checked one by one, such as planted bugs: all outside the gate, in the gate one of `parts`, another one each run."""
    found = list(names)
    return found[SEED % parts :: parts] if FORM == "gate" else found


def is_turn_of(name: str) -> bool:
    """Whether a test that takes turns is in this run."""
    return zlib.crc32(name.encode()) % PARTS == SEED % PARTS


def seeds(*, gate: int, every: int, changing: int) -> list[int]:
    """Seeds for a simulator: 1 to `gate`, or to `every` in the form `all`; outside the gate also `changing` ones that follow from SEED."""
    fixed = list(range(1, (every if FORM == "all" else gate) + 1))
    if FORM == "gate":
        return fixed
    return fixed + [SEED + number for number in range(changing)]
