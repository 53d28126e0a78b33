"""The forms of a test run. `QMQ_TEST_FORM` names the form; `scripts/test` sets it.

    gate   scripts/test         every promise: no tests marked `long`, a quarter of the examples,
                                few seeds, a third of the planted bugs, and of each file the first
                                test that is sampled
    ci     .ci/run              the same, the tests marked `long`, and changing seeds
    all    scripts/test --all   every test, also those marked `longest`, all examples, all planted bugs, and many seeds

A form has the same tests at every commit. A test is sampled if it is marked `sampled`, is in
tests/system, or shares Spark, a browser or a cluster of processes (SAMPLED_GROUPS): what it shows
through whole systems, quicker tests prove by their parts. One marked `smoke` is in every form, too.
A file or a test that the command line names runs whole.

The changing seeds follow from `QMQ_TEST_SEED`. The end of a run prints it; setting it repeats the
run.
"""  # noqa: E501

from __future__ import annotations

import os
import random
from collections.abc import Iterable
from typing import Final

FORMS: Final = ("gate", "ci", "all")
FORM: Final = os.environ.get("QMQ_TEST_FORM", "gate")
if FORM not in FORMS:
    raise ValueError(f"QMQ_TEST_FORM is one of {', '.join(FORMS)}, not {FORM!r}")
SAMPLED_GROUPS: Final = frozenset({"spark", "drivers", "faults", "chromium"})
"""Groups of xdist whose tests are sampled."""
# xdist's workers inherit the environment of the process that starts them, so all of them have one
# seed.
SEED: Final = int(os.environ.setdefault("QMQ_TEST_SEED", str(random.randrange(1, 1 << 31))))


def examples(of_all: int) -> int:
    """The number of Hypothesis examples in this form, given the number in the form `all`."""
    return of_all if FORM == "all" else max(of_all // 4, 10)


def some(names: Iterable[str], parts: int = 3) -> list[str]:
    """Of what is checked one by one, such as planted bugs: all in the form `all`, one of `parts`
    elsewhere.
    """
    found = list(names)
    return found if FORM == "all" else found[::parts]


def seeds(*, gate: int, every: int, changing: int) -> list[int]:
    """Seeds for a simulator: 1 to `gate`, or to `every` in the form `all`; outside the gate also
    `changing` ones that follow from SEED.
    """
    fixed = list(range(1, (every if FORM == "all" else gate) + 1))
    if FORM == "gate":
        return fixed
    return fixed + [SEED + number for number in range(changing)]
