"""Texts that somebody else wrote: made safe for a terminal, read as numbers, read as JSON; and how
an address is written. Pure.

An error of a nack, the reason of a pause or a body may contain ESC sequences that set the clipboard
or the colours, or characters that reverse the order of the text after them. Shown as `` and `‮`
they have no effect.

Numbers are in headers of messages, forms, addresses, names of files. Python's own conversions are
no grammar for them: "²".isdigit() holds and int("²") fails, int() refuses 5,000 digits with another
error than letters, float() takes "infinity" and "1_000", and a number above a bound is refused only
where it is used.

Python's parser takes more than JSON: NaN, numbers beyond all floats, half of a surrogate pair, and
thousands of arrays inside each other. What it takes then fails where the value is shown, stored or
sent on.
"""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections.abc import Iterable
from typing import Any, Final

_HIDDEN: Final = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
JOINERS: Final = frozenset("\u200c\u200d")
"""Scripts and emoji need these characters, which affect only their neighbours."""
KEPT: Final = JOINERS | frozenset("\n\t")


def visible(text: str, kept: frozenset[str] = KEPT) -> str:
    """The text with control and format characters and lone surrogates as escapes; characters in
    `kept` stay.
    """
    if text.isprintable():
        return text
    return "".join(
        [
            each if each in kept or unicodedata.category(each) not in _HIDDEN else _escaped(each)
            for each in text
        ]
    )


def _escaped(each: str) -> str:
    number = ord(each)
    if number < 0x100:
        return f"\\x{number:02x}"
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


PORT_MAX: Final = 65_535
INT64_MAX: Final = (1 << 63) - 1
_DECIMAL: Final = re.compile(
    r"[+-]?([0-9]{1,400}(\.[0-9]{0,400})?|\.[0-9]{1,400})(e[+-]?[0-9]{1,4})?",
    re.ASCII | re.IGNORECASE,
)
_INTEGER: Final = re.compile(r"[+-]?[0-9]{1,400}", re.ASCII)


def whole_number(text: str | bytes, most: int = INT64_MAX, least: int = 0) -> int | None:
    """The number from `least`, which is 0 or more, to `most` that consists of these ASCII digits;
    None for every other text.
    """
    if not text.isascii() or not text.isdigit() or len(text) > len(str(most)):
        return None
    found = int(text)
    return found if least <= found <= most else None


def number(text: str) -> int | float | None:
    """A decimal number as SQL and JSON write it: an int if it has neither a point nor an exponent,
    so that large ids compare exactly; None for every other text, and for what is beyond all floats.
    """
    if _INTEGER.fullmatch(text) is not None:
        return int(text)
    if _DECIMAL.fullmatch(text) is None:
        return None
    found = float(text)
    return found if math.isfinite(found) else None


def joined(host: str, port: int) -> str:
    """Host and port as one text. An IPv6 host gets its brackets, unless it has them; the folder of
    sockets gets the port as a name.
    """
    is_bare = ":" in host and not host.startswith(("[", "unix:"))
    return f"[{host}]:{port}" if is_bare else f"{host}:{port}"


DEPTH_MAX: Final = 200
"""The most arrays and objects inside each other:
every caller can walk through so many by recursion.
"""


def parse_json(text: bytes | str) -> Any:
    """The value, which can be written as JSON again. Raises ValueError with a sentence for
    everything else.
    """
    try:
        value = json.loads(text, parse_constant=_no_constant, parse_float=_finite)
    except RecursionError:
        raise ValueError(f"more than {DEPTH_MAX} arrays or objects inside each other") from None
    require_depth(value)
    json.dumps(
        value, ensure_ascii=False
    ).encode()  # fails for half of a surrogate pair: a UnicodeEncodeError is a ValueError
    return value


def require_depth(value: Any) -> None:
    """Raises ValueError if containers in a value are nested deeper than `DEPTH_MAX`."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(DEPTH_MAX):
        level = [
            inner for each in level for inner in _inside(each) if isinstance(inner, dict | list)
        ]
        if not level:
            return
    raise ValueError(f"more than {DEPTH_MAX} arrays or objects inside each other")


def _inside(value: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is no JSON")


def _finite(text: str) -> float:
    found = float(text)
    if not math.isfinite(found):
        raise ValueError(f"the number {text[:40]} is too large")
    return found
