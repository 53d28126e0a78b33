"""`qmq consume` prints messages as lines or JSON. Messages of an ordered subject arrive in order
per key.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

import qmq
from qmq.cli.arguments import COUNT_MAX, SECONDS_MAX
from qmq.cli.names import require_subject
from qmq.cli.output import SERVER, Json, Server, run
from qmq.cli.roles import taking
from qmq.errors import InvalidArgument, OrderMismatch
from qmq.model import check_name
from qmq.operations.messages import stored_facts
from qmq.text import visible

if TYPE_CHECKING:
    from qmq.client.consuming.message import StoredMessage
    from qmq.client.consuming.ordered.message import OrderedMessage


@dataclass(frozen=True, kw_only=True)
class ConsumeOptions:
    subject: Annotated[str, typer.Argument(help="What to consume.")]
    group: Annotated[str, typer.Option("--group", "-g", help="The consumer group.")]
    count: Annotated[
        int,
        typer.Option(
            "--count",
            "-n",
            min=0,
            max=COUNT_MAX,
            help="Stop after this many messages; 0: no limit.",
        ),
    ] = 0
    idle_s: Annotated[
        float,
        typer.Option(
            "--timeout",
            min=0,
            max=SECONDS_MAX,
            help="Stop after this many seconds without a message; 0: never.",
        ),
    ] = 0.0
    start: Annotated[
        str, typer.Option("--from", help="Where a new group starts: 'earliest' or 'latest'.")
    ] = "earliest"
    tag: Annotated[list[str] | None, typer.Option(help="Only messages with one of these tags.")] = (
        None
    )
    raw: Annotated[
        bool,
        typer.Option(
            "--raw",
            help=(
                "Print bodies unchanged on a terminal, too; by default control characters are "
                "escaped there (\\x1b)."
            ),
        ),
    ] = False
    as_json: Json = False
    server: Server = SERVER


@taking(ConsumeOptions)
def consume(_: typer.Context, options: ConsumeOptions) -> None:
    """Print messages, one per line, and acknowledge them. Prints the body;
    with --json, all fields.
    """
    form = Form(options.as_json, is_raw=options.raw or not sys.stdout.isatty())
    run(_consume(options, form))


class Form(NamedTuple):
    """How a message is printed. `is_raw`: print the body unchanged."""

    as_json: bool = False
    is_raw: bool = True

    def line(self, message: StoredMessage, place: dict[str, Any]) -> bytes:
        """The printed message, without the newline."""
        if self.as_json:
            return json.dumps(place | stored_facts(message) | {"attempt": message.attempt}).encode()
        return (
            message.body
            if self.is_raw
            else visible(message.body.decode(errors="backslashreplace")).encode()
        )


async def _consume(options: ConsumeOptions, form: Form) -> None:
    """Consume as an unordered subject; switch to an ordered consumer if the broker says at the
    first pull that the subject is ordered.
    """
    subject = options.subject
    async with qmq.connect(options.server, create_subjects=False) as mq:
        check_name("group", options.group)
        check_name("subject", subject)
        await require_subject(
            mq, subject, must_answer=True
        )  # Fail at once: the client itself would wait for the subject to be created.
        try:
            await _consume_unordered(mq, options, form)
        except OrderMismatch:
            if options.tag:
                raise InvalidArgument(
                    f"subject {subject!r} is ordered: --tag cannot filter an ordered "
                    "subject, leave it out"
                ) from None
            await _consume_ordered(mq, options, form)


async def _consume_unordered(mq: qmq.Client, options: ConsumeOptions, form: Form) -> None:
    subject, count, idle_s = options.subject, options.count, options.idle_s
    printed = 0
    async with mq.consumer(
        subject, options.group, start=options.start, tags_any=options.tag or ()
    ) as consumer:
        while not count or printed < count:
            most = min(count - printed, 1000) if count else 1000
            found = await consumer.pull(most, timedelta(seconds=idle_s or 3600))
            if idle_s and not found.slices:
                await require_subject(mq, subject, must_answer=True)
                return
            for message in found:
                _print(
                    message,
                    {"subject": message.subject, "broker_group": message.broker_group},
                    form,
                )
            sys.stdout.buffer.flush()
            await found.ack()
            printed += len(found)


async def _consume_ordered(mq: qmq.Client, options: ConsumeOptions, form: Form) -> None:
    """Acknowledge every printed message. Leaving the consumer sends the acknowledgements."""
    subject, count, idle_s = options.subject, options.count, options.idle_s
    printed = 0
    async with mq.ordered_consumer(
        subject, options.group, start=options.start, ack="explicit"
    ) as consumer:
        while not count or printed < count:
            try:
                async with asyncio.timeout(idle_s or None):
                    message = await anext(consumer)
            except TimeoutError:
                await require_subject(mq, subject, must_answer=True)
                return
            _print(message, _place(message), form)
            sys.stdout.buffer.flush()
            message.ack_later()
            printed += 1


def _place(message: OrderedMessage) -> dict[str, Any]:
    return {
        "subject": message.subject,
        "broker_group": message.broker_group,
        "partition": message.partition,
        "logical_partition": message.logical_partition,
        "route_version": message.route_version,
    }


def _print(message: StoredMessage, place: dict[str, Any], form: Form) -> None:
    sys.stdout.buffer.write(form.line(message, place) + b"\n")
