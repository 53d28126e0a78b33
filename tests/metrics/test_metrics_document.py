"""docs/METRICS.md lists exactly the metrics that exist: table, queries, words. Alerts and dashboards: tests/deploy."""

from __future__ import annotations

import re
from pathlib import Path

from qmq.metrics.figures import HISTOGRAM
from qmq.node.metrics.serving import figures_by_role

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "METRICS.md").read_text()
ROW = re.compile(r"^\| `(qmq_\w+)` \| (\w+) \| ([\w, ]*) \| (.+) \| ([\w, ]+) \|$", re.MULTILINE)


def documented() -> dict[str, tuple[str, tuple[str, ...], str, frozenset[str]]]:
    rows = ROW.findall(TEXT)
    assert len({name for name, *_ in rows}) == len(rows), "a figure has one row"
    return {
        name: (kind, tuple(filter(None, labels.replace(" ", "").split(","))), meaning, frozenset(who.replace(" ", "").split(",")))
        for name, kind, labels, meaning, who in rows
    }


def test_the_table_has_every_figure_as_it_is_shown_and_nothing_else() -> None:
    shown = {
        figure.name: (figure.kind, figure.labels, figure.meaning, frozenset(role for role, all_of in roles if figure in all_of))
        for roles in [figures_by_role().items()]
        for _, figures in roles
        for figure in figures
    }
    assert documented() == shown


def test_queries_ask_for_figures_and_labels_that_there_are() -> None:
    known = documented()
    names = {
        f"{name}{suffix}"
        for name, (kind, *_) in known.items()
        for suffix in (("_bucket", "_sum", "_count") if kind == HISTOGRAM else ("",))
    }
    asked = set(re.findall(r"\bqmq_\w+", "\n".join(re.findall(r"^(?:sum|histogram_quantile).*", TEXT, re.MULTILINE))))
    assert asked
    assert asked <= names
    labels = {label for _, its, *_ in known.values() for label in its} | {"le", "instance"}
    for grouping in re.findall(r" by \(([^)]*)\)", TEXT):
        assert set(grouping.replace(" ", "").split(",")) <= labels


def test_prometheus_scrapes_every_role_of_the_compose_file() -> None:
    compose = (ROOT / "docker-compose.yml").read_text()
    targets = re.findall(r"[\w-]+:\d+(?=[,\]])", "".join(re.findall(r"targets: (.*)", TEXT)))
    roles = re.findall(r"^  ([\w-]+):\n    <<: \*(?:meta|broker|delay)$", compose, re.MULTILINE)
    (port,) = re.findall(r"QMQ_METRICS_PORT: &metrics-port (\d+)", compose)
    assert targets == [f"{name}:{port}" for name in roles]
