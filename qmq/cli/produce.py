"""`qmq produce` sends lines or JSON objects as messages, now or with a delay."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

import qmq
from qmq.cli.arguments import SECONDS_MAX, parse_duration, parse_when
from qmq.cli.output import SERVER, Server, counting, fail, run, show, time_text
from qmq.cli.roles import taking
from qmq.cli.transfer.records import bounded_lines
from qmq.client.producing.delayed import DelayedProducer, When
from qmq.client.producing.receipts import DelayedReceipt
from qmq.errors import CallerError, InvalidArgument, OrderMismatch
from qmq.model import check_name
from qmq.text import parse_json

if TYPE_CHECKING:
    from qmq.client.producing.ordered.producer import OrderedProducer
    from qmq.client.producing.producer import Producer
    from qmq.client.producing.receipts import Receipt, Ticket

Content = tuple[bytes, str | None, list[str] | None, dict[str, str] | None]


@dataclass(frozen=True, kw_only=True)
class ProduceOptions:
    subject: Annotated[str, typer.Argument(help="The subject to send to.")]
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="File to read; default: standard input.")
    ] = None
    form: Annotated[
        str,
        typer.Option(
            "--format", help="'lines': each line is a body; 'json': each line is an object."
        ),
    ] = "lines"
    key: Annotated[str | None, typer.Option(help="The key of every message.")] = None
    tag: Annotated[list[str] | None, typer.Option(help="A tag of every message; repeatable.")] = (
        None
    )
    delay: Annotated[
        str | None,
        typer.Option(help="Deliver each message this long after it is sent: 90s, 10m, 1h30m, 2d."),
    ] = None
    at: Annotated[str | None, typer.Option(help="Deliver then: 2027-01-01T09:00:00+01:00.")] = None
    compression: Annotated[str | None, typer.Option(help="'zstd' or 'lz4'.")] = None
    timeout_s: Annotated[
        float,
        typer.Option(
            "--timeout",
            min=0.1,
            max=SECONDS_MAX,
            help="Fail if a message is not stored in this many seconds.",
        ),
    ] = 120.0
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False
    server: Server = SERVER

    def due(self) -> When | None:
        """When to deliver the messages; None: now. Raises InvalidArgument."""
        if self.delay is not None and self.at is not None:
            raise InvalidArgument("give --delay or --at, not both")
        if self.delay is not None:
            found: When = parse_duration(self.delay)
        elif self.at is not None:
            found = parse_when(self.at)
        else:
            return None
        if self.compression is not None:
            raise InvalidArgument(
                "delayed messages are not compressed in batches: leave out --compression"
            )
        return found


@taking(ProduceOptions)
def produce(_: typer.Context, options: ProduceOptions) -> None:
    """Send each line as a message, from a file or standard input.

    With --format json a line is an object: {"body": ..., "key": "...", "tags": [...], "headers":
    {...}}; another kind of body is sent as JSON. With --delay or --at, --json prints each message's
    delayed id, which `qmq delay cancel` takes.
    """
    subject, file, as_json = options.subject, options.file, options.as_json
    if options.form not in ("lines", "json"):
        raise typer.BadParameter(f"--format must be 'lines' or 'json', not {options.form!r}")
    try:
        check_name("subject", subject)
        due = options.due()
    except CallerError as failure:
        fail(failure)
    with _opened(file) as source:
        total = file.stat().st_size if file else None
        stored, receipts = run(_produce(options, due, _contents(source, options), total))
    delayed = [each for each in receipts if isinstance(each, DelayedReceipt)]
    if as_json and delayed:
        rows = [(subject, each.delayed_id, time_text(each.due_ms)) for each in delayed]
        show("sent", ("subject", "delayed id", "due"), rows, as_json=True)
    elif as_json:
        counts = [(subject, group, messages) for group, messages in sorted(stored.items())]
        show(
            "sent",
            ("subject", "broker group", "messages"),
            counts or [(subject, "", 0)],
            as_json=True,
        )
    else:
        from qmq.cli.tables import console

        console.print(
            _said(subject, stored, delayed), soft_wrap=True, highlight=False, markup=False
        )


def _opened(file: Path | None) -> AbstractContextManager[BinaryIO]:
    """The file, or standard input."""
    try:
        return file.open("rb") if file else nullcontext(sys.stdin.buffer)
    except OSError as cause:
        fail(InvalidArgument(f"{file} cannot be read: {cause.strerror}"))


def _said(subject: str, stored: dict[str, int], delayed: list[DelayedReceipt]) -> str:
    """The summary line for people."""
    count = sum(stored.values())
    where = ", ".join(
        f"{messages:,} to {group}" if len(stored) > 1 else group
        for group, messages in sorted(stored.items())
    )
    line = (
        f"sent {count:,} {'message' if count == 1 else 'messages'} to "
        f"{subject}{f' ({where})' if where else ''}"
    )
    return line + "".join(
        [f", due {time_text(each.due_ms)}, delayed id {each.delayed_id}" for each in delayed]
    )


async def _produce(
    options: ProduceOptions, due: When | None, contents: Iterator[Content], total: int | None
) -> tuple[dict[str, int], list[Receipt]]:
    """The number of messages stored by each broker group; for delayed messages also the receipts,
    if they are printed or if there is only one.

    The first message is sent alone, because an error of the first message is usually an error of
    all.
    """
    first = next(contents, None)
    if first is None:
        return {}, []
    tickets: list[Ticket] = []
    keeps_receipts = due is not None and options.as_json
    timeout = timedelta(seconds=options.timeout_s)
    async with (
        qmq.connect(options.server, delivery_timeout=timeout) as mq,
        await _begin(mq, options, due, first, tickets) as producer,
    ):
        with counting(
            f"sending to {options.subject}", total, quiet=options.as_json, transient=True
        ) as completed:
            done = len(first[0]) + 1
            for content in contents:
                ticket = _send(producer, content, due)
                if keeps_receipts and ticket is not tickets[-1]:
                    tickets.append(ticket)
                done += len(content[0]) + 1
                completed(done)
                if producer.full:
                    await producer.drain()
        await producer.flush()
        is_shown = keeps_receipts or sum(producer.stored_by_group.values()) == 1
        receipts = [receipt for ticket in tickets for receipt in await ticket] if is_shown else []
    return producer.stored_by_group, receipts


def _send(producer: Producer | OrderedProducer, content: Content, due: When | None) -> Ticket:
    if isinstance(producer, DelayedProducer):
        return producer.send(*content, due=due)
    return producer.send(*content)  # type: ignore[arg-type]  # an ordered one refuses a message without a key


async def _begin(
    mq: qmq.Client,
    options: ProduceOptions,
    due: When | None,
    first: Content,
    tickets: list[Ticket],
) -> Producer | OrderedProducer:
    """The producer that stored the first message; for a delayed message also its receipt. The
    broker tells whether it is ordered.
    """
    subject, compression = options.subject, options.compression
    if due is not None:
        later = mq.delayed_producer(subject)
        tickets.append(later.send(*first, due=due))
        await tickets[0]
        return later
    unordered = mq.producer(subject, compression=compression)
    try:
        await unordered.send(*first)
    except OrderMismatch:
        ordered = mq.ordered_producer(subject, compression=compression)
        await ordered.send(*first)  # type: ignore[arg-type]
        return ordered
    return unordered


def _contents(source: BinaryIO, options: ProduceOptions) -> Iterator[Content]:
    key, tags = options.key, options.tag
    for number, line in bounded_lines(source):
        body = line.rstrip(b"\r\n")
        if options.form == "lines":
            yield body, key, tags, None
        elif body:
            yield parse_line(number, body, key, tags)


def parse_line(number: int, line: bytes, key: str | None, tags: list[str] | None) -> Content:
    """A line of JSON to send. Raises InvalidArgument."""
    try:
        found: dict[str, Any] = parse_json(line)
        body = found["body"]
    except (ValueError, KeyError, TypeError) as cause:
        raise InvalidArgument(f'line {number} is not an object with a "body": {cause}') from None
    data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
    return data, found.get("key", key), found.get("tags", tags), found.get("headers")
