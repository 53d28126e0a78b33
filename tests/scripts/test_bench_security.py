"""What scripts/bench/security.py makes of few messages and short rounds."""

from __future__ import annotations

from bench import security as bench_security


def test_a_few_messages_are_measured_as_one_batch() -> None:
    assert [bench_security.batches(count, size) for count, size in ((1, 100), (1_999, 1_024), (200_000, 100))] == [1, 1, 100]


def test_rounds_that_took_no_measurable_time_have_no_ratio() -> None:
    assert bench_security.ratio([1.0, 4.0, 9.0], [1.0, 2.0, 0.0]) == "1.50"
    assert bench_security.ratio([1.0, 2.0], [0.0, 0.0]) == "-"
