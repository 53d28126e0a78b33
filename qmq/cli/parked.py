"""`qmq dlq`: keys of ordered subjects that a group set aside because a message failed, with everything that follows for them.

A key is written as text, or `hex:00ff`, or `base64:AP8=`; so is what is printed, and what is printed can be given back.

A key may be parked in more than one partition, if the route changed meanwhile. A later partition always has the higher number, so keys are
given back from the lowest number on: that is the order in which they were sent.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

import qmq
from qmq.cli.output import SERVER, DryRun, Json, Server, run, show
from qmq.errors import InvalidArgument

if TYPE_CHECKING:
    from qmq.proto.v1 import control_pb2 as control

app = typer.Typer(no_args_is_help=True, help="Parked keys of ordered subjects: list, show, replay, skip.")

Subject = Annotated[str, typer.Argument(help="The subject; an ordered one.")]
Group = Annotated[str, typer.Argument(help="The consumer group.")]
Key = Annotated[str, typer.Argument(help="The key: text, hex:00ff or base64:AP8=.")]

_COLUMNS: Final = ("key", "partition", "logical partition", "messages", "first sequence")
_HEX: Final = "hex:"
_BASE64: Final = "base64:"


@app.command("list")
def list_keys(subject: Subject, group: Group, as_json: Json = False, server: Server = SERVER) -> None:
    """List the keys that a group set aside."""
    rows = [_row(each) for each in run(_parked(server, subject, group))]
    show(f"parked keys of group {group} on {subject}", _COLUMNS, rows, as_json=as_json)


@app.command("show")
def show_key(subject: Subject, group: Group, key: Key, as_json: Json = False, server: Server = SERVER) -> None:
    """Show where one key is set aside, in all ways of writing it."""

    async def _show() -> list[control.ParkedKey]:
        return chosen(await _parked(server, subject, group), key, group)

    found = run(_show())
    rows = [(*_row(each), _HEX + each.key.hex(), _BASE64 + base64.b64encode(each.key).decode()) for each in found]
    show(f"parked key of group {group} on {subject}", (*_COLUMNS, "hex", "base64"), rows, as_json=as_json)


@app.command("replay")
def replay(
    subject: Subject, group: Group, key: Key, dry_run: DryRun = False, as_json: Json = False, server: Server = SERVER
) -> None:
    """Give a key's messages back to the group, in order, before anything newer of the key."""
    _unpark(subject, group, key, True, dry_run, as_json, server)


@app.command("skip")
def skip(subject: Subject, group: Group, key: Key, dry_run: DryRun = False, as_json: Json = False, server: Server = SERVER) -> None:
    """Count a key's messages as done, for this group and for good; the key flows again from the next one on."""
    _unpark(subject, group, key, False, dry_run, as_json, server)


def _unpark(subject: str, group: str, key: str, is_replay: bool, dry_run: bool, as_json: bool, server: str) -> None:
    async def _do() -> list[tuple[Any, ...]]:
        async with qmq.connect(server) as mq:
            rows = []
            for each in chosen(await mq.metadata.parked(subject, group), key, group):
                messages = each.messages
                if not dry_run:
                    messages = await mq.metadata.unpark(subject, group, each.partition, each.key, replay=is_replay)
                rows.append((key_text(each.key), each.partition, messages))
            return rows

    done = "replayed" if is_replay else "skipped"
    show(f"would be {done}" if dry_run else done, ("key", "partition", "messages"), run(_do()), as_json=as_json)


async def _parked(server: str, subject: str, group: str) -> list[control.ParkedKey]:
    async with qmq.connect(server) as mq:
        found = await mq.metadata.parked(subject, group)
    return sorted(found, key=lambda each: (each.key, each.partition))


def _row(each: control.ParkedKey) -> tuple[Any, ...]:
    return (key_text(each.key), each.partition, each.logical_partition, each.messages, each.first_sequence)


def chosen(parked: Sequence[control.ParkedKey], key: str, group: str) -> list[control.ParkedKey]:
    """Where a key is parked, from the oldest partition on. Raises InvalidArgument if it is nowhere."""
    wanted = parse_key(key)
    found = sorted((each for each in parked if each.key == wanted), key=lambda each: each.partition)
    if not found:
        raise InvalidArgument(f"group {group!r} has not set the key {key!r} aside: `qmq dlq list` shows which it has")
    return found


def key_text(key: bytes) -> str:
    """A key as text if it is printable and cannot be taken for anything else, in hexadecimal digits otherwise."""
    try:
        text = key.decode()
    except UnicodeDecodeError:
        return _HEX + key.hex()
    is_plain = text.isprintable() and text == text.strip() and not text.startswith((_HEX, _BASE64))
    return text if text and is_plain else _HEX + key.hex()


def parse_key(text: str) -> bytes:
    """The inverse, and base64. Raises InvalidArgument."""
    try:
        if text.startswith(_HEX):
            return bytes.fromhex(text.removeprefix(_HEX))
        if text.startswith(_BASE64):
            return base64.b64decode(text.removeprefix(_BASE64), validate=True)
    except (ValueError, binascii.Error) as cause:
        raise InvalidArgument(f"{text!r} is no key: {cause}; a key is text, hex:00ff or base64:AP8=") from None
    return text.encode()
