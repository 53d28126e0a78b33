"""What simulated and real clusters do with an ordered subject are behaviours of the specification;
planted bugs and events are not.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Final

import pytest
from ordersim.bugs import BUGS
from ordersim.tracer import (
    Changed,
    Fenced,
    Granted,
    Handled,
    Inherited,
    Moved,
    Observation,
    Released,
    Sealed,
    Settled,
    Stored,
)
from specs.model_checker import check_trace, is_there
from specs.ordering_traces import (
    NEEDS,
    REFUSED_AT,
    check_observations,
    check_ordering_seed,
    ordering_lines,
    traced,
)
from support import forms

pytestmark = [
    pytest.mark.long,
    pytest.mark.sampled,
    pytest.mark.skipif(not is_there(), reason="needs Java, and TLC: scripts/judges"),
]

EARLY: Final = (
    "publish before the sources are sealed",
    "prepare a change without comparing the latest version",
)
"""Those that are refused soon."""
EXTRA_SEEDS: Final = 20
"""When the code changes, so do the traces: from its remembered seed on, a bug may take so many
more.
"""
LINES: Final = 800
SEED: Final = 38
"""A run with several changes, consumers that lose lanes, and a parked key."""

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
    late = next(
        each for each in found if isinstance(each, Stored) and each.partition != seal.partition
    )
    return [
        *found[: at + 1],
        replace(late, partition=seal.partition, sequence=seal.sequence + 1),
        *found[at + 1 :],
    ]


def with_a_message_stored_twice(found: Observations) -> Observations:
    at, first = next((at, each) for at, each in enumerate(found) if isinstance(each, Stored))
    return [*found[: at + 1], replace(first, sequence=first.sequence + 1), *found[at + 1 :]]


def with_a_message_that_no_handler_got(found: Observations) -> Observations:
    unseen = next(each for each in found if isinstance(each, Handled))
    where = (unseen.partition, unseen.sequence)
    return [
        each
        for each in found
        if not isinstance(each, Handled) or (each.partition, each.sequence) != where
    ]


def with_a_lane_of_two_consumers(found: Observations) -> Observations:
    at, grant = next((at, each) for at, each in enumerate(found) if isinstance(each, Granted))
    return [*found[: at + 1], Granted(grant.partition, grant.range, "another"), *found[at + 1 :]]


def with_a_verdict_of_a_lost_lane(found: Observations) -> Observations:
    at, verdict = next((at, each) for at, each in enumerate(found) if isinstance(each, Settled))
    return [*found[:at], Released(verdict.partition, verdict.token), *found[at:]]


def with_a_parked_key_left_behind(found: Observations) -> Observations:
    return [each for each in found if not isinstance(each, Inherited)]


def with_a_fence_while_there_is_a_master(found: Observations) -> Observations:
    at, change = next(
        (at, each.change) for at, each in enumerate(found) if isinstance(each, Changed)
    )
    return [*found[: at + 1], Fenced(change.sources[0], 0, is_led=True), *found[at + 1 :]]


@pytest.mark.parametrize(
    "plant",
    [
        without_a_seal,
        with_a_message_behind_its_seal,
        with_a_message_stored_twice,
        with_a_message_that_no_handler_got,
        with_a_lane_of_two_consumers,
        with_a_verdict_of_a_lost_lane,
        with_a_parked_key_left_behind,
        with_a_fence_while_there_is_a_master,
    ],
)
def test_a_run_with_a_planted_event_is_refused(
    plant: Callable[[Observations], Observations], tmp_path: Path
) -> None:
    found = ordering_lines(plant(list(a_run())))
    assert not check_trace("Ordering", found.constants, found.lines, tmp_path).is_accepted


def test_that_run_is_allowed_without_a_planted_event(tmp_path: Path) -> None:
    found = ordering_lines(a_run())
    assert {"Publish", "Revoke", "Advance", "Park", "Inherit"} <= {
        line["do"] for line in found.lines
    }
    assert check_trace("Ordering", found.constants, found.lines, tmp_path).is_accepted


def test_a_consumer_may_attach_late_to_a_partition_that_its_group_has_left(tmp_path: Path) -> None:
    run = a_run()
    moved = next(
        each
        for each in reversed(run)
        if isinstance(each, Moved)
        and all(piece.version > 1 for piece in each.group.frontier.pieces)
    )
    first = next(each for each in run if isinstance(each, Granted))
    late = [Released(first.partition, token) for token in range(1, 20)] + [
        Granted(first.partition, first.range, "late")
    ]
    at = run.index(moved) + 1
    found = ordering_lines([*run[:at], *late])
    assert found.lines[-1]["do"] == "Attach"
    assert check_trace("Ordering", found.constants, found.lines, tmp_path).is_accepted
    early = ordering_lines([*run[: run.index(first)], Granted(99, first.range, "early")])
    assert not check_trace("Ordering", early.constants, early.lines, tmp_path).is_accepted


def test_a_simulated_cluster_does_what_the_specification_allows(tmp_path: Path) -> None:
    for seed in random.Random(forms.SEED).sample(range(100_000), 3):
        verdict = check_ordering_seed(seed, 400, tmp_path / str(seed))
        assert verdict.is_accepted, (
            f"seed {seed}: line {verdict.taken + 1} of {verdict.lines}: {verdict.refused}"
        )


@pytest.mark.parametrize(
    "bug",
    [pytest.param(each, marks=[] if each in EARLY else pytest.mark.longest) for each in REFUSED_AT],
)
def test_what_a_planted_bug_does_is_refused(bug: str, tmp_path: Path) -> None:
    for seed in range(REFUSED_AT[bug], REFUSED_AT[bug] + EXTRA_SEEDS):
        own, found = (
            traced(seed, LINES, planted, NEEDS.get(bug)).found for planted in (None, BUGS[bug])
        )
        if found != own and not check_observations(found, tmp_path / f"{seed}").is_accepted:
            assert check_observations(own, tmp_path / f"own {seed}").is_accepted
            return
    pytest.fail(f"TLC allows what this bug does from seed {REFUSED_AT[bug]} on")
