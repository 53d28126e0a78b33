"""`qmq browse` and `qmq tail` show stored messages without a consumer group (docs/BROWSE.md)."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

import qmq
from qmq.cli.arguments import COUNT_MAX, View, parse_duration, parse_when, shifted
from qmq.cli.output import SERVER, Server, fail, run
from qmq.cli.roles import taking
from qmq.cli.tables import ELLIPSIS, console, errors, relative
from qmq.errors import InvalidArgument, QmqError
from qmq.operations.messages import stored_facts
from qmq.operations.text import key_text, parse_key
from qmq.process.event_loop import time_of
from qmq.text import visible

if TYPE_CHECKING:
    from qmq.client.browsing import BrowsedMessage

Subject = Annotated[str, typer.Argument(help="The subject.")]
Key = Annotated[str | None, typer.Option("--key", help="Only messages with this key.")]
Tag = Annotated[
    list[str] | None,
    typer.Option("--tag", help="Only messages with one of these tags; repeatable."),
]
Grep = Annotated[
    str | None,
    typer.Option(
        "--grep", help="Only messages whose body matches this regular expression anywhere."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object per message.")]
Partial = Annotated[bool, typer.Option("--partial", help="Skip broker groups that cannot be read.")]
_MOMENT = "2026-11-24T09:00:00Z, or an age: 90s, 10m, 2h, 3d."


@dataclass(frozen=True, kw_only=True)
class BrowseOptions:
    subject: Subject
    at: Annotated[
        str | None, typer.Option("--at", help=f"Start at messages stored at this time: {_MOMENT}")
    ] = None
    until: Annotated[
        str | None,
        typer.Option("--until", help=f"Stop before messages stored at this time: {_MOMENT}"),
    ] = None
    key: Key = None
    tag: Tag = None
    grep: Grep = None
    limit: Annotated[
        int,
        typer.Option(
            "--limit",
            "-n",
            min=0,
            max=COUNT_MAX,
            help="Stop after this many messages; 0: no limit.",
        ),
    ] = 100
    partial: Partial = False
    as_json: AsJson = False
    server: Server = SERVER


@taking(BrowseOptions)
def browse(_: typer.Context, options: BrowseOptions) -> None:
    """Show stored messages, oldest first. No consumer group is involved: no message is
    acknowledged, and consumers are not affected.
    """
    try:
        chosen: dict[str, Any] = {
            "start": moment(options.at),
            "end": moment(options.until),
            "key": _key(options.key),
            "tags_any": options.tag or (),
            "partial": options.partial,
        }
        pattern = _pattern(options.grep)
        run(
            _print(options.server, options.subject, chosen, pattern, options.limit, options.as_json)
        )
    except InvalidArgument as failure:
        fail(failure)


def tail(
    subject: Subject,
    lines: Annotated[
        int,
        typer.Option(
            "--limit",
            "-n",
            min=0,
            max=COUNT_MAX,
            help="Start with this many of the newest messages.",
        ),
    ] = 10,
    key: Key = None,
    tag: Tag = None,
    grep: Grep = None,
    partial: Partial = False,
    as_json: AsJson = False,
    server: Server = SERVER,
) -> None:
    """Show the newest messages, then new ones as they are stored, until Ctrl-C. No consumer group
    is used.
    """
    try:
        chosen: dict[str, Any] = {
            "last": lines,
            "follow": True,
            "key": _key(key),
            "tags_any": tag or (),
            "partial": partial,
        }
        run(_print(server, subject, chosen, _pattern(grep), 0, as_json))
    except InvalidArgument as failure:
        fail(failure)


def moment(text: str | None) -> datetime | None:
    """Parse a time, or an age such as "2h" counted back from now. Raises InvalidArgument."""
    if text is None:
        return None
    if "T" in text.upper() or ":" in text or "-" in text:
        return parse_when(text)
    return shifted(datetime.fromtimestamp(time.time(), UTC), -parse_duration(text))


def _key(text: str | None) -> bytes | None:
    return None if text is None else parse_key(text)


def _pattern(text: str | None) -> re.Pattern[bytes] | None:
    try:
        return None if text is None else re.compile(text.encode())
    except re.error as failure:
        raise InvalidArgument(f"{text!r} is not a regular expression: {failure}") from None


async def _print(
    server: str,
    subject: str,
    chosen: dict[str, Any],
    pattern: re.Pattern[bytes] | None,
    limit: int,
    as_json: bool,
) -> None:
    shown = 0
    async with qmq.connect(server, create_subjects=False) as mq:
        found: AsyncIterator[BrowsedMessage] = mq.browse(subject, **chosen)
        try:
            async for message in found:
                if pattern is not None and not pattern.search(message.body):
                    continue
                print_message(message, as_json=as_json)
                shown += 1
                if shown == limit:
                    break
        except QmqError:
            sys.stdout.flush()
            raise
    if limit and shown == limit and not as_json and console.is_terminal:
        errors.print(Text(f"stopped after {limit:,} messages: --limit shows more", "dim"))


def print_message(message: BrowsedMessage, *, as_json: bool) -> None:
    """Print one message on one line."""
    if as_json:
        sys.stdout.write(json.dumps(fields(message)) + "\n")
    else:
        console.print(
            line(message, None if View.is_wide or not console.is_terminal else console.width),
            soft_wrap=True,
        )
    sys.stdout.flush()


def line(message: BrowsedMessage, width: int | None) -> Text:
    """Store time, position, key and body of a message, cut to `width` characters. With None the
    line is not cut, and the time is exact.
    """
    stored = time_of(message.append_time_ms)
    when = (
        stored.isoformat(timespec="milliseconds")
        if width is None
        else relative(message.append_time_ms, time.time_ns() // 1_000_000)
    )
    queue = (
        f"{message.broker_group}/{message.partition}" if message.partition else message.broker_group
    )
    place = f"{queue}@{message.sequence}"
    key = "" if message.key_bytes is None else key_text(message.key_bytes)
    head = f"{when:<10}  {place}  {key + '  ' if key else ''}"
    text = head + visible(message.body.decode(errors="backslashreplace"))
    if width is not None and len(text) > width:
        text = text[: width - 1] + ELLIPSIS
    shown = Text(text)
    shown.stylize("dim", 0, min(len(f"{when:<10}  {place}"), len(text)))
    return shown


def fields(message: BrowsedMessage) -> dict[str, Any]:
    """The whole message for JSON."""
    place = {
        "subject": message.subject,
        "broker_group": message.broker_group,
        "partition": message.partition,
    }
    return place | stored_facts(message)
