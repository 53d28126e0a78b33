"""The report of an order audit: from findings, by subject, to a headline, tables, plots and counterexamples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import reduce
from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - Spark's own name for them

from pyspark_qmq.jobs.order_checks import Findings
from pyspark_qmq.jobs.order_rules import RULES, Violation
from pyspark_qmq.jobs.order_words import describe
from pyspark_qmq.jobs.plot_data import Plot
from pyspark_qmq.jobs.report import Report, ReportTable
from qmq.clock import time_of

SHOWN_MAX: Final = 5
"""Counterexamples shown in full."""
BARS_MAX: Final = 60
_FACTS: Final = {
    "messages": "messages",
    "keys": "keys",
    "hashed_keys": "keys checked against the hash",
    "partitions": "partitions with messages",
    "versions": "route versions with messages",
    "producers": "producer streams",
    "replays": "in-order replays",
    "replayed_messages": "messages stored again by replays",
    "unfinished_replays": "replays given up, or continuing",
    "bent": "bent messages (best-effort)",
    "carried": "messages with another producer's id",
    "unjudged": "of these not judged by time",
}


def report(found: Mapping[str, Findings]) -> Report:
    """The report."""
    broken = {subject: each for subject, each in found.items() if each.counts}
    details = [each.violations.withColumn("subject", F.lit(subject)) for subject, each in broken.items()]
    return Report(
        "order_audit",
        headline(found),
        all(each.is_clean for each in found.values()),
        _facts(found),
        tuple(_tables(found)),
        tuple(plot for subject, each in found.items() for plot in _plots(subject, each)),
        "\n\n".join(counterexamples(found)),
        {"violations": reduce(DataFrame.unionByName, details)} if details else {},
    )


def headline(found: Mapping[str, Findings]) -> str:
    total = {name: sum(each.facts[name] for each in found.values()) for name in ("messages", "keys", "partitions", "versions")}
    looked = f"{total['messages']:,} messages of {total['keys']:,} keys, in {total['partitions']:,} partitions"
    looked += f" of {total['versions']:,} route versions"
    kinds: dict[str, int] = {}
    allowed = 0
    for each in found.values():
        for rule, count in each.counts.items():
            if rule in each.tolerated:
                allowed += count
            else:
                kinds[RULES[rule].kind] = kinds.get(RULES[rule].kind, 0) + count
    rest = f" ({allowed:,} out of order, as best-effort order allows)" if allowed else ""
    if kinds:
        return f"{', '.join(f'{count:,} {kind}' for kind, count in kinds.items())} among {looked}{rest}"
    by = ", ".join(sorted({each.by for each in found.values()}))
    return f"log order is sending order, judged by {by}, and no message follows a seal: {looked}{rest}"


def _facts(found: Mapping[str, Findings]) -> dict[str, object]:
    facts: dict[str, object] = {
        words: sum(each.facts[name] for each in found.values())
        for name, words in _FACTS.items()
        if any(name in each.facts for each in found.values())
    }
    by_clock = [pair for each in found.values() for pair in each.overtakings if not pair.is_certain]
    facts["targets that overtook their source according to masters' clocks only"] = len(by_clock)
    if by_clock:
        facts["by at most, ms"] = max(pair.by_ms for pair in by_clock)
    fenced = sum(len(_closed(each) - each.routes.sealed_at.keys()) for each in found.values())
    facts["fenced partitions whose command message is not there yet"] = fenced
    return facts | {"judged by": ", ".join(sorted({each.by for each in found.values()}))}


def _closed(found: Findings) -> set[int]:
    return {number for part in found.routes.partitions.values() for number in part.sources}


def _tables(found: Mapping[str, Findings]) -> Iterator[ReportTable]:
    rows = [
        (subject, RULES[rule].kind, rule, count, "allowed" if rule in each.tolerated else "", RULES[rule].says)
        for subject, each in found.items()
        for rule, count in each.counts.items()
    ]
    yield ReportTable("Violations", ("subject", "kind", "rule", "count", "best-effort", "what it is"), tuple(rows), "rules")
    names = ("messages", "keys", "partitions", "versions", "latest_version", "producers", "replayed_messages")
    shown = tuple((subject, *(each.facts[name] for name in names)) for subject, each in found.items())
    yield ReportTable("Subjects", ("subject", *(name.replace("_", " ") for name in names)), shown, "subjects")
    parts = [
        (subject, part.partition, part.broker_group, *_of_route(each, part.partition), part.messages, part.producers, part.first, part.last)
        for subject, each in found.items()
        for part in each.partitions
    ]
    columns = "subject|partition|broker group|version|logical partitions|closed at|messages|producers|first|last"
    yield ReportTable("Partitions", tuple(columns.split("|")), tuple(parts), "partitions")


def _of_route(found: Findings, number: int) -> tuple[object, ...]:
    part = found.routes.partitions.get(number)
    return (None, None, None) if part is None else (part.version, str(part.lps), found.routes.sealed_at.get(number))


def counterexamples(found: Mapping[str, Findings]) -> list[str]:
    """The first violation of each rule, in words."""
    told = [
        f"subject {subject}: {RULES[example.rule].kind}\n{describe(example, each.routes, each.by)}"
        for subject, each in found.items()
        for example in _one_of_each(each)
    ]
    return told[:SHOWN_MAX]


def _one_of_each(found: Findings) -> Iterator[Violation]:
    seen = set(found.tolerated)
    for each in found.examples:
        if each.rule not in seen:
            seen.add(each.rule)
            yield each


def _plots(subject: str, found: Findings) -> Iterator[Plot]:
    routes = found.routes.partitions
    parts = [each for each in found.partitions if each.partition in routes]
    if not parts:
        return
    counts: dict[int, float] = {}
    began: dict[int, int] = {}
    for each in sorted(parts, key=lambda each: routes[each.partition].version):
        version = routes[each.partition].version
        counts[version] = counts.get(version, 0.0) + each.messages
        began[version] = min(began.get(version, each.first_append_ms), each.first_append_ms)
    title = f"{subject}: messages, by the version that opened their partition"
    yield Plot(title, "bar", list(counts), {"messages": list(counts.values())}, "route version", "messages")
    times = sorted((at, version) for version, at in began.items())
    axis = [time_of(at) for at, _ in times]
    versions = {"version": [float(version) for _, version in times]}
    yield Plot(f"{subject}: first message of each route version", "line", axis, versions, "", "route version")
    largest = sorted(parts, key=lambda each: (-each.messages, each.place))[:BARS_MAX]
    sizes = {"messages": [float(each.messages) for each in largest]}
    names = [str(each.partition) for each in largest]
    yield Plot(f"{subject}: messages of the largest partitions", "bar", names, sizes, "partition", "messages")
