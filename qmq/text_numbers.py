"""Numbers in texts that somebody else wrote: headers of messages, forms, addresses, names of files; and how an address is written.

Python's own conversions are no grammar for them: "²".isdigit() holds and int("²") fails, int() refuses 5,000 digits with another error than
letters, float() takes "infinity" and "1_000", and a number above a bound is refused only where it is used.
"""

from __future__ import annotations

import math
import re
from typing import Final

PORT_MAX: Final = 65_535
INT64_MAX: Final = (1 << 63) - 1
_DECIMAL: Final = re.compile(r"[+-]?([0-9]{1,400}(\.[0-9]{0,400})?|\.[0-9]{1,400})(e[+-]?[0-9]{1,4})?", re.ASCII | re.IGNORECASE)
_INTEGER: Final = re.compile(r"[+-]?[0-9]{1,400}", re.ASCII)


def whole_number(text: str | bytes, most: int = INT64_MAX, least: int = 0) -> int | None:
    """The number from `least`, which is 0 or more, to `most` that consists of these ASCII digits; None for every other text."""
    if not text.isascii() or not text.isdigit() or len(text) > len(str(most)):
        return None
    found = int(text)
    return found if least <= found <= most else None


def number(text: str) -> int | float | None:
    """A decimal number as SQL and JSON write it: an int if it has neither a point nor an exponent, so that large ids compare exactly; None
    for every other text, and for what is beyond all floats.
    """
    if _INTEGER.fullmatch(text) is not None:
        return int(text)
    if _DECIMAL.fullmatch(text) is None:
        return None
    found = float(text)
    return found if math.isfinite(found) else None


def joined(host: str, port: int) -> str:
    """Host and port as one text. An IPv6 host gets its brackets, unless it has them; the folder of sockets gets the port as a name."""
    is_bare = ":" in host and not host.startswith(("[", "unix:"))
    return f"[{host}]:{port}" if is_bare else f"{host}:{port}"
