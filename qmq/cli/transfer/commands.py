"""`qmq export` writes stored messages to a file; `qmq import` sends the records of a file to a
subject (docs/TRANSFER.md). `qmq copy` copies messages to another subject of the same cluster or of
another one (docs/TRANSFER.md).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import typer

import qmq
from qmq.cli.arguments import PARTITION_MAX, RATE_MAX
from qmq.cli.browse import moment
from qmq.cli.output import SERVER, Json, Server, counting, fail, run, show
from qmq.cli.roles import taking
from qmq.cli.transfer.loading import LoadJournal, RecordLoader
from qmq.cli.transfer.message_source import MessageRange, MessageSource, place_of, record_of
from qmq.cli.transfer.records import FileSource, RecordForm, count_of, describe, finish, writer_of
from qmq.client.client import Client
from qmq.client.consuming.ack_spool import user_state_folder
from qmq.errors import InvalidArgument, QmqError
from qmq.operations.text import parse_key
from qmq.rpc.tls_network import network_of
from qmq.security.contexts import ClusterContext, ContextFile
from qmq.text import INT64_MAX

STATE_SUFFIX: Final = ".qmq-import"
BAR_STEP: Final = 500
_MOMENT: Final = "2026-11-24T09:00:00Z, or an age: 90s, 10m, 2h, 3d."

Subject = Annotated[str, typer.Argument(help="The subject.")]
Rate = Annotated[
    float,
    typer.Option(
        "--rate", min=0, max=RATE_MAX, help="At most this many messages per second; 0: no limit."
    ),
]
Compression = Annotated[str | None, typer.Option(help="'zstd' or 'lz4'.")]
Format = Annotated[
    str, typer.Option("--format", help="'jsonl' or 'parquet'; default: by the file's name.")
]


@dataclass(frozen=True, kw_only=True)
class RangeFlags:
    """Which messages of a subject are meant."""

    at: Annotated[
        str | None, typer.Option("--at", help=f"Start at messages stored at this time: {_MOMENT}")
    ] = None
    until: Annotated[
        str | None,
        typer.Option("--until", help=f"Stop before messages stored at this time: {_MOMENT}"),
    ] = None
    first: Annotated[
        int | None,
        typer.Option("--from-sequence", min=0, max=INT64_MAX, help="First sequence of each queue."),
    ] = None
    end: Annotated[
        int | None,
        typer.Option(
            "--until-sequence",
            min=0,
            max=INT64_MAX,
            help="Stop before this sequence in each queue.",
        ),
    ] = None
    partition: Annotated[
        int | None,
        typer.Option("--partition", min=0, max=PARTITION_MAX, help="Only this partition."),
    ] = None
    broker_group: Annotated[
        str, typer.Option("--broker-group", help="Only messages of this broker group.")
    ] = ""
    key: Annotated[str | None, typer.Option("--key", help="Only messages with this key.")] = None
    key_from: Annotated[
        str | None,
        typer.Option("--from-key", help="Only keys at or after this one, compared byte by byte."),
    ] = None
    key_before: Annotated[
        str | None, typer.Option("--until-key", help="Only keys before this one.")
    ] = None
    tag: Annotated[
        list[str] | None,
        typer.Option("--tag", help="Only messages with one of these tags; repeatable."),
    ] = None

    def chosen(self) -> MessageRange:
        """The range given by the options. Raises InvalidArgument."""
        one, low, high = [
            None if each is None else parse_key(each)
            for each in (self.key, self.key_from, self.key_before)
        ]
        start, stop, tags = moment(self.at), moment(self.until), tuple(self.tag or ())
        return MessageRange(
            start,
            stop,
            self.first,
            self.end,
            self.partition,
            self.broker_group,
            one,
            low,
            high,
            tags,
        )


@dataclass(frozen=True, kw_only=True)
class ExportOptions(RangeFlags):
    """Options of `qmq export`."""

    subject: Subject
    file: Annotated[
        Path | None,
        typer.Option("--file", "-f", help="The file to write; default: standard output."),
    ] = None
    form: Format = ""
    body: Annotated[
        str,
        typer.Option(
            "--body",
            help="'auto': UTF-8 bodies as text, others as base64; 'base64': all as base64.",
        ),
    ] = "auto"
    as_json: Json = False
    server: Server = SERVER


@taking(ExportOptions)
def export(_: typer.Context, options: ExportOptions) -> None:
    """Write stored messages as JSON lines or Parquet, with ids, keys, tags, headers and times. No
    consumer group is involved.

    Standard output gets JSON lines and no other text. With --file, --json prints the summary as
    JSON.
    """
    try:
        if options.body not in ("auto", "base64"):
            raise InvalidArgument(f"--body must be auto or base64, not {options.body!r}")
        count = run(_export(options, options.chosen(), RecordForm.of(options.form, options.file)))
    except (InvalidArgument, OSError) as failure:
        fail(failure)
    if options.file is not None:
        show(
            "exported",
            ("subject", "messages", "file"),
            [(options.subject, count, str(options.file))],
            as_json=options.as_json,
        )


async def _export(options: ExportOptions, chosen: MessageRange, form: RecordForm) -> int:
    subject, file = options.subject, options.file
    count = 0
    async with qmq.connect(options.server, create_subjects=False) as mq:
        total = await stored_count(mq, subject)
        writer = writer_of(form, file, as_base64=options.body == "base64")
        with counting(
            f"exporting {subject}", total, quiet=options.as_json or file is None
        ) as completed:
            async for message in MessageSource(mq, subject, chosen).messages():
                writer.write(record_of(message), place_of(message))
                count += 1
                if count % BAR_STEP == 0:
                    completed(count)
            completed(count)
        writer.close()
    if file is not None:
        finish(file)
    return count


async def stored_count(mq: qmq.Client, subject: str) -> int:
    """The number of messages, for the progress bar."""
    found = await mq.metadata.find_subject(subject)
    queues = found.description.queues if found is not None else ()
    return sum(queue.next_sequence - queue.start_sequence for queue in queues)


def load(
    subject: Subject,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="The file to read; default: standard input.")
    ] = None,
    form: Format = "",
    state: Annotated[
        Path | None,
        typer.Option(
            "--state",
            help=(
                f"File that records the progress; default: FILE.SUBJECT{STATE_SUFFIX}, or none "
                "for standard input."
            ),
        ),
    ] = None,
    rate: Rate = 0.0,
    compression: Compression = None,
    as_json: Json = False,
    server: Server = SERVER,
) -> None:
    """Send the records of a file, in the format of `qmq export`, to an existing subject. The order
    of each key is kept.

    After a crash, run the command again: it continues where it stopped and stores no record twice.
    A JSON line needs only a "body"; ids, keys, tags, headers and create times are kept if they are
    given.
    """
    try:
        chosen = RecordForm.of(form, file)
        if state is None and file is not None:
            state = file.with_name(f"{file.name}.{subject}{STATE_SUFFIX}")
        journal = LoadJournal(state, {"subject": subject, **describe(chosen, file)})
    except InvalidArgument as failure:
        fail(failure)
    try:
        row = run(_load(server, subject, journal, chosen, file, rate, compression, as_json))
    except (OSError, KeyboardInterrupt) as failure:
        fail(failure)
    finally:
        journal.close()
    show("imported", LOAD_COLUMNS, [row], as_json=as_json)


LOAD_COLUMNS: Final = ("subject", "messages", "stored now", "stored before")


async def _load(
    server: str,
    subject: str,
    journal: LoadJournal,
    form: RecordForm,
    file: Path | None,
    rate: float,
    compression: str | None,
    quiet: bool,
) -> tuple[str, int, int, int]:
    done = journal.state
    if done is not None and done.is_done:
        return (subject, done.records, 0, done.records)
    source = FileSource(form, file, 0 if done is None else done.mark or 0)
    async with qmq.connect(server, create_subjects=False) as mq:
        with counting(
            f"importing to {subject}", None if quiet else count_of(form, file), quiet=quiet
        ) as completed:
            loader = RecordLoader(
                mq, subject, journal, rate=rate, compression=compression, progress=completed
            )
            await keep_saying(loader.load(source), journal)
            total = source.mark()
            completed(total)
    return (subject, total, loader.sent, total - loader.sent)


async def keep_saying(work: Any, journal: LoadJournal) -> None:
    """Run the load; if it fails, add to the error that another run continues it."""
    try:
        await work
    except QmqError as failure:
        if journal.path is None:
            raise
        records = journal.state.records if journal.state is not None else 0
        said = (
            f"{failure.message}; {records:,} records are stored: run the command again to "
            f"continue ({journal.path})"
        )
        raise type(failure)(said, outcome=failure.outcome) from failure


@dataclass(frozen=True, kw_only=True)
class CopyOptions(RangeFlags):
    """Options of `qmq copy`."""

    source: Annotated[str, typer.Argument(help="The subject to read.")]
    target: Annotated[str, typer.Argument(help="The subject to write; it must exist.")]
    to_context: Annotated[
        str,
        typer.Option("--to-context", help="The target cluster's context: see `qmq context list`."),
    ] = ""
    to_server: Annotated[
        str,
        typer.Option(
            "--to-server",
            help="The target cluster's metaservers; TLS and token are the same as for the source.",
        ),
    ] = ""
    state: Annotated[
        Path | None,
        typer.Option(
            "--state",
            help=(
                "File that records the progress; default: a file of this copy in the state folder."
            ),
        ),
    ] = None
    rate: Rate = 0.0
    compression: Compression = None
    as_json: Json = False
    server: Server = SERVER


@taking(CopyOptions)
def copy(_: typer.Context, options: CopyOptions) -> None:
    """Copy stored messages, with ids, keys, tags, headers and create times; the order of each key
    is kept. No consumer group is involved.

    After a crash, run the command again: it continues where it stopped and stores no message twice.
    When the copy is complete, running it again copies the messages stored since.
    """
    try:
        chosen = options.chosen()
        there = target_of(options.server, options.to_context, options.to_server)
        if options.source == options.target and there.server == options.server:
            raise InvalidArgument(
                f"{options.source!r} would be copied into itself: give another subject or "
                "another cluster"
            )
        words = {
            name: text
            for name, text in (("start", options.at), ("end", options.until))
            if text is not None
        }
        meant = {
            **chosen.to_json(),
            **words,
        }  # "2h" is another time at each run, but the same arguments mean the same copy.
        load = {
            "from": [options.server, options.source],
            "subject": options.target,
            "to": there.server,
            "range": meant,
        }
        journal = LoadJournal(options.state or default_state(load), load)
    except (OSError, QmqError) as failure:
        fail(failure)
    try:
        row = run(_copy(options, there, chosen, journal))
    finally:
        journal.close()
    show("copied", LOAD_COLUMNS, [row], as_json=options.as_json)


def target_of(server: str, context: str, to_server: str) -> ClusterContext:
    """The target cluster; by default the source's. Raises InvalidArgument."""
    if context and to_server:
        raise InvalidArgument("give --to-context or --to-server, not both")
    if not context:
        return ClusterContext("", to_server or server)
    found = ContextFile.of_user().find(context)
    if not found.server:
        raise InvalidArgument(
            f"context {context!r} names no server: `qmq context add {context} --server HOST:PORT`"
        )
    return found


def connected(there: ClusterContext) -> Client:
    """A client of the target cluster. A context supplies every setting: certificates and tokens
    from the environment belong to the source and are never sent to another cluster. Raises
    InvalidArgument."""
    if not there.name:
        return qmq.connect(there.server, create_subjects=False)
    return Client(
        there.server, create_subjects=False, network=network_of(environment=there.variables())
    )


def default_state(load: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> Path:
    """The state file of this source, target and range, in the user's state folder."""
    folder = user_state_folder(environment) / "copies"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    name = hashlib.sha256(json.dumps(load, sort_keys=True).encode()).hexdigest()[:16]
    return folder / f"{load['from'][1]}-to-{load['subject']}-{name}"


async def _copy(
    options: CopyOptions, there: ClusterContext, chosen: MessageRange, journal: LoadJournal
) -> tuple[str, int, int, int]:
    state = journal.state
    before = 0 if state is None else state.records
    source, target = options.source, options.target
    async with qmq.connect(options.server, create_subjects=False) as here, connected(there) as mq:
        messages = MessageSource(here, source, chosen, None if state is None else state.mark)
        left = max(await stored_count(here, source), before)
        with counting(f"copying {source} to {target}", left, quiet=options.as_json) as completed:
            loader = RecordLoader(
                mq,
                target,
                journal,
                rate=options.rate,
                compression=options.compression,
                progress=completed,
            )
            await keep_saying(loader.load(messages), journal)
            total = journal.state.records if journal.state is not None else 0
            completed(total)
    return (target, total, loader.sent, total - loader.sent)
