"""The exception that a check raises."""

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
