"""Rates between two snapshots, also where one of them is partial."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from snapshots import WELL, broker_group, changed, earlier, group, queue

from qmq.operations.snapshot import ClusterSnapshot, GroupProgress, SubjectFacts
from qmq.operations.snapshot_reading import ClusterRates, rates


def look(
    stored: int, done: int, *, at_ms: int = 0, subject: str = "flights", **fields: Any
) -> ClusterSnapshot:
    """A subject on g1 with so many messages, of which a group has done so many."""
    progress = (GroupProgress(0, "g1", done, stored - done, 2_000 if stored > done else 0),)
    return replace(
        WELL,
        monotonic_ms=WELL.monotonic_ms + at_ms,
        subjects=(SubjectFacts(subject, "", ("g1",), (queue("g1", stored),)),),
        groups=(group(subject, progress=progress),),
        **fields,
    )


def figures(found: ClusterRates) -> tuple[float | None, float | None]:
    return found.in_per_s, found.out_per_s


def test_rates_of_arrivals_and_completions_are_shown() -> None:
    found = rates(look(100, 40), look(300, 140, at_ms=2_000))
    assert figures(found) == (100.0, 50.0)
    (subject,), (consumers,) = found.subjects, found.groups
    assert subject.in_per_s == 100.0
    assert subject.out_per_s == 50.0
    assert subject.lag_messages == 160
    assert subject.lag_ms == 2_000
    assert subject.groups == 1
    assert (consumers.out_per_s, consumers.lag_messages, consumers.consumers) == (50.0, 160, 2)
    assert {each.broker_group: each.in_per_s for each in found.broker_groups} == {
        "g1": 100.0,
        "g2": 0.0,
        "d1": None,
    }
    assert found.over_ms == 2_000


def test_a_first_look_has_no_rates() -> None:
    found = rates(None, look(100, 40))
    assert figures(found) == (None, None)
    assert found.subjects[0].in_per_s is None
    assert found.groups[0].lag_messages == 60
    assert figures(rates(look(0, 0), look(100, 40))) == (None, None), "at the same moment"


def test_a_subject_that_was_made_again_counts_nothing_and_not_less() -> None:
    assert figures(rates(look(100, 100), look(5, 0, at_ms=1_000))) == (0.0, 0.0)


def test_a_new_subject_counts_from_zero_and_a_new_group_not_at_all() -> None:
    assert figures(rates(look(9, 9, subject="other"), look(7, 3, at_ms=1_000))) == (7.0, 0.0)


def test_a_broker_group_that_falls_silent_or_returns_causes_no_burst() -> None:
    away = changed(
        subjects=(SubjectFacts("flights", "", ("g1",), ()),), groups=(), silent={"g1": "no master"}
    )
    assert figures(rates(earlier(away), look(1_000_000, 0))) == (0.0, 0.0)
    assert figures(rates(earlier(look(1_000, 0)), away)) == (0.0, 0.0)
    refused = changed(subjects=(), groups=(), missing={"subjects": "timed out"})
    assert figures(rates(earlier(refused), look(1_000_000, 0))) == (0.0, 0.0)


def test_the_fullest_disk_of_a_broker_group_is_reported() -> None:
    (g1,) = rates(None, changed(broker_groups=(broker_group("g1"),))).broker_groups
    assert (g1.replicas, g1.answering, g1.disk_free_bytes) == (3, 3, 500 << 30)


@given(st.integers(0, 10**9), st.integers(0, 10**6), st.integers(1, 10**6))
def test_rates_times_time_is_what_came(stored: int, more: int, over_ms: int) -> None:
    found = rates(look(stored, 0), look(stored + more, 0, at_ms=over_ms))
    assert found.in_per_s is not None
    assert round(found.in_per_s * over_ms / 1000) == more
