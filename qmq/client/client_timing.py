"""The client's timeouts and intervals as one value, so that tests can pass shorter ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Final

from qmq.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class ClientTiming:
    """All values are in seconds. A tuple lists the pauses before one try after the other; the last one repeats."""

    delivery_timeout_s: float = 120.0
    """How long a message may take to be stored, and how long the client looks for its subject."""
    mistake_s: float = 3.0
    """How long the client waits for servers that it never reached, if names have no address or TLS fails. With one try at a DNS that does
    not answer (`qmq.network.RESOLVE_S`) that is less than five seconds.
    """
    refresh_s: float = 30.0
    """Placements older than this are refreshed at their next use."""

    idle_producer_s: float = 60.0
    """The shared producer of a subject is kept for this long after the last `send`, and for twice as long at most."""

    answer_s: float = 15.0
    """A batch that has no answer after this time is sent again."""
    gather_s: float = 0.005
    """While a broker group has much to answer, an ordered producer's open batch that no caller awaits gathers messages for this long."""
    stall_s: float = 1.0
    """A broker group that has not answered for this long while batches are on their way to it counts as stalled."""
    fenced_s: float = 0.5
    """How long the client asks a fenced partition before it gives up the batches that may be stored there."""
    reauth_s: float = 5.0
    """How often a connection looks for a newer token."""

    session_retry_s: tuple[float, ...] = (0.02, 0.1, 0.3, 1.0)
    """Pauses before a consumer attaches again, or sends acknowledgements again that found no quorum."""
    hand_in_retry_s: tuple[float, ...] = (0.1, 0.3, 1.0)
    """Pauses before acknowledgements of an earlier client are handed in again."""
    cancel_s: float = 5.0
    """How long a cancelled handler may take to end. A handler that does not end is abandoned: its message goes back when the consumer
    leaves.
    """

    outbox_delivery_s: float = 30.0
    """How long a message of an outbox may take to be stored; after that a watchdog tries again."""
    outbox_look_s: float = 1.0
    """How often a watchdog looks for unsent messages in an outbox."""

    decide_s: float = 30.0
    """How long the client asks for the outcome of a change to a delayed message. A delay group elects a new master much faster than this.
    """
    decide_retry_s: tuple[float, ...] = (0.05, 0.1, 0.2, 0.5, 1.0)

    slow_call_s: float = 60.0
    """For calls that take long: handing over a mastership, letting a replica catch up, waiting until the lease of a
    lost broker group ends.
    """


TIMING: Final = ClientTiming()


def timing_with(delivery_timeout: timedelta | None) -> ClientTiming:
    """The usual values, but for the deliveries' if one is given. Raises InvalidArgument."""
    if delivery_timeout is None:
        return TIMING
    if not isinstance(delivery_timeout, timedelta) or delivery_timeout <= timedelta(0):
        raise InvalidArgument(f"delivery_timeout is a timedelta longer than 0, not {delivery_timeout!r}")
    return replace(TIMING, delivery_timeout_s=delivery_timeout.total_seconds())


def pause_s(pauses_s: Sequence[float], tries: int) -> float:
    """The pause after `tries` failed tries."""
    return pauses_s[min(tries, len(pauses_s) - 1)]
