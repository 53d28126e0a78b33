"""Keys of ordered subjects that a group set aside because a message failed, with everything that follows for them: the dead letters of
ordered subjects, under the same verbs of `qmq dlq`.

A key is written as text, or `hex:00ff`, or `base64:AP8=`; so is what is printed, and what is printed can be given back.

A key may be parked in more than one partition, if the route changed meanwhile. A later partition always has the higher number, so keys are
given back from the lowest number on: that is the order in which they were sent.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import qmq
from qmq.client.partial import Partial
from qmq.errors import InvalidArgument, NotConnected

if TYPE_CHECKING:
    from qmq.proto.v1 import control_pb2 as control

Row = tuple[Any, ...]
COLUMNS: Final = ("key", "partition", "logical partition", "messages", "first sequence")
MORE_COLUMNS: Final = (*COLUMNS, "hex", "base64")
_HEX: Final = "hex:"
_BASE64: Final = "base64:"


async def listed(server: str, subject: str, group: str) -> Partial[Row]:
    """The keys that a group set aside."""
    found = await _parked(server, subject, group)
    return Partial([_row(each) for each in found], found.silent)


async def shown(server: str, subject: str, group: str, key: str) -> list[Row]:
    """Where one key is set aside, in all ways of writing it."""
    found = chosen(await _parked(server, subject, group), key, group)
    return [(*_row(each), _HEX + each.key.hex(), _BASE64 + base64.b64encode(each.key).decode()) for each in found]


async def unparked(server: str, subject: str, group: str, key: str, *, is_replay: bool, dry_run: bool) -> list[Row]:
    """Give a key's messages back to the group, in order, before anything newer of the key; or count them as done, for good."""
    async with qmq.connect(server) as mq:
        rows = []
        found = await mq.metadata.parked(subject, group)
        # An older part of the key may lie where nobody answers: given back behind the newer ones, it would break the order.
        if found.silent:
            raise NotConnected(f"nothing was done: {'; '.join(found.silent.values())}")
        for each in chosen(found, key, group):
            messages = each.messages
            if not dry_run:
                messages = await mq.metadata.unpark(subject, group, each.partition, each.key, replay=is_replay)
            rows.append((key_text(each.key), each.partition, messages))
        return rows


async def _parked(server: str, subject: str, group: str) -> Partial[control.ParkedKey]:
    async with qmq.connect(server) as mq:
        found = await mq.metadata.parked(subject, group)
    return Partial(sorted(found, key=lambda each: (each.key, each.partition)), found.silent)


def _row(each: control.ParkedKey) -> tuple[Any, ...]:
    return (key_text(each.key), each.partition, each.logical_partition, each.messages, each.first_sequence)


def chosen(parked: Sequence[control.ParkedKey], key: str, group: str) -> list[control.ParkedKey]:
    """Where a key is parked, from the oldest partition on. Raises InvalidArgument if it is nowhere."""
    wanted = parse_key(key)
    found = sorted((each for each in parked if each.key == wanted), key=lambda each: each.partition)
    if not found:
        raise InvalidArgument(f"group {group!r} has not set the key {key!r} aside: `qmq dlq list SUBJECT GROUP` shows which it has")
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
