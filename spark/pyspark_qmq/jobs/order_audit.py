"""Checks for each key that the log has the order of sending, across all versions of the route, and prints counterexamples.

The log is read up to its end at the start of the job, together with the routes of that time, so messages written meanwhile have no effect.
order_checks.py and order_keys.py describe the checks and what each of them proves; in short:

    qmq spark order_audit --servers localhost:20880 --subject flights                      by the producers' clock
    qmq spark order_audit ... --by header:n --dense     by a number that the application increments for each key: exact, and finds losses

Exit status 1 (findings) if there is a violation. Replays (docs/ORDERING.md, "Duplicates"), bent messages of best-effort subjects, and
targets that seem to overtake their source according to two masters' clocks are reported as facts.

The job keeps about 200 bytes per message in Spark's storage, on disk if memory is not sufficient.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Final

from pyspark.sql import DataFrame, SparkSession

from pyspark_qmq.jobs.consumed import not_negative, positive, queues_now
from pyspark_qmq.jobs.job import main, read_log, source_options
from pyspark_qmq.jobs.order_checks import Findings, audit
from pyspark_qmq.jobs.order_hashes import KEYS_MAX
from pyspark_qmq.jobs.order_report import report
from pyspark_qmq.jobs.order_rows import COLUMNS, parse_by
from pyspark_qmq.jobs.report import Report
from pyspark_qmq.offsets import to_json
from pyspark_qmq.source_model import QueueKey, SourceQueue, Topology
from qmq.errors import InvalidArgument, OrderMismatch

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
            help="the source of the sending order: create_time (default), or a number per key: header:NAME, json:FIELD",
        )
        parser.add_argument("--dense", action="store_true", help="the number increases by one, so a missing number is a lost message")
        parser.add_argument(
            "--clock-ms",
            type=not_negative,
            default=0,
            metavar="MS",
            help="allowed clock difference between processes that write the same key (0)",
        )
        parser.add_argument(
            "--keys-max", type=positive, default=KEYS_MAX, metavar="N", help=f"number of distinct keys to hash ({KEYS_MAX:,})"
        )

    def run(self, spark: SparkSession, args: argparse.Namespace) -> Report:
        """Audit the ordered subjects of the selection. Raises QmqError."""
        by = parse_by(args.by)
        if args.dense and not by.is_exact:
            raise InvalidArgument("--dense checks a number: use it with --by header:NAME or --by json:FIELD")
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
            raise InvalidArgument(f"the routes of subject {subject!r} are not known: give --servers, or --routes (`qmq route export`)")
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
        raise InvalidArgument(f"an audit needs all messages, because it reports missing ones as lost: leave out option {chosen[0]}")


def _read(spark: SparkSession, args: argparse.Namespace, queues: Sequence[SourceQueue], columns: Sequence[str]) -> DataFrame:
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
