"""Checks for each key that the log has the order of sending, across all versions of the route, and
reports counterexamples in words: the two messages, their locations, producers and times, and the
route changes between them.

The log is read up to its end at the start of the job, together with the routes of that time, so
messages written meanwhile have no effect. order_checks.py and order_rules.py describe the checks
and what each of them proves; in short:

    qmq spark order_audit --servers localhost:20880 --subject flights
        by the producers' clock
    qmq spark order_audit ... --by header:n --dense
        by a number that the application increments for each key: exact, and finds losses

Exit status 1 (findings) if there is a violation. Replays (docs/ORDERING.md, "Duplicates"), bent
messages of best-effort subjects, and targets that seem to overtake their source according to two
masters' clocks are reported as facts.

The job keeps about 200 bytes per message in Spark's storage, on disk if memory is not sufficient.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from typing import Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own name for them

from pyspark_qmq.jobs.job import main, not_negative, positive, queues_now, read_log, source_options
from pyspark_qmq.jobs.order_checks import COLUMNS, KEYS_MAX, Findings, audit, parse_by
from pyspark_qmq.jobs.order_rules import RULES, OrderPlace, Violation
from pyspark_qmq.jobs.report import Plot, Report, ReportTable, cell
from qmq.columns.model import QueueKey, RoutePartition, Routes, SourceQueue, Topology
from qmq.columns.offsets import to_json
from qmq.errors import InvalidArgument, OrderMismatch
from qmq.process.event_loop import time_of

_BIRTH_MS_MIN: Final = 1 << 40
"""Ids of real producers begin with a later creation time; smaller ids belong to Spark's sink."""

HINTS: Final[dict[str, str]] = {
    "stream_order": (
        "A broker takes batch n only after batch n - 1: keep these segments, and look at the "
        "master of that time."
    ),
    "id_order": "One client sent both, and it repeats unanswered messages in order: keep its log.",
    "time_order": (
        "Either the order was broken, or the sender's clock was set back, or several processes "
        "write this key and their clocks differ: then say by how much with --clock-ms. "
        "A number that the application counts (--by) tells them apart."
    ),
    "number_order": (
        "Consumers see the higher number first. If one process counts for each key, the order "
        "was broken."
    ),
    "stream_gap": (
        "Numbers of a producer's batches are missing: the batches were lost, or the log was read "
        "with a selection (tags, keys)."
    ),
    "sequence_gap": (
        "Messages are missing. A power cut may leave such a gap where consumers had seen what the "
        "disk then lost (docs/CONTRACT.md); otherwise examine its segments: qmq log dump."
    ),
    "number_gap": (
        "The messages between them were lost, or their sender was told that they are not stored."
    ),
    "sequence_repeat": (
        "Two copies of one place were read: are two folders of one broker group given that are "
        "not replicas of each other?"
    ),
    "stored_twice": (
        "A broker knows the newest batches of each producer, and stores none twice: who sent "
        "this one under another number?"
    ),
    "broken_replay": (
        "Consumers see an older message between newer ones. After a fence a producer repeats "
        "everything that was in flight."
    ),
    "number_repeat": (
        "Two different messages: the application sent one thing twice, or counted wrongly."
    ),
    "behind_seal": "Consumers that have moved to the next version never see it.",
    "before_seal": (
        "Both lie in one broker group's log, so it is certain: the target was written to while "
        "its source was still open."
    ),
    "outside_range": "Consumers of the partition that holds the key never see it.",
    "wrong_hash": (
        "A client with another hash sent it (docs/ORDERING.md has the vectors); its key is "
        "spread over two partitions."
    ),
    "unknown_partition": (
        "Are these all routes of this subject? Export them again: qmq route export."
    ),
    "other_group": (
        "A partition never changes its broker group: are these all routes of this subject?"
    ),
    "no_key": (
        "A message without a key has no order; a client refuses to send one to an ordered subject."
    ),
    "no_number": "Its order cannot be judged. Use another number, or create_time.",
}
"""For each rule: what a violation means, and what to do."""


def describe(found: Violation, routes: Routes, by: str) -> str:
    says = RULES[found.rule].says
    lines = [
        f"{says[0].upper()}{says[1:]}.",
        _line("key", "none" if found.key is None else cell(found.key)),
    ]
    if found.earlier is not None:
        lines += [
            *_message("lies first", found.earlier, routes, by),
            *_message("lies behind", found.place, routes, by),
        ]
        lines += [
            _line("between" if not at else "", each)
            for at, each in enumerate(_between(found.earlier, found.place, routes))
        ]
    else:
        lines += [*_message("message", found.place, routes, by), *_line_of_partition(found, routes)]
    return "\n".join([*lines, _line("so", HINTS[found.rule])])


def _line(name: str, text: str) -> str:
    return f"  {name:<12} {text}"


def _message(name: str, place: OrderPlace, routes: Routes, by: str) -> Iterator[str]:
    part = routes.partitions.get(place.partition)
    version = "in no route" if part is None else f"opened by version {part.version}"
    number = "" if by == "create_time" or place.number is None else f"number {place.number}, "
    group = f" on {place.broker_group}" if place.broker_group else ""
    yield _line(
        name, f"{number}partition {place.partition}{group} ({version}), sequence {place.sequence}"
    )
    if place.message_id:
        yield _line("", f"created {time(place.create_ms)}, stored {time(place.append_ms)}")
        yield _line(
            "",
            (
                f"message {place.message_id}, batch {place.batch_sequence}, place {place.place} "
                f"of {producer(place.producer_id)}"
            ),
        )


def producer(producer_id: str) -> str:
    born_ms = int(producer_id, 16) >> 20
    return (
        f"producer {producer_id} "
        f"({f'born {time(born_ms)}' if born_ms >= _BIRTH_MS_MIN else 'of a Spark sink'})"
    )


def time(ms: int) -> str:
    """A moment, UTC."""
    return time_of(ms).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _line_of_partition(found: Violation, routes: Routes) -> Iterator[str]:
    part = routes.partitions.get(found.place.partition)
    if part is not None:
        yield _line(
            "partition", f"holds {part.lps} on {part.broker_group}{_closed_part(part, routes)}"
        )


def _closed_part(part: RoutePartition, routes: Routes) -> str:
    at = routes.sealed_at.get(part.number)
    return "" if at is None else f"; closed at sequence {at}"


# --- the changes between two messages -------------------------------------------------------------


def _between(earlier: OrderPlace, later: OrderPlace, routes: Routes) -> Iterator[str]:
    if earlier.partition == later.partition:
        yield "none: both are in one partition"
        return
    versions = changes_between(earlier.partition, later.partition, routes)
    if not versions:
        yield f"partition {later.partition} does not follow from partition {earlier.partition}"
    for version in versions:
        yield change(version, routes)


def changes_between(source: int, target: int, routes: Routes) -> list[int]:
    """The versions that lead from one partition to another, ascending;
    empty if the partitions are unrelated.
    """
    parts = routes.partitions
    reached = {source}
    for part in sorted(parts.values(), key=lambda part: part.version):
        if reached & set(part.sources):
            reached.add(part.number)
    found: set[int] = set()
    ways = {target} & (reached & parts.keys())
    while ways:
        part = parts[ways.pop()]
        if part.number != source:
            found.add(part.version)
            ways |= reached & set(part.sources)
    return sorted(found)


def change(version: int, routes: Routes) -> str:
    """The change that made a version: `version 5: partition 3 [0, 512) of g1 was split into
    7 [0, 256) of g2 and 8 [256, 512) of g1; ...`.
    """
    parts = routes.partitions
    targets = [part for part in parts.values() if part.version == version]
    sources = [
        parts[number]
        for number in sorted({number for part in targets for number in part.sources})
        if number in parts
    ]
    doing = "split into" if len(targets) > 1 else "merged into" if len(sources) > 1 else "moved to"
    was = "were" if len(sources) > 1 else "was"
    ends = ", ".join(
        f"{part.number} closed at sequence {routes.sealed_at.get(part.number, '(unknown yet)')}"
        for part in sources
    )
    return f"version {version}: partition {_named(sources)} {was} {doing} {_named(targets)}; {ends}"


def _named(parts: list[RoutePartition]) -> str:
    return " and ".join(f"{part.number} {part.lps} of {part.broker_group}" for part in parts)


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
    details = [
        each.violations.withColumn("subject", F.lit(subject)) for subject, each in broken.items()
    ]
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
    total = {
        name: sum(each.facts[name] for each in found.values())
        for name in ("messages", "keys", "partitions", "versions")
    }
    looked = (
        f"{total['messages']:,} messages of {total['keys']:,} keys, in {total['partitions']:,} "
        "partitions"
    )
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
        return (
            f"{', '.join(f'{count:,} {kind}' for kind, count in kinds.items())} among "
            f"{looked}{rest}"
        )
    by = ", ".join(sorted({each.by for each in found.values()}))
    return (
        f"log order is sending order, judged by {by}, and no message follows a seal: {looked}{rest}"
    )


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
        (
            subject,
            RULES[rule].kind,
            rule,
            count,
            "allowed" if rule in each.tolerated else "",
            RULES[rule].says,
        )
        for subject, each in found.items()
        for rule, count in each.counts.items()
    ]
    yield ReportTable(
        "Violations",
        ("subject", "kind", "rule", "count", "best-effort", "what it is"),
        tuple(rows),
        "rules",
    )
    names = (
        "messages",
        "keys",
        "partitions",
        "versions",
        "latest_version",
        "producers",
        "replayed_messages",
    )
    shown = tuple(
        (subject, *(each.facts[name] for name in names)) for subject, each in found.items()
    )
    yield ReportTable(
        "Subjects", ("subject", *(name.replace("_", " ") for name in names)), shown, "subjects"
    )
    parts = [
        (
            subject,
            part.partition,
            part.broker_group,
            *_of_route(each, part.partition),
            part.messages,
            part.producers,
            part.first,
            part.last,
        )
        for subject, each in found.items()
        for part in each.partitions
    ]
    columns = (
        "subject|partition|broker group|version|logical partitions|closed "
        "at|messages|producers|first|last"
    )
    yield ReportTable("Partitions", tuple(columns.split("|")), tuple(parts), "partitions")


def _of_route(found: Findings, number: int) -> tuple[object, ...]:
    part = found.routes.partitions.get(number)
    return (
        (None, None, None)
        if part is None
        else (part.version, str(part.lps), found.routes.sealed_at.get(number))
    )


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
    yield Plot(
        title, "bar", list(counts), {"messages": list(counts.values())}, "route version", "messages"
    )
    times = sorted((at, version) for version, at in began.items())
    axis = [time_of(at) for at, _ in times]
    versions = {"version": [float(version) for _, version in times]}
    yield Plot(
        f"{subject}: first message of each route version",
        "line",
        axis,
        versions,
        "",
        "route version",
    )
    largest = sorted(parts, key=lambda each: (-each.messages, each.place))[:BARS_MAX]
    sizes = {"messages": [float(each.messages) for each in largest]}
    names = [str(each.partition) for each in largest]
    yield Plot(
        f"{subject}: messages of the largest partitions",
        "bar",
        names,
        sizes,
        "partition",
        "messages",
    )


_ENDING: Final = frozenset(("endingoffsets", "endingtimestamp"))
_SELECTING: Final = frozenset(("tags", "tagsall", "keys", "keyfrom", "keyuntil"))
"""Options of the data source that exclude messages, in lower case."""


class OrderAudit:
    name = "order_audit"
    summary = "Check for each key that the log has the order of sending, across all routes."

    def options(self, parser: argparse.ArgumentParser) -> None:
        """Add this job's arguments."""
        parser.add_argument(
            "--by",
            default="create_time",
            metavar="WHAT",
            help=(
                "the source of the sending order: create_time (default), or a number per key: "
                "header:NAME, json:FIELD"
            ),
        )
        parser.add_argument(
            "--dense",
            action="store_true",
            help="the number increases by one, so a missing number is a lost message",
        )
        parser.add_argument(
            "--clock-ms",
            type=not_negative,
            default=0,
            metavar="MS",
            help="allowed clock difference between processes that write the same key (0)",
        )
        parser.add_argument(
            "--keys-max",
            type=positive,
            default=KEYS_MAX,
            metavar="N",
            help=f"number of distinct keys to hash ({KEYS_MAX:,})",
        )

    def run(self, spark: SparkSession, args: argparse.Namespace) -> Report:
        """Audit the ordered subjects of the selection. Raises QmqError."""
        by = parse_by(args.by)
        if args.dense and not by.is_exact:
            raise InvalidArgument(
                "--dense checks a number: use it with --by header:NAME or --by json:FIELD"
            )
        _refuse_selections(args)
        topology = queues_now(args)
        found: dict[str, Findings] = {}
        for subject in ordered_subjects(topology, is_named=not args.pattern):
            queues = [queue for queue in topology.queues.values() if queue.key.subject == subject]
            messages = _read(spark, args, queues, (*COLUMNS, *by.columns))
            found[subject] = audit(
                messages,
                topology.routes[subject],
                by=args.by,
                clock_ms=args.clock_ms,
                is_dense=args.dense,
                keys_max=args.keys_max,
                queues=queues if reads_to_end(args) else (),
            )
        return report(found)


def ordered_subjects(topology: Topology, *, is_named: bool) -> list[str]:
    """The ordered subjects of the selection, sorted.

    Raises:
        OrderMismatch: a named subject is unordered, or none is ordered.
        InvalidArgument: the routes of an ordered subject are unknown.
    """
    subjects = sorted({key.subject for key in topology.queues} | topology.routes.keys())
    partitioned = {key.subject for key in topology.queues if key.partition > 0}
    for subject in subjects:
        if subject in topology.routes:
            continue
        if subject in partitioned:
            raise InvalidArgument(
                f"the routes of subject {subject!r} are not known: give --servers, or "
                "--routes (`qmq route export`)"
            )
        if is_named:
            raise OrderMismatch(f"subject {subject!r} is unordered: there is no order to audit")
    if not topology.routes:
        raise OrderMismatch("none of these subjects is ordered: there is no order to audit")
    return [subject for subject in subjects if subject in topology.routes]


def reads_to_end(args: argparse.Namespace) -> bool:
    """Whether the queues are read to their ends."""
    return not _ENDING & {name.lower() for name in source_options(args)}


def _refuse_selections(args: argparse.Namespace) -> None:
    chosen = [name for name in source_options(args) if name.lower() in _SELECTING]
    if chosen:
        raise InvalidArgument(
            "an audit needs all messages, because it reports missing ones as lost: leave "
            f"out option {chosen[0]}"
        )


def _read(
    spark: SparkSession,
    args: argparse.Namespace,
    queues: Sequence[SourceQueue],
    columns: Sequence[str],
) -> DataFrame:
    """Read these queues up to their current ends, or to the end given by the arguments."""
    ends: dict[QueueKey, int] = {queue.key: queue.end for queue in queues}
    offsets = to_json(ends)
    options = {"assign": json.dumps({subject: list(named) for subject, named in offsets.items()})}
    if reads_to_end(args):
        options["endingOffsets"] = json.dumps(offsets)
    bare = argparse.Namespace(**{**vars(args), "subject": [], "pattern": None})
    return read_log(spark, bare, columns, **options)


JOB = OrderAudit()

if __name__ == "__main__":
    raise SystemExit(main(JOB))
