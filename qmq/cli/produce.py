"""`qmq produce`: lines or JSON in, messages out."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer
from rich.progress import Progress

import qmq
from qmq.cli.output import SERVER, Server, errors, run, show
from qmq.errors import InvalidArgument, OrderMismatch

if TYPE_CHECKING:
    from qmq.client.ordered.producer import OrderedProducer
    from qmq.client.producer import Producer

Content = tuple[bytes, str | None, list[str] | None, dict[str, str] | None]


def produce(
    subject: Annotated[str, typer.Argument(help="What to send to.")],
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Read this instead of standard input.")] = None,
    form: Annotated[str, typer.Option("--format", help="'lines': each line is a body; 'json': each is an object.")] = "lines",
    key: Annotated[str | None, typer.Option(help="The key of every message.")] = None,
    tag: Annotated[list[str] | None, typer.Option(help="A tag of every message; may be repeated.")] = None,
    compression: Annotated[str | None, typer.Option(help="'zstd' or 'lz4'.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
    server: Server = SERVER,
) -> None:
    """Send each line as a message, from a file or standard input.

    With --format json a line is an object: {"body": ..., "key": "...", "tags": [...], "headers": {...}}; a body that is no string is sent
    as JSON.
    """
    if form not in ("lines", "json"):
        raise typer.BadParameter(f"format is 'lines' or 'json', not {form!r}")
    with file.open("rb") if file else nullcontext(sys.stdin.buffer) as source:
        total = file.stat().st_size if file else None
        stored = run(_produce(server, subject, _contents(source, form, key, tag), compression, total, quiet=as_json))
    rows = [(subject, group, messages) for group, messages in sorted(stored.items())]
    show("sent", ("subject", "broker group", "messages"), rows or [(subject, "", 0)], as_json=as_json)


async def _produce(
    server: str, subject: str, contents: Iterator[Content], compression: str | None, total: int | None, *, quiet: bool
) -> dict[str, int]:
    """How many messages each broker group stored. What is wrong with the first one is mostly wrong with all, so it goes alone."""
    first = next(contents, None)
    if first is None:
        return {}
    bar = Progress(console=errors, transient=True, disable=quiet or not errors.is_terminal)
    async with qmq.connect(server) as mq, await _begin(mq, subject, first, compression) as producer:
        with bar:
            task = bar.add_task(f"sending to {subject}", total=total, completed=len(first[0]) + 1)
            for content in contents:
                producer.send(*content)  # type: ignore[arg-type]  # an ordered one refuses a message without a key
                bar.advance(task, len(content[0]) + 1)
                if producer.full:
                    await producer.drain()
    return producer.stored_by_group


async def _begin(mq: qmq.Client, subject: str, first: Content, compression: str | None) -> Producer | OrderedProducer:
    """The producer that stored the first message. Which kind of subject it is, its broker says."""
    unordered = mq.producer(subject, compression=compression)
    try:
        await unordered.send(*first)
    except OrderMismatch:
        ordered = mq.ordered_producer(subject, compression=compression)
        await ordered.send(*first)  # type: ignore[arg-type]
        return ordered
    return unordered


def _contents(source: BinaryIO, form: str, key: str | None, tags: list[str] | None) -> Iterator[Content]:
    for number, line in enumerate(source, 1):
        body = line.rstrip(b"\r\n")
        if form == "lines":
            yield body, key, tags, None
        elif body:
            yield _parse(number, body, key, tags)


def _parse(number: int, line: bytes, key: str | None, tags: list[str] | None) -> Content:
    try:
        found: dict[str, Any] = json.loads(line)
        body = found["body"]
    except (ValueError, KeyError, TypeError) as cause:
        raise InvalidArgument(f'line {number} is no object with a "body": {cause}') from None
    data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
    return data, found.get("key", key), found.get("tags", tags), found.get("headers")
