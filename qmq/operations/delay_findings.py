"""Findings about delay groups: late or impossible deliveries. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from qmq.operations.cluster_snapshot import ClusterSnapshot, DelayGroupFacts
from qmq.operations.finding import Finding, FindingKind, Severity, Thresholds, counted, in_words

DELAY_BEHIND: Final = FindingKind(
    "delay-behind",
    "Delayed messages are delivered after their due time: brokers answer slowly, or more messages are due than can be delivered.",
)
DELAY_TROUBLE: Final = FindingKind(
    "delay-trouble", "The messages are due and have to wait. They are not lost, and are delivered when the cause is removed."
)
_STATS: Final = "qmq delay stats"


def delay_findings(now: ClusterSnapshot, previous: ClusterSnapshot | None, limits: Thresholds) -> Iterator[Finding]:
    """Findings about the delay groups that answered."""
    before = {} if previous is None else {each.group: each for each in previous.delay_groups}
    for each in now.delay_groups:
        what = _lateness(each, before.get(each.group), limits)
        if what:
            yield Finding(DELAY_BEHIND, Severity.WARNING, f"delay group {each.group}", what, _STATS)
        for trouble in each.troubles:
            reason = f"{counted(trouble.waiting, 'due message')} cannot be delivered: {trouble.reason}"
            yield Finding(DELAY_TROUBLE, Severity.WARNING, f"delayed messages of {trouble.subject}", reason, _STATS)


def _lateness(group: DelayGroupFacts, before: DelayGroupFacts | None, limits: Thresholds) -> str:
    """The lateness in words; empty if deliveries are on time."""
    if group.lateness_p99_ms > limits.lateness_ms:
        return f"delivers late: one message in a hundred by {in_words(group.lateness_p99_ms)} or more in the last minute"
    if 0 < group.horizon_ms < group.time_ms - limits.lateness_ms:
        return f"loads its schedule {in_words(group.time_ms - group.horizon_ms)} behind the clock"
    if before is not None and 0 < before.waiting <= group.waiting and group.delivered <= before.delivered:
        return f"delivers nothing, although it has {counted(group.waiting, 'due message')}"
    return ""
