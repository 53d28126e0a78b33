"""The exception that a check raises."""

from __future__ import annotations

RAISED: list[Violation] = []
"""Those of the run that is under way: a check may be called by a coroutine whose caller takes exceptions for something else."""


class Violation(AssertionError):
    """A property was violated. The message names the property and the observation."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        RAISED.append(self)
