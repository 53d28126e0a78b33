"""The state of one batch in flight, for all senders. Pure.

A batch is *certainly not stored* when every try was answered so. A try without an answer, or with an unknown outcome, leaves the batch
uncertain: then only its destination knows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from qmq.errors import QmqError


@dataclass(slots=True, eq=False, kw_only=True)
class InFlightBatch:
    size: int
    """About how many bytes its messages have."""
    until: float = math.inf
    """When it times out, on the clock of its window."""
    attempts: int = 0
    unanswered: int = 0
    """Tries whose answer may still come."""
    is_uncertain: bool = False
    """Whether a try ended with an unknown outcome."""
    is_out: bool = False
    """Whether its sealed partition said that it is not stored there: then earlier tries do not matter."""
    first_question: int = 0
    """The first attempt after the partition was known to be left; 0: none."""
    run: int = 0
    """The window's run in which it was sent last."""
    is_gone: bool = False
    """Whether it is decided, or its messages are in another batch: late answers are ignored."""
    failure: QmqError | None = None
    """Why the last try failed."""
    encoded: tuple[bytes, ...] | None = None
    """Kept, so that a retry sends the same bytes."""

    @property
    def is_certain(self) -> bool:
        """Whether it is certainly not stored, and no try can change that any more."""
        return self.is_out or not (self.unanswered or self.is_uncertain)
