"""Alerts, dashboards, docs/METRICS.md and runbooks: their metrics exist, their queries are valid,
and each alert says what to do.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import needs

from qmq.metrics.figures import HISTOGRAM
from qmq.node.metrics.serving import figures_by_role

ROOT = Path(__file__).resolve().parents[2]
PROMETHEUS = ROOT / "deploy" / "prometheus"
GRAFANA = ROOT / "deploy" / "grafana"
sys.path.append(str(ROOT / "tools"))

import dashboards  # noqa: E402

BY_PROMETHEUS = {"le", "instance", "job", "service"}
BY_PROCESS = {"process_cpu_seconds_total", "process_resident_memory_bytes", "up", "ALERTS"}
VARIABLES = {"$__rate_interval": "1m", "$subject": ".*", "$group": ".*", "$broker_group": ".*"}


def load(name: str) -> Any:
    return yaml.safe_load((PROMETHEUS / name).read_text())


def rules(name: str) -> list[dict[str, Any]]:
    return [rule for group in load(name)["groups"] for rule in group["rules"]]


ALERTS = {rule["alert"]: rule for rule in rules("alerts.yml")}
BOARDS = {
    path.stem: json.loads(path.read_text())
    for path in sorted((GRAFANA / "dashboards").glob("*.json"))
}
PANELS = [
    (name, panel)
    for name, board in BOARDS.items()
    for panel in board["panels"]
    if panel["type"] != "row"
]
QUERIES = [target["expr"] for _, panel in PANELS for target in panel["targets"]]
PAGE = (ROOT / "docs" / "METRICS.md").read_text()
DOCUMENTED = [
    line.partition("#")[0].strip()
    for line in re.findall(r"^(?:sum|histogram_quantile).*", PAGE, re.MULTILINE)
]


def known_names() -> dict[str, set[str]]:
    """The labels of every name that a metric has in a query; of a histogram, its parts."""
    found: dict[str, set[str]] = {}
    for figure in (figure for figures in figures_by_role().values() for figure in figures):
        for suffix in ("_bucket", "_sum", "_count") if figure.kind == HISTOGRAM else ("",):
            found[figure.name + suffix] = set(figure.labels)
    return found


def metrics_in(query: str) -> set[str]:
    """The metrics in a query, without quoted text, braces, and lists of labels."""
    bare = re.sub(r'"[^"]*"', "", query)
    bare = re.sub(r"\b(?:by|on|without|ignoring)\s*\([^)]*\)", "", re.sub(r"\{[^}]*\}", "", bare))
    return set(re.findall(r"\b(?:qmq|process|python)_\w+|\bALERTS\b|\bup\b", bare))


@pytest.mark.parametrize(
    "query",
    [
        *[rule["expr"] for rule in [*ALERTS.values(), *rules("records.yml")]],
        *QUERIES,
        *DOCUMENTED,
    ],
)
def test_rules_dashboards_and_the_page_ask_for_metrics_and_labels_that_there_are(
    query: str,
) -> None:
    known = known_names()
    asked = metrics_in(query)
    assert asked
    assert asked <= known.keys() | BY_PROCESS
    labels = {label for name in asked & known.keys() for label in known[name]} | BY_PROMETHEUS
    named = {
        label.strip()
        for inside in re.findall(r"\b(?:by|on)\s*\(([^)]*)\)", query)
        for label in inside.split(",")
    }
    matched = {
        label
        for inside in re.findall(r"\{([^}]*)\}", query)
        for label in re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", inside)
    }
    assert named | matched <= labels | ({"alertname", "alertstate"} if "ALERTS" in asked else set())


def test_variables_of_dashboards_are_labels_of_metrics_that_there_are() -> None:
    for board in BOARDS.values():
        for variable in board["templating"]["list"]:
            if variable["type"] == "query":
                metric, label = re.fullmatch(
                    r"label_values\((\w+), (\w+)\)", variable["query"]
                ).groups()  # type: ignore[union-attr]
                assert label in known_names()[metric]


def test_every_alert_has_a_severity_a_sentence_and_a_runbook() -> None:
    assert len(ALERTS) == len(rules("alerts.yml"))
    for name, rule in ALERTS.items():
        assert set(rule["labels"]) == {"severity"}
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert set(rule["annotations"]) == {"summary", "runbook"}
        assert rule["annotations"]["summary"].endswith(".")
        assert rule["annotations"]["runbook"] == f"docs/RUNBOOKS.md#{name.lower()}"


def test_every_alert_has_a_section_that_says_what_it_means_and_what_to_do() -> None:
    page = (ROOT / "docs" / "RUNBOOKS.md").read_text()
    sections = re.findall(r"^## (\w+)\n\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    assert [name for name, _ in sections] == list(ALERTS)
    assert all(text.startswith("**Means.** ") and "\n\n**Do.**" in text for _, text in sections)


def test_labels_of_a_summary_are_those_that_the_alert_has() -> None:
    known = known_names()
    for name, rule in ALERTS.items():
        used = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        grouped = {
            label.strip()
            for inside in re.findall(r"\bby \(([^)]*)\)", rule["expr"])
            for label in inside.split(",")
        }
        own = {
            label for metric in metrics_in(rule["expr"]) & known.keys() for label in known[metric]
        } | BY_PROMETHEUS
        assert used <= (grouped or own), name


def test_every_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not() -> None:
    cases = load("tests.yml")["tests"]
    firing = [
        each["alert_rule_test"][0]["alertname"] for each in cases if each["name"].endswith(" fires")
    ]
    quiet = [
        each["alertname"]
        for case in cases
        for each in case["alert_rule_test"]
        if not each["exp_alerts"]
    ]
    assert firing == quiet == list(ALERTS)


def promtool(*words: str, folder: Path = PROMETHEUS) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [needs.find_promtool() or "promtool", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.sampled
@needs.promtool
@pytest.mark.parametrize(
    "words",
    [
        ("check", "rules", "alerts.yml", "records.yml"),
        ("check", "config", "prometheus.yml"),
        ("test", "rules", "tests.yml"),
    ],
    ids=" ".join,
)
def test_promtool_is_content(words: tuple[str, ...]) -> None:
    done = promtool(*words)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.sampled
@needs.promtool
def test_promtool_sees_an_alert_that_does_not_fire(tmp_path: Path) -> None:
    """Checks the checker: the test above can fail."""
    for name in ("records.yml", "tests.yml"):
        (tmp_path / name).write_text((PROMETHEUS / name).read_text())
    (tmp_path / "alerts.yml").write_text(
        (PROMETHEUS / "alerts.yml")
        .read_text()
        .replace("qmq_unflushed_age_seconds > 10", "qmq_unflushed_age_seconds > 99")
    )
    done = promtool("test", "rules", "tests.yml", folder=tmp_path)
    assert done.returncode == 1
    assert "QmqUnflushed" in done.stdout + done.stderr


@needs.promtool
def test_every_query_of_a_dashboard_is_promql(tmp_path: Path) -> None:
    found = []
    for number, query in enumerate(QUERIES):
        for name, value in VARIABLES.items():
            query = query.replace(name, value)
        assert "$" not in query
        found.append({"record": f"query:{number}", "expr": query})
    (tmp_path / "queries.yml").write_text(
        yaml.safe_dump({"groups": [{"name": "queries", "rules": found}]})
    )
    done = promtool("check", "rules", "queries.yml", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_dashboards_are_those_that_the_script_makes(tmp_path: Path) -> None:
    dashboards.write(tmp_path)
    made = {path.name: path.read_text() for path in tmp_path.iterdir()}
    committed = {path.name: path.read_text() for path in (GRAFANA / "dashboards").iterdir()}
    assert made == committed, "run tools/dashboards.py"


@pytest.mark.parametrize("name", BOARDS)
def test_a_dashboard_is_one_that_grafana_can_show(name: str) -> None:
    board = BOARDS[name]
    assert board["uid"] == name
    assert board["schemaVersion"] >= 36
    assert board["templating"]["list"][0]["type"] == "datasource"
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        assert place["x"] >= 0 < place["w"]
        assert place["x"] + place["w"] <= dashboards.WIDTH
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, f"{panel['title']} lies over another panel"
        taken |= cells
        if panel["type"] != "row":
            assert panel["type"] in ("timeseries", "stat", "table")
            assert panel["title"]
            assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            assert (
                len({target["refId"] for target in panel["targets"]}) == len(panel["targets"]) > 0
            )


def test_prometheus_asks_every_role_of_the_compose_file_at_its_port() -> None:
    compose = (ROOT / "docker-compose.yml").read_text()
    (scrape,) = load("prometheus.yml")["scrape_configs"]
    targets = {each["labels"]["service"]: each["targets"] for each in scrape["static_configs"]}
    (port,) = re.findall(r"QMQ_METRICS_PORT: &metrics-port (\d+)", compose)
    for service, found in targets.items():
        assert found == [
            f"{name}:{port}"
            for name in re.findall(rf"^  ([\w-]+):\n    <<: \*{service}$", compose, re.MULTILINE)
        ]
    assert load("prometheus.yml")["rule_files"] == ["alerts.yml", "records.yml"]
    roles = re.findall(r"^  ([\w-]+):\n    <<: \*(?:meta|broker|delay)$", compose, re.MULTILINE)
    shown = re.findall(r"[\w-]+:\d+(?=[,\]])", "".join(re.findall(r"targets: (.*)", PAGE)))
    assert shown == [f"{name}:{port}" for name in roles], "the page shows others"


def test_monitoring_in_compose_is_valid_and_stays_on_this_machine() -> None:
    command = [
        str(Path(sys.executable).parent / "docker-compose"),
        "-f",
        "docker-compose.yml",
        "-f",
        "docker-compose.monitoring.yml",
        "config",
        "--format",
        "json",
    ]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    services = json.loads(done.stdout)["services"]
    for name in ("prometheus", "grafana"):
        assert [port["host_ip"] for port in services[name]["ports"]] == ["127.0.0.1"]
        binds = [each for each in services[name]["volumes"] if each["type"] == "bind"]
        assert binds
        assert all(Path(each["source"]).is_dir() and each["read_only"] for each in binds)
    source = yaml.safe_load(
        (GRAFANA / "provisioning" / "datasources" / "prometheus.yml").read_text()
    )["datasources"][0]
    assert source["url"] == "http://prometheus:9090"
    provider = yaml.safe_load((GRAFANA / "provisioning" / "dashboards" / "qmq.yml").read_text())[
        "providers"
    ][0]
    assert provider["options"]["path"] in [
        each["target"] for each in services["grafana"]["volumes"]
    ]
