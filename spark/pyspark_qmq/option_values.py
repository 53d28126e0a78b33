"""The options that a user gave to a read or a write, by name and with types. Pure.

Names are case-insensitive. An unknown name is refused with the nearest known one.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any

from qmq.errors import InvalidArgument
from qmq.json_values import parse_json
from qmq.text_numbers import INT64_MAX, whole_number


class OptionValues:
    """The given options. `known` are their names, `ignored` lower-case names that Spark adds. Raises InvalidArgument for other names."""

    def __init__(self, options: Mapping[str, str], known: Collection[str], ignored: Collection[str] = ()) -> None:
        lower = {name.lower() for name in known}
        self._values = {str(name).lower(): str(value) for name, value in options.items()}
        for name in self._values:
            if name not in lower and name not in ignored:
                raise unknown_option(name, known)

    def text(self, name: str, default: str = "") -> str:
        """The value as given, without white space around it."""
        return self._values.get(name.lower(), default).strip()

    def has(self, name: str) -> bool:
        """Whether the option was given."""
        return name.lower() in self._values

    def number(self, name: str, least: int = 0, most: int | None = None) -> int | None:
        """The value as an integer; None if the option was not given."""
        if not self.has(name):
            return None
        text = self.text(name)
        found = whole_number(text, INT64_MAX if most is None else most, least)
        if found is None:
            wanted = f"of {least} or more" if most is None else f"from {least} to {most}"
            raise InvalidArgument(f"option {name} must be an integer {wanted}, not {text[:100]!r}")
        return found

    def flag(self, name: str, default: bool) -> bool:
        text = self.text(name, str(default)).lower()
        if text not in ("true", "false"):
            raise InvalidArgument(f"option {name} must be true or false, not {text!r}")
        return text == "true"

    def words(self, name: str) -> tuple[str, ...]:
        """The value as a list: separated by commas, or a JSON array of strings."""
        text = self.text(name)
        if not text.startswith("["):
            return tuple(word.strip() for word in text.split(",") if word.strip())
        found = self.json(name)
        if not all(isinstance(each, str) for each in found):
            raise InvalidArgument(f"option {name} must be a JSON array of strings, not {text!r}")
        return tuple(found)

    def json(self, name: str) -> Any:
        """The value, parsed as JSON."""
        try:
            return parse_json(self.text(name))
        except ValueError as cause:
            raise InvalidArgument(f"option {name} is not JSON: {cause}") from None


def unknown_option(name: str, known: Collection[str]) -> InvalidArgument:
    """The error for an unknown option, with the nearest known name."""
    lower = {each.lower(): each for each in known}
    near = difflib.get_close_matches(name.lower(), lower, 1, 0.5)
    hint = f"did you mean {lower[near[0]]!r}?" if near else f"options: {', '.join(known)}"
    return InvalidArgument(f"there is no option {name!r}: {hint}")
