"""Lateness of the last minute, against numpy's percentile."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from qmq.delay.plan_log import Lateness


def test_figures_are_about_the_last_minute_and_the_total_about_all() -> None:
    lateness = Lateness()
    assert (lateness.percentile(0, 50), lateness.percentile(0, 99), lateness.delivered) == (0, 0, 0)
    lateness.note(5_000, np.full(100, 900))
    lateness.note(30_000, np.arange(1, 101))
    assert (lateness.percentile(59_999, 50), lateness.percentile(59_999, 99)) == (100, 900)
    assert (
        lateness.percentile(60_000, 50),
        lateness.percentile(60_000, 99),
        lateness.delivered,
    ) == (50, 99, 200)
    lateness.note(65_000, np.array([7]))  # its slot had the first ones
    assert (
        lateness.percentile(65_000, 100),
        lateness.percentile(95_000, 50),
        lateness.percentile(125_000, 50),
    ) == (
        100,
        7,
        0,
    )


def test_early_by_another_clock_counts_as_on_time() -> None:
    lateness = Lateness()
    lateness.note(0, np.array([-5, -1]))
    assert (lateness.percentile(0, 99), lateness.delivered) == (0, 2)


@given(st.lists(st.integers(0, 1 << 39), min_size=1, max_size=50), st.integers(1, 100))
def test_a_figure_is_exact_to_a_second_and_at_most_two_per_mille_too_high(
    values: list[int], percent: int
) -> None:
    lateness = Lateness()
    lateness.note(0, np.array(values, np.int64))
    exact = int(np.percentile(values, percent, method="inverted_cdf"))
    found = lateness.percentile(0, percent)
    assert exact <= found <= exact + exact // 512
