"""How long a replica waits for others, and how often it looks by itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class NodeTiming:
    """All in seconds. Handed in by `Environment`, so that a test waits for what a replica does, and not for its next look."""

    known_wait_s: float = 3.0
    """How long a replica that knows its group waits for the coordination store before it takes part without."""
    view_retry_s: float = 0.1
    """Before the coordination store is listed again; twice as long after each failure."""
    view_retry_s_max: float = 5.0

    schedule_ask_s: float = 10.0
    """How long another replica may take to say what its schedule is, or to give a piece of it."""
    schedule_retry_s: float = 1.0
    """Before the other replicas are asked for their schedule again."""
    schedule_poll_s: float = 0.05
    """How often it is looked whether our own log has come to where the schedule is."""
    schedule_give_s: float = 0.2
    """How often a master without a schedule looks for somebody to hand over to."""


TIMING: Final = NodeTiming()
