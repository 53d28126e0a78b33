"""An answer that was collected from several broker groups, of which some may not have answered."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

_T = TypeVar("_T")


class Partial(list[_T]):
    """The answers of the groups that answered. `silent` has the groups that did not answer, with the reasons; empty if the answer is
    complete.
    """

    def __init__(self, found: Iterable[_T] = (), silent: Mapping[str, str] | None = None) -> None:
        super().__init__(found)
        self.silent: dict[str, str] = dict(silent or {})
