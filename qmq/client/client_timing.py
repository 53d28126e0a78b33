"""How long a client waits for others, and how often it looks: one value, handed in, so that a test need not wait as an operator may."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class ClientTiming:
    """All in seconds. Where several are given they are the pauses before one try after the other; the last one stays."""

    delivery_timeout_s: float = 120.0
    """How long a message may take until it is stored, and the client until it knows where its subject is."""
    refresh_s: float = 30.0
    """Placements that are older are asked for again when they are used."""

    answer_s: float = 15.0
    """A broker that has not answered a batch by then is asked again."""
    stall_s: float = 1.0
    """A broker group that has answered nothing for so long while batches are with it is in trouble."""
    fenced_s: float = 0.5
    """How long a fenced partition is asked before what it may have is given up."""
    reauth_s: float = 5.0
    """How often a connection looks for a newer token."""

    session_retry_s: tuple[float, ...] = (0.02, 0.1, 0.3, 1.0)
    """Before a consumer attaches again, or has its acknowledgements answered that found no quorum."""
    hand_in_retry_s: tuple[float, ...] = (0.1, 0.3, 1.0)
    """Before acknowledgements that an earlier client left are handed in again."""
    cancel_s: float = 5.0
    """How long a handler may take to be cancelled. One that will not be is left alone: its message goes back when the consumer leaves."""

    outbox_delivery_s: float = 30.0
    """How long a message of an outbox may take until it is stored; what is not by then is tried again by a watchdog."""
    outbox_look_s: float = 1.0
    """How often a watchdog looks for messages that were left in an outbox."""

    decide_s: float = 30.0
    """How long the client asks what became of a change of a delayed message. A lost delay group has a new master long before."""
    decide_retry_s: tuple[float, ...] = (0.05, 0.1, 0.2, 0.5, 1.0)

    slow_call_s: float = 60.0
    """Handing over a mastership, letting a replica catch up before it counts, or waiting for a lost broker group's lease to end."""
    publish_look_s: float = 0.2
    """How often it is asked whether a change that goes on by itself is published."""


TIMING: Final = ClientTiming()


def pause_s(pauses_s: Sequence[float], tries: int) -> float:
    """The pause after so many tries that failed before this one."""
    return pauses_s[min(tries, len(pauses_s) - 1)]
