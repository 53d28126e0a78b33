"""The interface of a job, the arguments of all jobs, and running a job from `spark-submit`, `qmq
spark JOB` or a test.

A job's exit status is 0 without findings, 1 with findings, 2 after a failure, so a script can tell
a bad log from a job that did not run. An error is printed as one line on stderr. Errors that Spark
wraps in a traceback of several processes are unwrapped: the line is that of the data source's
error.

For the jobs about consumption: other datasets, the current queues, and joins of messages with
ranges of sequences.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import sys
import time
import traceback
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final, Protocol

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own custom
from pyspark.sql.types import StructField, StructType

from pyspark_qmq import datasets, register
from pyspark_qmq.jobs import report
from pyspark_qmq.jobs.report import Report
from pyspark_qmq.source_schema import COLUMNS, MORE_COLUMNS
from qmq.columns.model import Topology
from qmq.columns.options import LOGS, log_of, parse
from qmq.columns.reading import address_of, log_at, topology_of
from qmq.errors import InvalidArgument, QmqError
from qmq.text import whole_number

CLEAN: Final = 0
FINDINGS: Final = 1
FAILED: Final = 2

MESSAGES: Final = LOGS[0]

_EDGES: Final = ("earliest", "latest")
_TYPED: Final = re.compile(r"\[E\d{3}\] [^\n]*")


class Job(Protocol):
    """A job that reads the log and reports findings. Its module has an instance named JOB."""

    @property
    def name(self) -> str:
        """The name in `pyspark_qmq.jobs.JOBS`, also used for the job's files."""
        ...

    @property
    def summary(self) -> str:
        """One sentence for `--help`."""
        ...

    def options(self, parser: argparse.ArgumentParser) -> None:
        """Add the job's own arguments."""
        ...

    def run(self, spark: SparkSession, args: argparse.Namespace) -> Report:
        """Do the work. Raises QmqError."""
        ...


def main(job: Job, argv: Sequence[str] | None = None, spark: SparkSession | None = None) -> int:
    """Parse the arguments (default: those of the process), run the job, print and write the report.
    Returns the exit status.

    Without `spark`, the active session is used, or a new one is made and stopped at the end.
    """
    parser = common_parser(job)
    try:
        args = parser.parse_args(argv)
    except SystemExit as leaving:  # --help, or arguments that argparse refused and printed
        return CLEAN if leaving.code in (0, None) else FAILED
    if not args.servers and not args.path:
        args.servers = os.environ.get("QMQ_SERVER")
    try:
        return _run(job, args, list(sys.argv[1:] if argv is None else argv), spark)
    except (QmqError, PySparkException, Py4JError, OSError) as failure:
        sys.stderr.write(f"error: {error_line(failure)}\n")
    except KeyboardInterrupt:
        sys.stderr.write("error: interrupted\n")
    except Exception:  # A bug. Python's own exit status would be 1, which means findings.
        traceback.print_exc()
    return FAILED


def _run(job: Job, args: argparse.Namespace, argv: list[str], spark: SparkSession | None) -> int:
    source_options(args)  # Check the arguments before starting a session, which takes seconds.
    active = spark or SparkSession.getActiveSession()
    if active is not None and spark is None:
        register(active)
    session = active or _new_session(job, args.master)
    try:
        found = job.run(session, args)
        made = report.Made(datetime.now(UTC), shlex.join(["qmq", "spark", job.name, *argv]))
        page = report.write(found, Path(args.out), made) if args.out else None
    finally:
        if active is None:
            session.stop()
    if args.json:
        sys.stdout.write(json.dumps(report.summary(found)) + "\n")
    else:
        sys.stdout.write(report.text(found, page))
    return CLEAN if found.is_clean else FINDINGS


def _new_session(job: Job, master: str | None) -> SparkSession:
    from pyspark_qmq.session import session

    return session(f"qmq {job.name}", master=master)


def error_line(failure: BaseException) -> str:
    """An error in one line. For an error wrapped by Spark, the last line with a QMQ error in it,
    which is the cause.
    """
    if isinstance(failure, QmqError):
        return str(failure).replace("\n", " ")
    typed = _TYPED.findall(str(failure))
    if typed:
        return str(typed[-1]).rstrip()
    lines = str(failure).strip().splitlines()
    return f"{type(failure).__name__}: {lines[0] if lines else 'no details'}"


def common_parser(job: Job) -> argparse.ArgumentParser:
    """The arguments of all jobs, and the job's own."""
    parser = argparse.ArgumentParser(
        prog=f"qmq spark {job.name}", description=job.summary, allow_abbrev=False
    )
    log = parser.add_argument_group("the log and the messages to read")
    log.add_argument(
        "--servers",
        metavar="HOST:PORT,...",
        help="metaservers; read from their brokers (also QMQ_SERVER)",
    )
    log.add_argument(
        "--path",
        action="append",
        default=[],
        metavar="FOLDER",
        help="read data folders (or copies of segments); repeatable",
    )
    log.add_argument(
        "--routes",
        metavar="FILE",
        help="file written by `qmq route export`, for folders without metaservers",
    )
    log.add_argument("--subject", action="append", default=[], metavar="NAME", help="repeatable")
    log.add_argument(
        "--pattern", metavar="REGEX", help="regular expression for the whole name of subjects"
    )
    log.add_argument(
        "--from",
        dest="from_time",
        default="earliest",
        metavar="TIME",
        help="earliest (default), or messages stored at or after TIME",
    )
    log.add_argument(
        "--until",
        dest="until_time",
        default="latest",
        metavar="TIME",
        help="latest (default), or messages stored before TIME",
    )
    log.add_argument(
        "-o",
        "--option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="any option of the data source; repeatable",
    )
    result = parser.add_argument_group("output")
    result.add_argument(
        "--out",
        metavar="FOLDER",
        help=f"folder for {job.name}.html, {job.name}.json and Parquet files",
    )
    result.add_argument(
        "--json", action="store_true", help="print a summary as JSON instead of tables"
    )
    result.add_argument(
        "--master",
        metavar="URL",
        help="Spark's master; default: the one of spark-submit, or this machine",
    )
    job.options(parser)
    return parser


def source_options(args: argparse.Namespace) -> dict[str, str]:
    """The data source's options for the common arguments; `-o` takes precedence.
    Raises InvalidArgument.
    """
    found: dict[str, str] = {}
    if args.servers:
        found["qmq.servers"] = args.servers
    if args.path:
        found["qmq.path"] = ",".join(args.path)
    if args.routes:
        found["qmq.routes"] = args.routes
    if args.subject and args.pattern:
        raise InvalidArgument("give --subject or --pattern, not both")
    if args.subject:
        found["subscribe"] = ",".join(args.subject)
    elif args.pattern:
        found["subscribePattern"] = args.pattern
    found |= _edge("starting", "--from", args.from_time, default="earliest")
    found |= _edge("ending", "--until", args.until_time, default="latest")
    for text in args.option:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise InvalidArgument(
                f"-o {text!r} is not an option: write KEY=VALUE, such as tags=paid,late"
            )
        found[key] = value
    return found


def _edge(which: str, argument: str, text: str, *, default: str) -> dict[str, str]:
    if text == default:
        return {}
    if text in _EDGES:
        return {f"{which}Offsets": text}
    return {f"{which}Timestamp": str(time_ms(text, argument))}


def time_ms(text: str, argument: str) -> int:
    """Milliseconds since 1970 of an ISO 8601 time with a zone, or of a date (its midnight, UTC).
    Raises InvalidArgument.
    """
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidArgument(
            f"{argument} {text!r} is not a time: write earliest, latest, 2027-01-31, or "
            "2027-01-31T09:00:00Z"
        ) from None
    if found.tzinfo is None and re.fullmatch(r"[\d-]{8,10}", text):
        found = found.replace(tzinfo=UTC)
    if found.tzinfo is None:
        raise InvalidArgument(
            f"{argument} {text!r} has no time zone: write {found.isoformat()}Z for UTC"
        )
    return round(found.timestamp() * 1000)


def read_log(
    spark: SparkSession, args: argparse.Namespace, columns: Sequence[str], **options: str
) -> DataFrame:
    """A batch read of the log selected by the common arguments. Only the given columns are read
    (spark/pyspark_qmq/source_schema.py has their names).

    `options` are the data source's and take precedence over the arguments (`**{"qmq.log":
    "deliveries"}` reads another dataset, whose columns are in `pyspark_qmq.datasets`). The
    DataFrame is a snapshot: repeated use gives the same rows. Raises InvalidArgument. Spark raises
    other errors of the source when the rows are read.
    """
    merged = checked_source({**source_options(args), **options})
    return (
        spark.read.format("qmq")
        .schema(projection(columns, log_of(merged)))
        .options(**merged)
        .load()
    )


def checked_source(options: dict[str, str]) -> dict[str, str]:
    """The options. Raises InvalidArgument if they do not name a log, or no subjects (which only
    messages need).
    """
    if not {"qmq.servers", "qmq.path", "path"} & options.keys():
        raise InvalidArgument("give the log: --servers HOST:PORT, or --path FOLDER")
    if (
        log_of(options) == MESSAGES
        and not {"subscribe", "subscribePattern", "assign"} & options.keys()
    ):
        raise InvalidArgument("give the subjects: --subject NAME, or --pattern '.*' for all")
    return options


def projection(columns: Sequence[str], log: str = MESSAGES) -> StructType:
    """A schema of these columns. Raises InvalidArgument for an unknown column."""
    known = (
        {**COLUMNS, **MORE_COLUMNS}
        if log == MESSAGES
        else {field.name: field.dataType for field in datasets.schema_of(log).fields}
    )
    missing = [name for name in columns if name not in known]
    if missing:
        raise InvalidArgument(f"the log has no column {missing[0]!r}; columns: {', '.join(known)}")
    return StructType([StructField(name, known[name], True) for name in columns])


QUEUE: Final = ("subject", "partition", "broker_group")
"""The columns that identify a queue."""
_BLOCK_BITS: Final = 6
"""Ranges and messages are joined by blocks of 64 sequences: a range of one message is compared with
64 messages, a long one is split.
"""
_BROADCAST_ROWS_MAX: Final = 300_000


def read_dataset(
    spark: SparkSession, args: argparse.Namespace, name: str, *, path: Sequence[str] = ()
) -> DataFrame:
    """Another dataset, from the log given by the common arguments or from other folders.
    Raises InvalidArgument.
    """
    found = {key: value for key, value in source_options(args).items() if key.startswith("qmq.")}
    if path:
        found = {"qmq.path": ",".join(path)} | {
            key: value for key, value in found.items() if key == "qmq.committed"
        }
    return spark.read.format("qmq").options(**found).option("qmq.log", name).load()


def read_subjects(
    spark: SparkSession,
    args: argparse.Namespace,
    columns: Sequence[str],
    subjects: Sequence[str],
    *,
    is_whole: bool = False,
) -> DataFrame:
    """Messages of other subjects than the arguments name.
    `is_whole`: ignore the arguments' time range.
    """
    found = {
        key: value
        for key, value in source_options(args).items()
        if key not in ("subscribe", "subscribePattern")
    }
    if is_whole:
        found = {key: value for key, value in found.items() if key.startswith("qmq.")} | {
            "failOnDataLoss": "false"
        }
    found["subscribe"] = ",".join(subjects)
    return (
        spark.read.format("qmq").schema(projection(columns)).options(**checked_source(found)).load()
    )


def queues_now(args: argparse.Namespace) -> Topology:
    """The queues selected by the arguments.
    Raises InvalidArgument, UnknownSubject, NotConnected, LogDamaged.
    """
    asked = parse(checked_source(source_options(args)), is_stream=False)
    return topology_of(log_at(address_of(asked.where)), asked.choice)


def covered(messages: DataFrame, ranges: DataFrame) -> DataFrame:
    """Join each message with each range that contains it.

    `ranges` are deliveries: a queue, `first_sequence`, `last_sequence`, and possibly logical
    partitions. `messages` have `sequence` and `logical_partition`. Only the blocks of ranges are
    exploded, never their messages.
    """
    blocks = F.sequence(
        F.shiftright("first_sequence", _BLOCK_BITS), F.shiftright("last_sequence", _BLOCK_BITS)
    )
    cut = ranges.withColumn("block", F.explode(blocks))
    keyed = messages.withColumn("block", F.shiftright("sequence", _BLOCK_BITS))
    is_in = (F.col("sequence") >= F.col("first_sequence")) & (
        F.col("sequence") <= F.col("last_sequence")
    )
    is_meant = F.col("first_lp").isNull() | F.col("logical_partition").between(
        F.col("first_lp"), F.col("end_lp") - 1
    )
    if cut.count() <= _BROADCAST_ROWS_MAX:  # Spark cannot know that they are small.
        cut = F.broadcast(cut)
    return keyed.join(cut, [*QUEUE, "block"]).where(is_in & is_meant).drop("block")


def of_groups(rows: DataFrame, groups: Sequence[str], subjects: Sequence[str]) -> DataFrame:
    """Rows of these consumer groups (empty: all) and subjects."""
    found = rows.where(F.col("subject").isin(list(subjects)))
    return found.where(F.col("consumer_group").isin(list(groups))) if groups else found


def now_ms(args: argparse.Namespace, known: Iterable[int]) -> int:
    """The current time for brokers, or the newest time found in files. Milliseconds since 1970."""
    if args.servers and not args.path:
        return int(time.time() * 1000)
    return max(known, default=0)


def utc(time_ms: int) -> datetime:
    """A time in UTC for reports. Spark returns local times without a zone."""
    return datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=time_ms)


def positive(text: str) -> int:
    """For argparse: an integer of 1 or more."""
    found = whole_number(text, least=1)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of 1 or more")
    return found


def not_negative(text: str) -> int:
    """For argparse: an integer of 0 or more."""
    found = whole_number(text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of 0 or more")
    return found


def require_groups(found: Sequence[str], wanted: Sequence[str]) -> None:
    """Raise InvalidArgument if a named group was not found."""
    missing = sorted(set(wanted) - set(found))
    if missing:
        known = ", ".join(sorted(set(found))) or "none"
        raise InvalidArgument(
            f"no group {missing[0]!r} has consumed these subjects within the action log; "
            f"groups: {known}"
        )
