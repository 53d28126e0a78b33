"""JSON that somebody else wrote.

Python's parser takes more than JSON: NaN, numbers beyond all floats, half of a surrogate pair, and thousands of arrays inside each other.
What it takes then fails where the value is shown, stored or sent on.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any, Final

DEPTH_MAX: Final = 200
"""The most arrays and objects inside each other: every caller can walk through so many by recursion."""


def parse_json(text: bytes | str) -> Any:
    """The value, which can be written as JSON again. Raises ValueError with a sentence for everything else."""
    try:
        value = json.loads(text, parse_constant=_no_constant, parse_float=_finite)
    except RecursionError:
        raise ValueError(f"more than {DEPTH_MAX} arrays or objects inside each other") from None
    require_depth(value)
    json.dumps(value, ensure_ascii=False).encode()  # fails for half of a surrogate pair: a UnicodeEncodeError is a ValueError
    return value


def require_depth(value: Any) -> None:
    """Raises ValueError if containers in a value are nested deeper than `DEPTH_MAX`."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(DEPTH_MAX):
        level = [inner for each in level for inner in _inside(each) if isinstance(inner, dict | list)]
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
