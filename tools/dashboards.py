"""Grafana dashboards, made from the rows below. tests/deploy compares the committed files with what
this writes.

python tools/dashboards.py            writes deploy/grafana/dashboards/*.json
python tools/dashboards.py FOLDER     writes them there
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

FOLDER: Final = Path(__file__).resolve().parents[1] / "deploy" / "grafana" / "dashboards"
WIDTH: Final = 24
HEIGHT: Final = 8
SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
GROUP: Final = 'subject=~"$subject", group=~"$group"'
KEPT: Final = (
    'sum by (subject) (qmq_kept_messages{subject=~"$subject"} * on (broker_group, instance) '
    "group_left qmq_serving)"
)
AWAY: Final = (
    "sum(max by (broker_group) (qmq_broker_group_voters) - max by (broker_group) "
    "(qmq_broker_group_present_replicas))"
)
WON: Final = '{role="master", broker_group=~"$broker_group"}'


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel. `queries` are expressions with their legends; `unit` is Grafana's; `kind`
    timeseries, stat or table.
    """

    title: str
    queries: tuple[tuple[str, str], ...]
    unit: str = "short"
    kind: str = "timeseries"
    about: str = ""
    warn_above: float | None = None
    """The value turns orange above it."""


@dataclass(frozen=True, slots=True)
class Dashboard:
    """`variables` by name: the metric and the label that they are taken from."""

    uid: str
    title: str
    variables: tuple[tuple[str, str, str], ...]
    rows: tuple[tuple[str, tuple[Panel, ...]], ...]


def quantile(of: str, metric: str, by: str) -> str:
    """The query of a quantile of a histogram."""
    return f"histogram_quantile({of}, sum by (le, {by}) (rate({metric}_bucket[$__rate_interval])))"


def rate(metric: str, by: str, where: str = "") -> str:
    """The query of a counter's rate."""
    return f"sum by ({by}) (rate({metric}{'{' + where + '}' if where else ''}[$__rate_interval]))"


CLUSTER: Final = Dashboard(
    "qmq-cluster",
    "QMQ: is all well?",
    (),
    (
        (
            "Now",
            (
                Panel(
                    "Alerts",
                    (
                        (
                            'count(ALERTS{alertname=~"Qmq.*", alertstate="firing"}) or vector(0)',
                            "firing",
                        ),
                    ),
                    kind="stat",
                    warn_above=1,
                ),
                Panel(
                    "Broker groups without a master",
                    (
                        (
                            (
                                "count(min by (broker_group) (qmq_broker_group_has_master) == 0) "
                                "or vector(0)"
                            ),
                            "",
                        ),
                    ),
                    kind="stat",
                    warn_above=1,
                ),
                Panel(
                    "Replicas away",
                    (
                        (
                            AWAY,
                            "",
                        ),
                    ),
                    kind="stat",
                    warn_above=1,
                ),
                Panel(
                    "Oldest waiting message",
                    (('max(qmq_group_lag_seconds{group!="qmq-dlq"})', ""),),
                    "s",
                    "stat",
                    warn_above=300,
                ),
                Panel(
                    "Dead letters",
                    (('sum(qmq_group_lag_messages{group="qmq-dlq"})', ""),),
                    kind="stat",
                    about="Neither replayed nor purged.",
                ),
                Panel(
                    "Parked keys", (("sum(qmq_group_parked_keys)", ""),), kind="stat", warn_above=1
                ),
            ),
        ),
        (
            "Flow",
            (
                Panel(
                    "Messages in",
                    ((rate("qmq_stored_messages_total", "broker_group"), "{{broker_group}}"),),
                    "cps",
                ),
                Panel(
                    "Messages out",
                    ((rate("qmq_pulled_messages_total", "broker_group"), "{{broker_group}}"),),
                    "cps",
                ),
                Panel(
                    "Bytes in",
                    ((rate("qmq_stored_bytes_total", "broker_group"), "{{broker_group}}"),),
                    "Bps",
                ),
                Panel(
                    "Waiting messages",
                    (
                        (
                            'sum by (broker_group) (qmq_group_lag_messages{group!="qmq-dlq"})',
                            "{{broker_group}}",
                        ),
                    ),
                ),
            ),
        ),
        (
            "Waiting",
            (
                Panel(
                    "Time to commit, p99",
                    ((quantile("0.99", "qmq_commit_seconds", "broker_group"), "{{broker_group}}"),),
                    "s",
                    about="From written by the master to committed by a majority.",
                ),
                Panel(
                    "Refused requests",
                    (
                        (
                            rate("qmq_refused_requests_total", "broker_group, error"),
                            "{{broker_group}} {{error}}",
                        ),
                    ),
                    "cps",
                ),
                Panel(
                    "Delayed messages late by, p99",
                    (
                        (
                            quantile("0.99", "qmq_delay_lateness_seconds", "broker_group"),
                            "{{broker_group}}",
                        ),
                    ),
                    "s",
                ),
                Panel(
                    "Delayed messages",
                    (
                        (
                            "sum by (broker_group) (qmq_delay_pending_messages)",
                            "{{broker_group}} pending",
                        ),
                        (
                            "sum by (broker_group) (qmq_delay_waiting_messages)",
                            "{{broker_group}} due",
                        ),
                    ),
                ),
            ),
        ),
    ),
)

SUBJECTS: Final = Dashboard(
    "qmq-subjects",
    "QMQ: subjects and groups",
    (("subject", "qmq_kept_messages", "subject"), ("group", "qmq_group_lag_messages", "group")),
    (
        (
            "Subjects",
            (
                Panel(
                    "In",
                    (
                        (
                            rate("qmq_stored_messages_total", "subject", 'subject=~"$subject"'),
                            "{{subject}}",
                        ),
                    ),
                    "cps",
                ),
                Panel(
                    "Bytes in",
                    (
                        (
                            rate("qmq_stored_bytes_total", "subject", 'subject=~"$subject"'),
                            "{{subject}}",
                        ),
                    ),
                    "Bps",
                ),
                Panel(
                    "Kept messages",
                    (
                        (
                            KEPT,
                            "{{subject}}",
                        ),
                    ),
                    about="Of the masters: every replica keeps the same.",
                ),
                Panel(
                    "Route version",
                    (('max by (subject) (qmq_route_version{subject=~"$subject"})', "{{subject}}"),),
                    about="Of ordered subjects. It rises with each split, merge and move.",
                ),
            ),
        ),
        (
            "Groups",
            (
                Panel(
                    "Lag in messages",
                    (
                        (
                            f"sum by (subject, group) (qmq_group_lag_messages{{{GROUP}}})",
                            "{{group}} of {{subject}}",
                        ),
                    ),
                ),
                Panel(
                    "Lag in seconds",
                    (
                        (
                            f"max by (subject, group) (qmq_group_lag_seconds{{{GROUP}}})",
                            "{{group}} of {{subject}}",
                        ),
                    ),
                    "s",
                ),
                Panel(
                    "Out",
                    (
                        (
                            rate("qmq_pulled_messages_total", "subject, group", GROUP),
                            "{{group}} of {{subject}}",
                        ),
                    ),
                    "cps",
                ),
                Panel(
                    "Acknowledged",
                    (
                        (
                            rate("qmq_acked_messages_total", "subject, group", GROUP),
                            "{{group}} of {{subject}}",
                        ),
                    ),
                    "cps",
                ),
                Panel(
                    "Failed",
                    (
                        (
                            rate("qmq_nacked_messages_total", "subject, group", GROUP),
                            "{{group}} of {{subject}}",
                        ),
                    ),
                    "cps",
                ),
                Panel(
                    "Tried again",
                    (
                        (
                            rate("qmq_retried_messages_total", "subject, group", GROUP),
                            "{{group}} of {{subject}}",
                        ),
                    ),
                    "cps",
                ),
                Panel(
                    "Consumers",
                    (
                        (
                            f"sum by (subject, group) (qmq_group_consumers{{{GROUP}}})",
                            "{{group}} of {{subject}}",
                        ),
                    ),
                ),
                Panel(
                    "Unacknowledged",
                    (
                        (
                            f"sum by (subject, group) (qmq_group_unacked_messages{{{GROUP}}})",
                            "{{group}} of {{subject}}",
                        ),
                    ),
                ),
                Panel(
                    "Died",
                    (
                        (
                            rate("qmq_dead_messages_total", "subject, group", GROUP),
                            "{{group}} of {{subject}}",
                        ),
                    ),
                    "cps",
                ),
                Panel(
                    "Parked keys",
                    (
                        (
                            f"sum by (subject, group) (qmq_group_parked_keys{{{GROUP}}})",
                            "{{group}} of {{subject}}",
                        ),
                    ),
                ),
            ),
        ),
    ),
)

SERVERS: Final = Dashboard(
    "qmq-servers",
    "QMQ: servers",
    (("broker_group", "qmq_epoch", "broker_group"),),
    (
        (
            "Replication",
            (
                Panel(
                    "Masters",
                    (
                        (
                            (
                                "max by (broker_group, instance) "
                                '(qmq_serving{broker_group=~"$broker_group"}) == 1'
                            ),
                            "{{broker_group}}: {{instance}}",
                        ),
                    ),
                ),
                Panel(
                    "Entries behind the master",
                    (
                        (
                            (
                                "max by (broker_group, replica) "
                                '(qmq_replication_lag_entries{broker_group=~"$broker_group"})'
                            ),
                            "{{replica}}",
                        ),
                    ),
                ),
                Panel(
                    "Time to commit, p99",
                    ((quantile("0.99", "qmq_commit_seconds", "broker_group"), "{{broker_group}}"),),
                    "s",
                ),
                Panel(
                    "Elections won",
                    (
                        (
                            (
                                "sum by (broker_group) "
                                f"(increase(qmq_role_changes_total{WON}[$__rate_interval]))"
                            ),
                            "{{broker_group}}",
                        ),
                    ),
                ),
            ),
        ),
        (
            "Disks",
            (
                Panel(
                    "Free",
                    (
                        (
                            (
                                "min by (instance) "
                                '(qmq_disk_free_bytes{broker_group=~"$broker_group"})'
                            ),
                            "{{instance}}",
                        ),
                    ),
                    "bytes",
                ),
                Panel(
                    "Logs",
                    (
                        (
                            'sum by (instance) (qmq_log_bytes{broker_group=~"$broker_group"})',
                            "{{instance}}",
                        ),
                    ),
                    "bytes",
                ),
                Panel(
                    "Flushes, p99",
                    ((quantile("0.99", "qmq_flush_seconds", "instance"), "{{instance}}"),),
                    "s",
                ),
                Panel(
                    "Age of what is not flushed",
                    (
                        (
                            (
                                "max by (instance) "
                                '(qmq_unflushed_age_seconds{broker_group=~"$broker_group"})'
                            ),
                            "{{instance}}",
                        ),
                    ),
                    "s",
                ),
            ),
        ),
        (
            "Processes",
            (
                Panel(
                    "CPU",
                    (
                        (
                            'rate(process_cpu_seconds_total{job="qmq"}[$__rate_interval])',
                            "{{instance}}",
                        ),
                    ),
                    "percentunit",
                ),
                Panel(
                    "Memory",
                    (('process_resident_memory_bytes{job="qmq"}', "{{instance}}"),),
                    "bytes",
                ),
                Panel("Connections", (("sum by (instance) (qmq_connections)", "{{instance}}"),)),
                Panel(
                    "Coordination store silent for",
                    (("max by (instance) (qmq_coordination_silent_seconds)", "{{instance}}"),),
                    "s",
                ),
                Panel(
                    "Metaserver requests",
                    ((rate("qmq_meta_requests_total", "method"), "{{method}}"),),
                    "cps",
                ),
                Panel(
                    "Metaserver answers, p99",
                    ((quantile("0.99", "qmq_meta_request_seconds", "instance"), "{{instance}}"),),
                    "s",
                ),
                Panel(
                    "Access refusals",
                    ((rate("qmq_access_refusals_total", "instance"), "{{instance}}"),),
                    "cps",
                ),
                Panel(
                    "Certificates end in",
                    (("min by (instance) (qmq_certificate_expires_seconds)", "{{instance}}"),),
                    "s",
                ),
            ),
        ),
    ),
)

DASHBOARDS: Final = (CLUSTER, SUBJECTS, SERVERS)


def panel_json(panel: Panel, number: int, x: int, y: int, width: int) -> dict[str, Any]:
    """A panel as Grafana reads it."""
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    if panel.warn_above is not None:
        steps.append({"color": "orange", "value": panel.warn_above})
    targets = [
        {
            "datasource": SOURCE,
            "expr": query,
            "legendFormat": legend or "__auto",
            "refId": chr(ord("A") + place),
            "instant": panel.kind == "stat",
        }
        for place, (query, legend) in enumerate(panel.queries)
    ]
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.about,
        "datasource": SOURCE,
        "gridPos": {"x": x, "y": y, "w": width, "h": HEIGHT if panel.kind != "stat" else 4},
        "fieldConfig": {
            "defaults": {
                "unit": panel.unit,
                "min": 0,
                "thresholds": {"mode": "absolute", "steps": steps},
            },
            "overrides": [],
        },
        "options": {"tooltip": {"mode": "multi", "sort": "desc"}}
        if panel.kind == "timeseries"
        else {"reduceOptions": {"calcs": ["lastNotNull"]}},
        "targets": targets,
    }


def dashboard_json(dashboard: Dashboard) -> dict[str, Any]:
    """A dashboard as Grafana reads it: panels in rows, two or six beside each other."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in dashboard.rows:
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": title,
                "collapsed": False,
                "gridPos": {"x": 0, "y": y, "w": WIDTH, "h": 1},
                "panels": [],
            }
        )
        y += 1
        beside = 6 if row[0].kind == "stat" else 2
        width = WIDTH // beside
        for place, panel in enumerate(row):
            column = place % beside
            if column == 0 and place:
                y += panels[-1]["gridPos"]["h"]
            panels.append(panel_json(panel, len(panels) + 1, column * width, y, width))
        y += panels[-1]["gridPos"]["h"]
    source = {
        "name": "datasource",
        "type": "datasource",
        "query": "prometheus",
        "label": "Prometheus",
        "hide": 0,
    }
    variables = [
        {
            "name": name,
            "label": name.replace("_", " "),
            "type": "query",
            "datasource": SOURCE,
            "query": f"label_values({metric}, {label})",
            "definition": f"label_values({metric}, {label})",
            "refresh": 2,
            "sort": 1,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"text": "All", "value": "$__all"},
        }
        for name, metric, label in dashboard.variables
    ]
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "tags": ["qmq"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [source, *variables]},
        "links": [{"title": "QMQ", "type": "dashboards", "tags": ["qmq"], "asDropdown": False}],
        "panels": panels,
    }


def write(folder: Path) -> None:
    """Write all of them into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for each in DASHBOARDS:
        (folder / f"{each.uid}.json").write_text(json.dumps(dashboard_json(each), indent=1) + "\n")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
