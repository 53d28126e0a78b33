"""Describes a violation of order in words: the two messages, their locations, producers and times, and the route changes between them.
Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from pyspark_qmq.jobs.order_rules import RULES, OrderPlace, Violation
from pyspark_qmq.jobs.report import cell
from pyspark_qmq.source_model import RoutePartition, Routes
from qmq.clock import time_of

_BIRTH_MS_MIN: Final = 1 << 40
"""Ids of real producers begin with a later creation time; smaller ids belong to Spark's sink."""

HINTS: Final[dict[str, str]] = {
    "stream_order": "A broker takes batch n only after batch n - 1: keep these segments, and look at the master of that time.",
    "id_order": "One client sent both, and it repeats unanswered messages in order: keep its log.",
    "time_order": (
        "Either the order was broken, or the sender's clock was set back, or several processes write this key and their clocks differ: "
        "then say by how much with --clock-ms. A number that the application counts (--by) tells them apart."
    ),
    "number_order": "Consumers see the higher number first. If one process counts for each key, the order was broken.",
    "stream_gap": "Numbers of a producer's batches are missing: the batches were lost, or the log was read with a selection (tags, keys).",
    "sequence_gap": (
        "Messages are missing. A power cut may leave such a gap where consumers had seen what the disk then lost (docs/CONTRACT.md); "
        "otherwise examine its segments: qmq log dump."
    ),
    "number_gap": "The messages between them were lost, or their sender was told that they are not stored.",
    "sequence_repeat": "Two copies of one place were read: are two folders of one broker group given that are not replicas of each other?",
    "stored_twice": "A broker knows the newest batches of each producer, and stores none twice: who sent this one under another number?",
    "broken_replay": "Consumers see an older message between newer ones. After a fence a producer repeats everything that was in flight.",
    "number_repeat": "Two different messages: the application sent one thing twice, or counted wrongly.",
    "behind_seal": "Consumers that have moved to the next version never see it.",
    "before_seal": "Both lie in one broker group's log, so it is certain: the target was written to while its source was still open.",
    "outside_range": "Consumers of the partition that holds the key never see it.",
    "wrong_hash": "A client with another hash sent it (docs/ORDERING.md has the vectors); its key is spread over two partitions.",
    "unknown_partition": "Are these all routes of this subject? Export them again: qmq route export.",
    "other_group": "A partition never changes its broker group: are these all routes of this subject?",
    "no_key": "A message without a key has no order; a client refuses to send one to an ordered subject.",
    "no_number": "Its order cannot be judged. Use another number, or create_time.",
}
"""For each rule: what a violation means, and what to do."""


def describe(found: Violation, routes: Routes, by: str) -> str:
    says = RULES[found.rule].says
    lines = [f"{says[0].upper()}{says[1:]}.", _line("key", "none" if found.key is None else cell(found.key))]
    if found.earlier is not None:
        lines += [*_message("lies first", found.earlier, routes, by), *_message("lies behind", found.place, routes, by)]
        lines += [_line("between" if not at else "", each) for at, each in enumerate(_between(found.earlier, found.place, routes))]
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
    yield _line(name, f"{number}partition {place.partition}{group} ({version}), sequence {place.sequence}")
    if place.message_id:
        yield _line("", f"created {time(place.create_ms)}, stored {time(place.append_ms)}")
        yield _line("", f"message {place.message_id}, batch {place.batch_sequence}, place {place.place} of {producer(place.producer_id)}")


def producer(producer_id: str) -> str:
    born_ms = int(producer_id, 16) >> 20
    return f"producer {producer_id} ({f'born {time(born_ms)}' if born_ms >= _BIRTH_MS_MIN else 'of a Spark sink'})"


def time(ms: int) -> str:
    """A moment, UTC."""
    return time_of(ms).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _line_of_partition(found: Violation, routes: Routes) -> Iterator[str]:
    part = routes.partitions.get(found.place.partition)
    if part is not None:
        yield _line("partition", f"holds {part.lps} on {part.broker_group}{_closed(part, routes)}")


def _closed(part: RoutePartition, routes: Routes) -> str:
    at = routes.sealed_at.get(part.number)
    return "" if at is None else f"; closed at sequence {at}"


# --- the changes between two messages ----------------------------------------------------------------------------------


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
    """The versions that lead from one partition to another, ascending; empty if the partitions are unrelated."""
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
    """The change that made a version: `version 5: partition 3 [0, 512) of g1 was split into 7 [0, 256) of g2 and 8 [256, 512) of g1;
    ...`."""
    parts = routes.partitions
    targets = [part for part in parts.values() if part.version == version]
    sources = [parts[number] for number in sorted({number for part in targets for number in part.sources}) if number in parts]
    doing = "split into" if len(targets) > 1 else "merged into" if len(sources) > 1 else "moved to"
    was = "were" if len(sources) > 1 else "was"
    ends = ", ".join(f"{part.number} closed at sequence {routes.sealed_at.get(part.number, '(unknown yet)')}" for part in sources)
    return f"version {version}: partition {_named(sources)} {was} {doing} {_named(targets)}; {ends}"


def _named(parts: list[RoutePartition]) -> str:
    return " and ".join(f"{part.number} {part.lps} of {part.broker_group}" for part in parts)
