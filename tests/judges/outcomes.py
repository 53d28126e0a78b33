"""What the tests of a suite said, and how that compares with the documented differences. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any
from xml.etree import ElementTree


class Outcome(IntEnum):
    """Of one test."""

    SKIPPED = 0
    PASSED = 1
    FAILED = 2


Outcomes = Mapping[str, Outcome]


@dataclass(frozen=True, slots=True)
class Difference:
    """Tests that fail for one reason; `sometimes`: they race with something, and pass at times."""

    why: str
    tests: frozenset[str]
    sometimes: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """The tests of a run, by what their outcomes mean."""

    passed: Sequence[str]
    skipped: Sequence[str]
    different: Sequence[str]
    """They fail, and are documented."""
    failed: Sequence[str]
    """They fail, and are not documented."""
    mended: Sequence[str]
    """They pass, and are documented as failing."""
    missing: Sequence[str]
    """They are documented, and did not run."""

    @property
    def holds(self) -> bool:
        """Whether something passed, and nothing failed that is not documented."""
        return bool(self.passed) and not self.failed


def verdict(outcomes: Outcomes, differences: Iterable[Difference]) -> Verdict:
    """Compare a run with what is documented."""
    known = {test: each for each in differences for test in each.tests}
    ran = [each for each, outcome in outcomes.items() if outcome is not Outcome.SKIPPED]
    passed = [each for each in ran if outcomes[each] is Outcome.PASSED]
    failed = [each for each in ran if outcomes[each] is Outcome.FAILED]
    return Verdict(
        passed=passed,
        skipped=[each for each in outcomes if outcomes[each] is Outcome.SKIPPED],
        different=[each for each in failed if each in known],
        failed=[each for each in failed if each not in known],
        mended=[each for each in passed if each in known and not known[each].sometimes],
        missing=sorted(known.keys() - set(ran)),
    )


def differences_of(record: Sequence[Mapping[str, Any]]) -> list[Difference]:
    """From JSON. Raises ValueError if a test has two reasons."""
    found = [
        Difference(each["why"], frozenset(each["tests"]), each.get("sometimes", False))
        for each in record
    ]
    if sum(len(each.tests) for each in found) != len({t for each in found for t in each.tests}):
        raise ValueError("a test is documented twice")
    return found


def of_junit(*reports: str) -> dict[str, Outcome]:
    """The outcomes in reports of pytest or of Maven's Surefire: the last of a test that ran again,
    which the suite itself asks for.
    """
    return dict(each for report in reports for each in _junit_cases(report))


def _junit_cases(report: str) -> Iterator[tuple[str, Outcome]]:
    for case in ElementTree.fromstring(report).iter("testcase"):
        inside = {each.tag for each in case}
        name = f"{module_and_class(case.get('classname', ''))}.{case.get('name', '')}"
        if inside & {"failure", "error"}:
            yield name.removesuffix("()"), Outcome.FAILED
        else:
            yield (
                name.removesuffix("()"),
                Outcome.SKIPPED if "skipped" in inside else Outcome.PASSED,
            )


def module_and_class(path: str) -> str:
    """The end of a dotted path that begins with a module of tests, or else the class alone.

    >>> module_and_class("t.integration.test_canvas.test_chain")
    'test_canvas.test_chain'
    >>> module_and_class("org.apache.rocketmq.broker.simple.SimpleAckTest")
    'SimpleAckTest'
    """
    parts = path.split(".")
    first = next((at for at, each in enumerate(parts) if each.startswith("test_")), len(parts) - 1)
    return ".".join(parts[first:])


def of_go(lines: Iterable[str]) -> dict[str, Outcome]:
    """The outcomes in the output of `go test -json`. A package that did not end counts as a failed
    test of its name.
    """
    ends = {"pass": Outcome.PASSED, "fail": Outcome.FAILED, "skip": Outcome.SKIPPED}
    found: dict[str, Outcome] = {}
    for line in lines:
        event = json.loads(line) if line.startswith("{") else {}
        name = event.get("Package", "").rpartition("/")[2]
        action = event.get("Action")
        if "Test" in event:
            name = f"{name}.{event['Test']}"
            if action == "run":
                found[name] = Outcome.FAILED
        elif action == "fail" and not any(
            each.startswith(f"{name}.") and outcome is Outcome.FAILED
            for each, outcome in found.items()
        ):
            found[name] = Outcome.FAILED
        if "Test" in event and action in ends:
            found[name] = ends[action]
    return found
