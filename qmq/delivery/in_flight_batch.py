"""The state of one batch in flight, for all senders. Pure.

A batch is *certainly not stored* when every try was answered by a refusal. A try without an answer,
or with an unknown outcome, makes the batch uncertain: then only its destination can decide.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from qmq.errors import QmqError


@dataclass(slots=True, eq=False, kw_only=True)
class InFlightBatch:
    size: int
    """The approximate bytes of the messages."""
    until: float = math.inf
    """When the batch times out, by the clock of its window."""
    attempts: int = 0
    unanswered: int = 0
    """Tries whose answer may still come."""
    is_uncertain: bool = False
    """Whether the outcome of any try is unknown."""
    is_out: bool = False
    """Whether a sealed partition answered that the batch is not stored there: then earlier tries do
    not matter.
    """
    first_question: int = 0
    """The first attempt after the window learned that the partition is no longer in
    the route; 0: none.
    """
    run: int = 0
    """The run of sending in which the batch was sent last."""
    is_gone: bool = False
    """Whether the batch is decided, or its messages are in another batch:
    late answers are ignored.
    """
    failure: QmqError | None = None
    """The error of the last try."""
    encoded: tuple[bytes, ...] | None = None
    """The encoded batch, kept so that a retry sends the same bytes."""

    @property
    def is_certain(self) -> bool:
        """Whether the batch is certainly not stored, and no earlier try can change that."""
        return self.is_out or not (self.unanswered or self.is_uncertain)
