"""Dead letters of a group: selected by an operator's conditions, and changed before they are sent
again; and parked keys.

    LetterEdit.parse(["customer.country=DE", "retries=0"], ["card"]).of(letter)

A field is named by its path in a JSON body, with dots between names. A value is JSON if it reads as
JSON, and text otherwise.

*Parked keys* are keys of ordered subjects that a group set aside because a message failed, together
with all later messages of the key. They are the dead letters of ordered subjects, under the same
verbs of `qmq dlq`.

A key is written as text, as `hex:00ff` or as `base64:AP8=`. Printed keys have the same forms and
can be used as input.

A key that was parked before a route change is also parked in the successor partitions, even if they
hold no message of the key yet. A successor always has a higher number, so a key is unparked in
ascending order of partitions, which is the order of sending.
"""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from qmq.client.dead_letters import Choose, DeadLetter
from qmq.client.metadata.cache import Partial
from qmq.errors import InvalidArgument, NotConnected, QmqError, Unavailable, UnknownGroup
from qmq.operations.text import BASE64, HEX, key_text, parse_key
from qmq.text import parse_json

if TYPE_CHECKING:
    from qmq.client.client import Client
    from qmq.proto.v1 import control_pb2 as control


@dataclass(frozen=True, slots=True)
class LetterEdit:
    """Changes to a letter. `body` replaces the whole body. Otherwise `fields` of the JSON body are
    set, and `removed` are removed.
    """

    body: bytes | None = None
    fields: tuple[tuple[str, Any], ...] = ()
    removed: tuple[str, ...] = ()

    @classmethod
    def parse(
        cls, fields: Iterable[str] = (), removed: Iterable[str] = (), body: str | None = None
    ) -> LetterEdit:
        """`fields` are FIELD=VALUE. Raises InvalidArgument."""
        made = cls(
            None if body is None else body.encode(),
            tuple(map(_field, fields)),
            tuple(each.strip() for each in removed),
        )
        if made.body is not None and (made.fields or made.removed):
            raise InvalidArgument(
                "a body is replaced as a whole, or fields of it are changed: not both"
            )
        for path in (*[path for path, _ in made.fields], *made.removed):
            if not all(path.split(".")):
                raise InvalidArgument(
                    f"{path!r} is not a field: write NAME, or NAME.NAME for a field of a field"
                )
        return made

    @property
    def is_empty(self) -> bool:
        """True if there are no changes."""
        return self == LetterEdit()

    def of(self, letter: DeadLetter) -> DeadLetter:
        """The letter with the changes. Raises InvalidArgument if its body has no fields."""
        if self.body is not None:
            return replace(letter, body=self.body)
        if not self.fields and not self.removed:
            return letter
        body = _object(letter)
        for path, value in self.fields:
            place = _inside(body, path.split(".")[:-1], letter, is_made=True)
            place[path.split(".")[-1]] = value
        for path in self.removed:
            place = _inside(body, path.split(".")[:-1], letter, is_made=False)
            place.pop(path.split(".")[-1], None)
        return replace(letter, body=json.dumps(body, ensure_ascii=False).encode())

    def options(self) -> dict[str, Any]:
        """The changes as options of `qmq dlq replay`."""
        body = None if self.body is None else self.body.decode()
        return {
            "set": [
                f"{path}={json.dumps(value, ensure_ascii=False)}" for path, value in self.fields
            ],
            "unset": self.removed,
            "body": body,
        }


def _field(text: str) -> tuple[str, Any]:
    path, equals, value = text.partition("=")
    if not equals:
        raise InvalidArgument(f"{text!r} is not an assignment: write FIELD=VALUE")
    try:
        return path.strip(), parse_json(value)
    except ValueError:
        return path.strip(), value.strip()


def _object(letter: DeadLetter) -> dict[str, Any]:
    try:
        found = parse_json(letter.body)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise InvalidArgument(
            f"dead letter {letter.id} has no JSON object as its body: leave it out, or "
            "replace its body as a whole"
        )
    return found


def _inside(
    body: dict[str, Any], names: Sequence[str], letter: DeadLetter, *, is_made: bool
) -> dict[str, Any]:
    """The object at a path. Missing objects are created; for a removal only temporarily."""
    for name in names:
        found = body.setdefault(name, {}) if is_made else body.get(name, {})
        if not isinstance(found, dict):
            raise InvalidArgument(
                f"field {name!r} of dead letter {letter.id} is not an object, so it has no fields"
            )
        body = found
    return body


def chosen_by(subject: str, ids: list[str], error: str, since: datetime | None) -> Choose:
    """A function that selects letters: all given conditions must hold. Raises InvalidArgument for
    an invalid message id.
    """
    wanted = {each.strip().lower() for each in ids}
    if any(len(each) != 32 for each in wanted):
        raise InvalidArgument(
            "a message id has 32 hexadecimal digits: `qmq dlq show GROUP --json` gives them"
        )
    since_ms = (
        0
        if since is None
        else int((since if since.tzinfo else since.replace(tzinfo=UTC)).timestamp() * 1000)
    )

    def choose(letter: DeadLetter) -> bool:
        return (
            (not subject or letter.subject == subject)
            and (not wanted or str(letter.id) in wanted)
            and error in letter.error
            and letter.dead_ms >= since_ms
        )

    return choose


Row = tuple[Any, ...]
COLUMNS: Final = ("key", "logical partition", "messages", "partitions", "may be passed")
MORE_COLUMNS: Final = (
    "key",
    "partition",
    "logical partition",
    "messages",
    "first sequence",
    "hex",
    "base64",
)
FOLLOW_S: Final = 30.0
"""The time for which `unparked` retries while a partition's master changes."""
AGAIN_S: Final = 0.2


async def listed(mq: Client, subject: str, group: str) -> Partial[Row]:
    """The parked keys of a group, each once, with the partitions that hold its messages."""
    found = await _parked(mq, subject, group)
    by_key: dict[bytes, list[control.ParkedKey]] = {}
    for each in found:
        by_key.setdefault(each.key, []).append(each)
    rows: list[Row] = []
    for key, parts in by_key.items():
        places = [each.partition for each in parts if each.messages]
        passed = any(each.may_be_passed for each in parts if each.messages)
        rows.append(
            (
                key_text(key),
                parts[0].logical_partition,
                sum(each.messages for each in parts),
                places,
                passed,
            )
        )
    return Partial(rows, found.silent)


async def shown(mq: Client, subject: str, group: str, key: str) -> list[Row]:
    """One parked key with its partitions, in every notation."""
    found = chosen(await _parked(mq, subject, group, parse_key(key)), key, group)
    return [
        (*_row(each), HEX + each.key.hex(), BASE64 + base64.b64encode(each.key).decode())
        for each in found
    ]


async def unparked(
    mq: Client, subject: str, group: str, key: str, *, is_replay: bool, dry_run: bool
) -> list[Row]:
    """Deliver a parked key's messages to the group again, in order and before newer ones of the
    key; or skip them for good.

    Follows a change of master. Raises InvalidArgument if the key is not parked, and Incomplete with
    the partitions already done.
    """
    parts = await _parts(mq, subject, group, key)
    if dry_run:
        return [(key_text(each.key), each.partition, each.messages) for each in parts]
    rows: list[Row] = []
    until = time.monotonic() + FOLLOW_S
    while parts:
        each = parts[0]
        try:
            count = await mq.metadata.unpark(
                subject, group, each.partition, each.key, replay=is_replay
            )
        except QmqError as failure:
            if not isinstance(failure, Unavailable | UnknownGroup) or time.monotonic() > until:
                raise _so_far(rows, failure) from failure
            await asyncio.sleep(AGAIN_S)
            parts = await _left(mq, subject, group, each.key, rows)
            if each.partition in [part.partition for part in parts]:
                continue
            count = each.messages  # The broker had unparked the key, and the answer was lost.
        rows.append((key_text(each.key), each.partition, count))
        parts = await _left(mq, subject, group, each.key, rows)
    return rows


async def _parts(mq: Client, subject: str, group: str, key: str) -> list[control.ParkedKey]:
    found = await mq.metadata.parked(subject, group, key=parse_key(key))
    # A silent broker group may hold older messages of the key. Delivered after the newer ones, they
    # would break the order.
    if found.silent:
        raise NotConnected(f"nothing was done: {'; '.join(found.silent.values())}")
    return chosen(found, key, group)


async def _left(
    mq: Client, subject: str, group: str, key: bytes, rows: Sequence[Row]
) -> list[control.ParkedKey]:
    """The partitions where the key is still parked: a route change may have passed it on.
    Partitions already done are left out, even if the key failed there again.

    Raises NotConnected while a broker group is silent.
    """
    until, done = time.monotonic() + FOLLOW_S, {row[1] for row in rows}
    while (found := await mq.metadata.parked(subject, group, key=key)).silent:
        if time.monotonic() > until:
            raise _so_far(rows, NotConnected("; ".join(found.silent.values())))
        await asyncio.sleep(AGAIN_S)
    left = [each for each in found if each.key == key and each.partition not in done]
    return sorted(left, key=lambda each: each.partition)


def _so_far(rows: Sequence[Row], failure: QmqError) -> QmqError:
    """The error, extended by what was done before it."""
    places = ", ".join(str(row[1]) for row in rows)
    done = (
        f"{sum(row[2] for row in rows)} messages of the key were done (partition {places})"
        if rows
        else "no message of the key was changed"
    )
    return type(failure)(f"{done}; then: {failure.message}", outcome=failure.outcome)


async def _parked(
    mq: Client, subject: str, group: str, key: bytes | None = None
) -> Partial[control.ParkedKey]:
    """All parked keys, as many as fit into an answer; or one, wherever it is."""
    found = await mq.metadata.parked(subject, group, key=key)
    return Partial(sorted(found, key=lambda each: (each.key, each.partition)), found.silent)


def _row(each: control.ParkedKey) -> tuple[Any, ...]:
    return (
        key_text(each.key),
        each.partition,
        each.logical_partition,
        each.messages,
        each.first_sequence,
    )


def chosen(parked: Sequence[control.ParkedKey], key: str, group: str) -> list[control.ParkedKey]:
    """The partitions where a key is parked, oldest first.
    Raises InvalidArgument if there are none.
    """
    wanted = parse_key(key)
    found = sorted((each for each in parked if each.key == wanted), key=lambda each: each.partition)
    if not found:
        raise InvalidArgument(
            f"group {group!r} has not parked the key {key!r}: `qmq dlq list SUBJECT GROUP` "
            "shows its parked keys"
        )
    return found
