"""Finds the unusual states of a cluster: one function for `qmq doctor` and the console's first screen. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from qmq.operations import consumption_findings, delay_findings, server_findings
from qmq.operations.cluster_snapshot import ClusterSnapshot
from qmq.operations.finding import THRESHOLDS, Finding, FindingKind, Severity, Thresholds

KINDS: Final[tuple[FindingKind, ...]] = tuple(
    [
        each
        for module in (server_findings, consumption_findings, delay_findings)
        for each in vars(module).values()
        if isinstance(each, FindingKind)
    ]
)
"""All kinds of findings."""
MANY: Final = 5
"""The number of findings of one kind that are shown individually."""


def findings(snapshot: ClusterSnapshot, previous: ClusterSnapshot | None = None, limits: Thresholds = THRESHOLDS) -> tuple[Finding, ...]:
    """The findings, the worst first; empty if all is well. `previous` is an earlier snapshot of the same cluster, at least a second old.
    With it, findings say what grows and what stands still; kinds that need two snapshots (master-changed, lanes-unheld, messages-expired,
    dying-messages) are found only with it.
    """
    if not snapshot.is_reachable:
        return tuple(server_findings.metaserver_findings(snapshot, limits))
    found = [
        *server_findings.metaserver_findings(snapshot, limits),
        *server_findings.broker_group_findings(snapshot, previous, limits),
        *server_findings.machine_findings(snapshot, limits),
        *consumption_findings.subject_findings(snapshot, limits),
        *consumption_findings.group_findings(snapshot, previous, limits),
        *consumption_findings.dead_letter_findings(snapshot, previous, limits),
        *delay_findings.delay_findings(snapshot, previous, limits),
    ]
    return tuple(sorted(found, key=lambda each: (-each.severity, _place(each.kind), each.about)))


def _place(kind: FindingKind) -> int:
    return KINDS.index(kind)


def folded(found: Iterable[Finding], most: int = MANY) -> tuple[Finding, ...]:
    """The findings for a person: beyond `most` findings of one kind and severity, one line replaces the rest."""
    kept: list[Finding] = []
    counts: dict[tuple[str, Severity], int] = {}
    for each in found:
        key = (each.code, each.severity)
        counts[key] = counts.get(key, 0) + 1
        if counts[key] <= most:
            kept.append(each)
    result: list[Finding] = []
    for place, each in enumerate(kept):
        result.append(each)
        key = (each.code, each.severity)
        is_last = place + 1 == len(kept) or (kept[place + 1].code, kept[place + 1].severity) != key
        if is_last and counts[key] > most:
            more = f"{counts[key] - most:,} more"
            result.append(Finding(each.kind, each.severity, more, "likewise; --json lists them all", each.command))
    return tuple(result)


def worst(found: Iterable[Finding]) -> Severity | None:
    """The highest severity; None if nothing was found."""
    return max((each.severity for each in found), default=None)
