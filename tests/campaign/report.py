"""The report of a campaign, as a page and as JSON. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from campaign.values import CampaignTest
from campaign.verdict import Result

VERDICTS = ("pass", "fail", "no proof", "skipped", "error")


def never_met(tests: Mapping[str, CampaignTest], results: Sequence[Result]) -> dict[str, list[str]]:
    """Operations that were never answered, operations that were never answered while a fault
    lasted, and faults that never took effect: among those of the tests that ran.
    """
    ran = [tests[each.test] for each in results if each.verdict != "skipped"]
    answered = {name for each in results for name, ends in each.counts.items() if ends.get("ok")}
    wanted = {name for test in ran for name in test.workload.gates}
    under = {(tests[each.test].fault.name, name) for each in results for name in each.during}
    pairs = {(test.fault.name, name) for test in ran for name in test.workload.gates}
    struck = {name for each in results for name in each.strikes}
    return {
        "operations": sorted(wanted - answered),
        "faults": sorted({test.fault.name for test in ran} - struck),
        "operations under a fault": sorted(" under ".join(pair[::-1]) for pair in pairs - under),
    }


def as_json(tests: Mapping[str, CampaignTest], results: Sequence[Result]) -> dict[str, Any]:
    """Plain values."""
    return {
        "verdicts": dict(Counter(each.verdict for each in results)),
        "never met": never_met(tests, results),
        "tests": [each.to_json() for each in results],
    }


def as_page(tests: Mapping[str, CampaignTest], results: Sequence[Result]) -> str:
    """Markdown."""
    verdicts = Counter(each.verdict for each in results)
    summary = ", ".join(f"{verdicts[name]} {name}" for name in VERDICTS if verdicts[name])
    lines = [
        "# Campaign",
        "",
        f"{len(results)} tests: {summary}. {sum(each.seconds for each in results):,.0f} s.",
        "",
        "| test | verdict | s | seed | answered | doubtful | faults | answered under them |",
        "|---|---|---:|---:|---|---:|---:|---|",
        *map(_row, results),
        "",
        "## Never met",
        "",
        *(
            f"* {what}: {', '.join(names) or 'none'}"
            for what, names in never_met(tests, results).items()
        ),
    ]
    for each in results:
        if each.verdict in ("fail", "error", "no proof"):
            lines += ["", f"## {each.test}: {each.verdict}", "", *_why(each)]
    return "\n".join([*lines, ""])


def _row(each: Result) -> str:
    answered = _counts({name: ends.get("ok", 0) for name, ends in each.counts.items()})
    cells = (
        each.test,
        each.verdict,
        f"{each.seconds:.0f}",
        str(each.seed),
        answered,
        str(each.doubtful),
        str(sum(each.strikes.values())),
        _counts(each.during),
    )
    return f"| {' | '.join(cells)} |"


def _counts(found: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in found.items())


def _why(each: Result) -> Iterable[str]:
    if each.reason:
        yield f"* {each.reason}"
    yield from (f"* {gate}" for gate in each.unmet)
    yield from (f"* {name}: {count}" for name, count in each.found.items())
    if each.anomalies:
        yield from ("", "```", *each.anomalies, "```")
