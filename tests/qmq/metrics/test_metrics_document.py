"""The queries and the scrape configuration of docs/METRICS.md. Alerts and dashboards:
tests/deploy.
"""

from __future__ import annotations

import re
from pathlib import Path

from qmq.metrics.figures import HISTOGRAM
from qmq.node.metrics.serving import figures_by_role

ROOT = Path(__file__).resolve().parents[3]
TEXT = (ROOT / "docs" / "METRICS.md").read_text()


def test_queries_ask_for_figures_and_labels_that_there_are() -> None:
    figures = [figure for of_role in figures_by_role().values() for figure in of_role]
    names = {
        f"{figure.name}{suffix}"
        for figure in figures
        for suffix in (("_bucket", "_sum", "_count") if figure.kind == HISTOGRAM else ("",))
    }
    asked = set(
        re.findall(
            r"\bqmq_\w+",
            "\n".join(re.findall(r"^(?:sum|histogram_quantile).*", TEXT, re.MULTILINE)),
        )
    )
    assert asked
    assert asked <= names
    labels = {label for figure in figures for label in figure.labels} | {"le", "instance"}
    for grouping in re.findall(r" by \(([^)]*)\)", TEXT):
        assert set(grouping.replace(" ", "").split(",")) <= labels


def test_prometheus_scrapes_every_role_of_the_compose_file() -> None:
    compose = (ROOT / "docker-compose.yml").read_text()
    targets = re.findall(r"[\w-]+:\d+(?=[,\]])", "".join(re.findall(r"targets: (.*)", TEXT)))
    roles = re.findall(r"^  ([\w-]+):\n    <<: \*(?:meta|broker|delay)$", compose, re.MULTILINE)
    (port,) = re.findall(r"QMQ_METRICS_PORT: &metrics-port (\d+)", compose)
    assert targets == [f"{name}:{port}" for name in roles]
