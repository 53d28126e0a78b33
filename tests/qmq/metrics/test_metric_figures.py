"""Figures: their names and words, as `promtool check metrics` would have them; and bins of
durations.
"""

from __future__ import annotations

import re

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from qmq.metrics.endpoint import Collector
from qmq.metrics.figures import COUNTER, GAUGE, HISTOGRAM, Durations, Figure, Reading, one
from qmq.node.metrics.serving import figures_by_role

FIGURES = {figure.name: figure for figures in figures_by_role().values() for figure in figures}
LABELS = {
    "broker_group",
    "subject",
    "group",
    "replica",
    "role",
    "kind",
    "log",
    "error",
    "method",
    "code",
    "order",
    "verdict",
    "language",
    "reader",
    "reason",
}
"""Allowed labels: none of them grows with consumers, clients or messages. Readers are as named as
groups are, and a broker remembers a hundred of a queue.
"""
NO_BASE_UNITS = r"_(milliseconds|ms|microseconds|minutes|hours|days|kilobytes|kib|mib|gib|megabytes|bits|percent)(_|$)"  # noqa: E501


@pytest.mark.parametrize("name", sorted(FIGURES))
def test_a_figure_is_named_as_prometheus_would_have_it(name: str) -> None:
    figure = FIGURES[name]
    assert re.fullmatch(r"qmq_[a-z][a-z0-9_]*[a-z0-9]", name)
    assert name.endswith("_total") == (figure.kind == COUNTER)
    assert not re.search(NO_BASE_UNITS, name)
    assert not re.search(
        r"_(count|sum|bucket|gauge|counter|histogram)$", name.removesuffix("_total")
    )
    assert figure.kind != HISTOGRAM or name.endswith("_seconds")
    assert set(figure.labels) <= LABELS
    assert len(set(figure.labels)) == len(figure.labels)
    assert figure.meaning[0].isupper() or figure.meaning[0].isdigit()
    assert re.fullmatch(r"[^\n|]*[^.\n|]\.", figure.meaning), (
        "one sentence or two, which fit into a table"
    )


def test_a_name_means_the_same_in_every_role() -> None:
    for figures in figures_by_role().values():
        assert all(FIGURES[figure.name] == figure for figure in figures)
        assert len({figure.name for figure in figures}) == len(figures)


def test_durations_fall_into_the_first_bin_that_is_not_below_them() -> None:
    durations = Durations((0.1, 1.0))
    for seconds in (0.05, 0.1, 0.2, 5.0):
        durations.note(seconds)
    assert durations.histogram() == ((0.1, 1.0), (2, 1, 1), pytest.approx(5.35))
    assert durations.count == 4


class _Things:
    """A source of one figure of each kind."""

    figures = (
        Figure("qmq_things_total", COUNTER, ("subject",), "Things."),
        Figure("qmq_thing_seconds", HISTOGRAM, (), "How long."),
        Figure("qmq_thing", GAUGE, (), "A thing."),
    )

    def __init__(self, subject: str) -> None:
        self._subject = subject

    def read(self):
        durations = Durations((0.5,))
        durations.note(0.25)
        yield Reading(self.figures[0], [((self._subject,), 7)])
        yield None
        yield one(self.figures[1], durations.histogram())
        yield one(self.figures[2], 1.5)


def test_an_applications_registry_shows_figures_of_two_sources_as_one_family() -> None:
    registry = CollectorRegistry()
    registry.register(Collector([_Things("a")]))
    with pytest.raises(ValueError, match="Duplicated"):
        registry.register(Collector([_Things("b")]))
    both = CollectorRegistry()
    both.register(Collector([_Things("a"), _Things('b"\\\n')]))
    text = generate_latest(both).decode()
    assert text.count("# TYPE qmq_things_total counter") == 1
    assert 'qmq_things_total{subject="a"} 7.0' in text
    assert 'qmq_things_total{subject="b\\"\\\\\\n"} 7.0' in text
    assert 'qmq_thing_seconds_bucket{le="0.5"} 1.0' in text
    assert 'qmq_thing_seconds_bucket{le="+Inf"} 1.0' in text
    assert "qmq_thing_seconds_sum 0.25" in text
