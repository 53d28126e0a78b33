"""The phases of a change: every pair of phase and event is either in the table or refused, and the
page has each step of the table.
"""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from qmq_ordering.changes import (
    TRANSITIONS,
    PhaseEvent,
    first_route,
    merge,
    step,
)
from qmq_ordering.routes import FENCED, Change, Phase

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "ORDERING.md"
PREPARED = merge(first_route(10, 2, ["a", "b"]), [1, 2], change_id="x")
FENCED_ONCE = replace(PREPARED, sealed={1: 17, 2: FENCED})


def in_phase(phase: Phase) -> Change:
    return replace(FENCED_ONCE, phase=phase)


def test_a_change_goes_through_its_phases_and_notes_when() -> None:
    change = step(PREPARED, PhaseEvent.SOURCE_SEALED, number=2, sequence=FENCED)
    change = step(change, PhaseEvent.SOURCE_SEALED, number=1, sequence=17)
    assert (change.phase, change.sealed) == (Phase.PREPARED, {1: 17, 2: FENCED})
    change = step(change, PhaseEvent.ALL_SEALED, now_ms=100)
    change = step(change, PhaseEvent.PUBLISHED, now_ms=105)
    change = step(change, PhaseEvent.EVERY_GROUP_ADVANCED, now_ms=900)
    assert change.phase is Phase.DONE
    assert change.times_ms == {"sealed": 100, "published": 105, "done": 900}
    assert Change.decode(change.encode()) == change


def test_every_pair_that_is_not_in_the_table_is_refused() -> None:
    for phase, event in product(Phase, PhaseEvent):
        following = TRANSITIONS.get((phase, event))
        if following is not None:
            assert step(in_phase(phase), event, number=2, sequence=5).phase is following
        else:
            with pytest.raises(AssertionError, match="cannot happen now"):
                step(in_phase(phase), event, number=2, sequence=5)


def test_nothing_is_published_while_a_source_is_open() -> None:
    half = step(PREPARED, PhaseEvent.SOURCE_SEALED, number=1, sequence=17)
    for phase, event in (
        (Phase.PREPARED, PhaseEvent.ALL_SEALED),
        (Phase.SEALED, PhaseEvent.PUBLISHED),
    ):
        with pytest.raises(AssertionError, match=r"sources \[2\] are not closed"):
            step(replace(half, phase=phase), event)


@pytest.mark.parametrize("phase", Phase)
def test_a_fenced_source_gets_its_sequence_whenever_its_broker_group_is_back(phase: Phase) -> None:
    assert step(in_phase(phase), PhaseEvent.SOURCE_SEALED, number=2, sequence=40).sealed == {
        1: 17,
        2: 40,
    }


@pytest.mark.parametrize("phase", Phase)
def test_asking_again_changes_nothing(phase: Phase) -> None:
    change = in_phase(phase)
    assert step(change, PhaseEvent.SOURCE_SEALED, number=1, sequence=17) is change
    assert step(change, PhaseEvent.SOURCE_SEALED, number=2, sequence=FENCED) is change


def test_a_fence_forgets_no_sequence_that_is_known() -> None:
    assert step(FENCED_ONCE, PhaseEvent.SOURCE_SEALED, number=1, sequence=FENCED) is FENCED_ONCE


def test_two_command_messages_in_one_partition_stop_everything() -> None:
    with pytest.raises(AssertionError, match="two command messages"):
        step(FENCED_ONCE, PhaseEvent.SOURCE_SEALED, number=1, sequence=18)


@pytest.mark.parametrize(("number", "sequence"), [(3, 5), (None, 5), (1, None), (1, -2)])
def test_what_no_broker_can_say_is_refused(number: int | None, sequence: int | None) -> None:
    with pytest.raises(AssertionError):
        step(PREPARED, PhaseEvent.SOURCE_SEALED, number=number, sequence=sequence)


@pytest.mark.parametrize("phase", [Phase.SEALED, Phase.PUBLISHED, Phase.DONE])
def test_a_source_is_not_closed_for_the_first_time_behind_the_seal(phase: Phase) -> None:
    with pytest.raises(AssertionError, match="never closed"):
        step(replace(PREPARED, phase=phase), PhaseEvent.SOURCE_SEALED, number=1, sequence=1)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(PhaseEvent), st.sampled_from([1, 2]), st.sampled_from([FENCED, 5])
        ),
        max_size=30,
    )
)
def test_a_phase_never_goes_back_and_what_is_known_stays_known(
    story: list[tuple[PhaseEvent, int, int]],
) -> None:
    """Events in any order, as metaservers that race would bring them: each is taken or refused."""
    order = list(Phase)
    change = PREPARED
    for event, number, sequence in story:
        before = change
        try:
            change = step(change, event, number=number, sequence=sequence)
        except AssertionError:
            continue
        assert order.index(change.phase) - order.index(before.phase) in (0, 1)
        assert all(
            change.sealed[number] == known or known == FENCED
            for number, known in before.sealed.items()
        )
        assert change.phase is Phase.PREPARED or change.sealed.keys() == {1, 2}


def test_the_page_has_each_step_in_its_diagram_and_in_its_table() -> None:
    found = re.search(
        r"<!-- phases:begin -->\n(.*?)\n<!-- phases:end -->", DOCUMENT.read_text(), re.DOTALL
    )
    assert found is not None, "docs/ORDERING.md has lost its marks"
    steps = {
        (phase.value, event.value, following.value)
        for (phase, event), following in TRANSITIONS.items()
    }
    drawn = re.findall(r"^    (\w+) --> (\w+): (.+)$", found[1], re.MULTILINE)
    assert {(phase, event, following) for phase, following, event in drawn} == steps
    rows = re.findall(r"^\| (\w+) \| ([^|]+) \| (\w+) \|", found[1], re.MULTILINE)
    assert set(rows) - {("phase", "event", "next")} == steps
