"""What is known of one batch on its way, whoever sends it. Pure.

A batch is *certainly not stored* when every try of it was answered so. A try that nobody answered, or that ended in "unknown", leaves the
batch uncertain: then only its destination can say.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from qmq.errors import QmqError


@dataclass(slots=True, eq=False, kw_only=True)
class InFlightBatch:
    size: int
    """Bytes of its messages, about."""
    until: float = math.inf
    """When its time is over, on the clock that its window is driven by."""
    attempts: int = 0
    unanswered: int = 0
    """Tries whose answer may still come."""
    is_uncertain: bool = False
    """Whether a try ended without anybody knowing."""
    is_out: bool = False
    """Whether its partition, sealed, said that the batch is not in it: then no earlier try counts any more."""
    first_question: int = 0
    """The first attempt that was made when the partition was known to be left; 0: none."""
    run: int = 0
    """The window's run in which it was sent last."""
    is_gone: bool = False
    """Whether it is decided, or another batch stands for its messages: answers that come late mean nothing."""
    failure: QmqError | None = None
    """Why the last try failed."""
    encoded: tuple[bytes, ...] | None = None
    """Kept, so that a retry sends the same bytes."""

    @property
    def is_certain(self) -> bool:
        """Whether it is certainly not stored, and no try of it can change that any more."""
        return self.is_out or not (self.unanswered or self.is_uncertain)
