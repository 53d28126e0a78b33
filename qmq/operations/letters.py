"""Selects dead letters of a group by an operator's conditions, and changes them before they are sent again. Pure.

    LetterEdit.parse(["customer.country=DE", "retries=0"], ["card"]).of(letter)

A field is named by its path in a JSON body, with dots between names. A value is JSON if it reads as JSON, and text otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from qmq.client.dead_letters import Choose, DeadLetter
from qmq.errors import InvalidArgument
from qmq.text import parse_json


@dataclass(frozen=True, slots=True)
class LetterEdit:
    """Changes to a letter. `body` replaces the whole body. Otherwise `fields` of the JSON body are set, and `removed` are removed."""

    body: bytes | None = None
    fields: tuple[tuple[str, Any], ...] = ()
    removed: tuple[str, ...] = ()

    @classmethod
    def parse(cls, fields: Iterable[str] = (), removed: Iterable[str] = (), body: str | None = None) -> LetterEdit:
        """`fields` are FIELD=VALUE. Raises InvalidArgument."""
        made = cls(None if body is None else body.encode(), tuple(map(_field, fields)), tuple(each.strip() for each in removed))
        if made.body is not None and (made.fields or made.removed):
            raise InvalidArgument("a body is replaced as a whole, or fields of it are changed: not both")
        for path in (*[path for path, _ in made.fields], *made.removed):
            if not all(path.split(".")):
                raise InvalidArgument(f"{path!r} is not a field: write NAME, or NAME.NAME for a field of a field")
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
            "set": [f"{path}={json.dumps(value, ensure_ascii=False)}" for path, value in self.fields],
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
        raise InvalidArgument(f"dead letter {letter.id} has no JSON object as its body: leave it out, or replace its body as a whole")
    return found


def _inside(body: dict[str, Any], names: Sequence[str], letter: DeadLetter, *, is_made: bool) -> dict[str, Any]:
    """The object at a path. Missing objects are created; for a removal only temporarily."""
    for name in names:
        found = body.setdefault(name, {}) if is_made else body.get(name, {})
        if not isinstance(found, dict):
            raise InvalidArgument(f"field {name!r} of dead letter {letter.id} is not an object, so it has no fields")
        body = found
    return body


def chosen_by(subject: str, ids: list[str], error: str, since: datetime | None) -> Choose:
    """A function that selects letters: all given conditions must hold. Raises InvalidArgument for an invalid message id."""
    wanted = {each.strip().lower() for each in ids}
    if any(len(each) != 32 for each in wanted):
        raise InvalidArgument("a message id has 32 hexadecimal digits: `qmq dlq show GROUP --json` gives them")
    since_ms = 0 if since is None else int((since if since.tzinfo else since.replace(tzinfo=UTC)).timestamp() * 1000)

    def choose(letter: DeadLetter) -> bool:
        return (
            (not subject or letter.subject == subject)
            and (not wanted or str(letter.id) in wanted)
            and error in letter.error
            and letter.dead_ms >= since_ms
        )

    return choose
