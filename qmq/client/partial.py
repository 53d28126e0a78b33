"""An answer of several broker groups, some of which may have been silent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

_T = TypeVar("_T")


class Partial(list[_T]):
    """What those said that answered. `silent`: the groups that did not, and why; empty if this is everything."""

    def __init__(self, found: Iterable[_T] = (), silent: Mapping[str, str] | None = None) -> None:
        super().__init__(found)
        self.silent: dict[str, str] = dict(silent or {})
