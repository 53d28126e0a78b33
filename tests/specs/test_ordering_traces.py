"""What simulated and real clusters do with an ordered subject are behaviours of the specification; planted bugs and events are not."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Final

import forms
import pytest
from ordersim.bugs import BUGS
from ordersim.tracer import Granted, Handled, Observation, Released, Sealed, Settled, Stored

from specs.model_checker import is_there
from specs.ordering_trace import ordering_lines
from specs.ordering_traces import check_ordering_seed, traced
from specs.trace_checker import check_trace

pytestmark = [pytest.mark.long, pytest.mark.rotating, pytest.mark.skipif(not is_there(), reason="needs Java, and TLC: scripts/judges")]

REFUSED_AT: Final = {
    "publish before the sources are sealed": 1,
}
"""Planted bugs of the simulator, with a seed at which the specification does not allow what they do."""
SEED: Final = 12
"""A run with several changes, and consumers that lose lanes."""

Observations = list[Observation]


@cache
def a_run() -> tuple[Observation, ...]:
    """What is seen of a run that the specification allows."""
    return tuple(traced(SEED, 400).found)


def without_a_seal(found: Observations) -> Observations:
    seal = next(each for each in found if isinstance(each, Sealed))
    return [each for each in found if each is not seal]


def with_a_message_behind_its_seal(found: Observations) -> Observations:
    at = next(at for at, each in enumerate(found) if isinstance(each, Sealed))
    seal = found[at]
    assert isinstance(seal, Sealed)
    late = next(each for each in found if isinstance(each, Stored) and each.partition != seal.partition)
    return [*found[: at + 1], Stored(seal.partition, seal.sequence + 1, late.key, late.number), *found[at + 1 :]]


def with_a_message_stored_twice(found: Observations) -> Observations:
    at, first = next((at, each) for at, each in enumerate(found) if isinstance(each, Stored))
    return [*found[: at + 1], Stored(first.partition, first.sequence + 1, first.key, first.number), *found[at + 1 :]]


def with_a_message_that_no_handler_got(found: Observations) -> Observations:
    unseen = next(each for each in found if isinstance(each, Handled))
    where = (unseen.partition, unseen.sequence)
    return [each for each in found if not isinstance(each, Handled) or (each.partition, each.sequence) != where]


def with_a_lane_of_two_consumers(found: Observations) -> Observations:
    at, grant = next((at, each) for at, each in enumerate(found) if isinstance(each, Granted))
    return [*found[: at + 1], Granted(grant.partition, grant.range, "another"), *found[at + 1 :]]


def with_a_verdict_of_a_lost_lane(found: Observations) -> Observations:
    at, verdict = next((at, each) for at, each in enumerate(found) if isinstance(each, Settled))
    return [*found[:at], Released(verdict.partition, verdict.token), *found[at:]]


@pytest.mark.parametrize(
    "plant",
    [
        without_a_seal,
        with_a_message_behind_its_seal,
        with_a_message_stored_twice,
        with_a_message_that_no_handler_got,
        with_a_lane_of_two_consumers,
        with_a_verdict_of_a_lost_lane,
    ],
)
def test_a_run_with_a_planted_event_is_refused(plant: Callable[[Observations], Observations], tmp_path: Path) -> None:
    found = ordering_lines(plant(list(a_run())))
    assert not check_trace("Ordering", found.constants, found.lines, tmp_path).is_accepted


def test_that_run_is_allowed_without_a_planted_event(tmp_path: Path) -> None:
    found = ordering_lines(a_run())
    assert {"Publish", "Revoke", "Advance"} <= {line["do"] for line in found.lines}
    assert check_trace("Ordering", found.constants, found.lines, tmp_path).is_accepted


def test_a_simulated_cluster_does_what_the_specification_allows(tmp_path: Path) -> None:
    for seed in random.Random(forms.SEED).sample(range(100_000), 3):
        verdict = check_ordering_seed(seed, 400, tmp_path / str(seed))
        assert verdict.is_accepted, f"seed {seed}: line {verdict.taken + 1} of {verdict.lines}: {verdict.refused}"


@pytest.mark.parametrize(("bug", "seed"), REFUSED_AT.items())
def test_what_a_planted_bug_does_is_refused(bug: str, seed: int, tmp_path: Path) -> None:
    assert not check_ordering_seed(seed, 1_000, tmp_path, BUGS[bug]).is_accepted
