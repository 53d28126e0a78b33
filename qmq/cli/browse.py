"""`qmq browse` and `qmq tail`: stored messages, without taking part in a group (docs/BROWSE.md)."""

from __future__ import annotations

import base64
import json
import re
import sys
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

import qmq
from qmq.cli.output import SERVER, Server, console, errors, fail, run
from qmq.cli.table import ELLIPSIS, View, relative
from qmq.cli.times import parse_duration, parse_when
from qmq.errors import InvalidArgument, QmqError
from qmq.operations.key_texts import key_text, parse_key
from qmq.printable import visible

if TYPE_CHECKING:
    from qmq.client.browsing import BrowsedMessage

Subject = Annotated[str, typer.Argument(help="The subject.")]
Key = Annotated[str | None, typer.Option("--key", help="Only messages of this key.")]
Tag = Annotated[list[str] | None, typer.Option("--tag", help="Only messages with any of these tags; may be repeated.")]
Grep = Annotated[str | None, typer.Option("--grep", help="Only messages whose body this regular expression finds something in.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print a JSON object for each message.")]
Partial = Annotated[bool, typer.Option("--partial", help="Go on without broker groups that cannot be read.")]
_MOMENT = "2026-11-24T09:00:00Z, or so long ago: 90s, 10m, 2h, 3d."


def browse(
    subject: Subject,
    at: Annotated[str | None, typer.Option("--at", help=f"Begin with messages stored then: {_MOMENT}")] = None,
    until: Annotated[str | None, typer.Option("--until", help=f"End before messages stored then: {_MOMENT}")] = None,
    key: Key = None,
    tag: Tag = None,
    grep: Grep = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=0, help="Stop after so many messages; 0 for no end.")] = 100,
    partial: Partial = False,
    as_json: AsJson = False,
    server: Server = SERVER,
) -> None:
    """Show stored messages, from the oldest on. No consumer group takes part: nothing is acknowledged, and consumers do not notice."""
    try:
        start, end = moment(at), moment(until)
        found = _pattern(grep)
        chosen: dict[str, Any] = {"start": start, "end": end, "key": _key(key), "tags_any": tag or (), "partial": partial}
        run(_print(server, subject, chosen, found, limit, as_json))
    except InvalidArgument as failure:
        fail(failure)


def tail(
    subject: Subject,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Begin with so many of the newest messages.")] = 10,
    key: Key = None,
    tag: Tag = None,
    grep: Grep = None,
    partial: Partial = False,
    as_json: AsJson = False,
    server: Server = SERVER,
) -> None:
    """Show the newest messages, and those that are stored from now on, until Ctrl-C. No consumer group takes part."""
    try:
        chosen: dict[str, Any] = {"last": lines, "follow": True, "key": _key(key), "tags_any": tag or (), "partial": partial}
        run(_print(server, subject, chosen, _pattern(grep), 0, as_json))
    except InvalidArgument as failure:
        fail(failure)


def moment(text: str | None) -> datetime | None:
    """A time, or one that lies so long in the past. Raises InvalidArgument."""
    if text is None:
        return None
    if "T" in text.upper() or ":" in text:
        return parse_when(text)
    return datetime.fromtimestamp(time.time(), UTC) - parse_duration(text)


def _key(text: str | None) -> bytes | None:
    return None if text is None else parse_key(text)


def _pattern(text: str | None) -> re.Pattern[bytes] | None:
    try:
        return None if text is None else re.compile(text.encode())
    except re.error as failure:
        raise InvalidArgument(f"{text!r} is no regular expression: {failure}") from None


async def _print(server: str, subject: str, chosen: dict[str, Any], pattern: re.Pattern[bytes] | None, limit: int, as_json: bool) -> None:
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
    """One message in a line."""
    if as_json:
        sys.stdout.write(json.dumps(fields(message)) + "\n")
    else:
        console.print(line(message, None if View.is_wide or not console.is_terminal else console.width), soft_wrap=True)
    sys.stdout.flush()


def line(message: BrowsedMessage, width: int | None) -> Text:
    """When it was stored, its place, its key and its body; cut to `width` characters, and exact if that is None."""
    stored = datetime.fromtimestamp(message.append_time_ms / 1000, UTC)
    when = stored.isoformat(timespec="milliseconds") if width is None else relative(message.append_time_ms, time.time_ns() // 1_000_000)
    queue = f"{message.broker_group}/{message.partition}" if message.partition else message.broker_group
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
    """The whole message, as JSON has it: `body` is null if it is no UTF-8, and `body_base64` is there always."""
    try:
        body: str | None = message.body.decode()
    except UnicodeDecodeError:
        body = None
    return {
        "subject": message.subject,
        "broker_group": message.broker_group,
        "partition": message.partition,
        "sequence": message.sequence,
        "id": str(message.id),
        "key": None if message.key_bytes is None else key_text(message.key_bytes),
        "tags": list(message.tags),
        "headers": {name: key_text(value) for name, value in message.headers.items()},
        "create_time_ms": message.create_time_ms,
        "append_time_ms": message.append_time_ms,
        "body": body,
        "body_base64": base64.b64encode(message.body).decode(),
    }
