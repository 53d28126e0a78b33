"""A replica's timeouts and intervals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class NodeTiming:
    """In seconds. Part of `Environment`, so that tests can pass shorter ones."""

    known_wait_s: float = 3.0
    """The time that a replica that knows its group waits for the coordination store, before it starts without the store."""
    generation_s: float = 60.0
    """How often a replica that works registers its next generation."""
    stale_routes_s: float = 5.0
    """How often a master compares its seals with the routes in the coordination store."""
    view_retry_s: float = 0.1
    """Pause before the coordination store is listed again; doubled after each failure."""
    view_retry_s_max: float = 5.0

    schedule_ask_s: float = 10.0
    """The deadline of another replica's answer that describes its schedule or has a piece of the schedule."""
    schedule_retry_s: float = 1.0
    """Pause before the other replicas are asked for their schedule again."""
    schedule_poll_s: float = 0.05
    """How often a replica checks whether its own log has reached the copied schedule."""
    schedule_give_s: float = 0.2
    """How often a master without a schedule looks for a replica to hand over to."""


TIMING: Final = NodeTiming()
