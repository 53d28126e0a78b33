"""The exception that a check raises.

The events of one seed as readable lines: `tools/run sim_order --replay SEED`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

RAISED: list[Violation] = []
"""The violations of the run that is under way: a check may be called by a coroutine whose caller takes exceptions for something else."""


@contextmanager
def own_violations() -> Iterator[None]:
    """Keep the violations of this run apart from those of other runs."""
    RAISED.clear()
    try:
        yield
    finally:
        RAISED.clear()


class Violation(AssertionError):
    """A property was violated. The message names the property and the observation."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        RAISED.append(self)


class Story:
    """Lines of (milliseconds, who, what)."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, str, str]] = []

    def tell(self, now_ms: int, name: str, what: str) -> None:
        """One line."""
        self.lines.append((now_ms, name, what))
