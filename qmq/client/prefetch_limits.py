"""How the attachments of one consumer share what it may hold: `prefetch` messages and `prefetch_bytes` bytes in all. Pure.

A pull that waits at a broker reserves what it asked for, so the total is never exceeded; and an idle queue must not reserve what a busy one
could use. So each attachment asks for little at first (`START`), for four times as much when it got all it asked for, and for
little again when it got nothing; and none may take the last `START` messages that each other one needs to begin. An only one asks for all,
but for what a second one would need to begin.

When the total is smaller than two messages an attachment, the attachments take turns: a pull then waits only briefly, so that a message
in another queue waits no longer than a round.

Worked example: prefetch 2,000, three attachments. Two idle ones wait with 64 each; the busy one grows 64, 256, 1,024, to 1,872.

Bytes are those of the batches, as they came, a message counting for its part of its batch. How many a pull brings is known when it has: a
batch is never cut, so the last one may exceed the total, and then nobody pulls until there is room again. Each attachment may always
take its part of one half, so that idle ones reserve no more than that. Who holds nothing may pull, however little the total is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

from qmq import limits
from qmq.errors import InvalidArgument

START: Final = 64
GROWTH: Final = 4
WAIT_MS: Final = 20_000
TURN_WAIT_MS: Final = 50


class PrefetchShare(Protocol):
    """One attachment's part."""

    @property
    def held(self) -> int:
        """Messages it holds unsettled."""
        ...

    asked: int
    """What the pull that is under way asked for; 0 if there is none."""
    want: int
    """What it would ask for."""

    @property
    def held_bytes(self) -> int:
        """Bytes of what it holds unsettled."""
        ...

    asked_bytes: int
    """What the pull that is under way may bring; 0 if there is none."""


def check_limits(prefetch: int, prefetch_bytes: int) -> None:
    """Raises InvalidArgument for limits that no consumer can have."""
    if not 0 < prefetch <= limits.CONSUMER_UNACKED_MAX:
        raise InvalidArgument(f"prefetch is 1 to {limits.CONSUMER_UNACKED_MAX}, not {prefetch}")
    if not 0 < prefetch_bytes <= limits.CONSUMER_UNACKED_BYTES_MAX:
        raise InvalidArgument(f"prefetch_bytes is 1 to {limits.CONSUMER_UNACKED_BYTES_MAX}, not {prefetch_bytes}")


def start(prefetch: int, parts: int) -> int:
    """What each attachment may always ask for; 0 if there is not enough for all."""
    return min(START, prefetch // (2 * parts))


def allowance(prefetch: int, parts: Sequence[PrefetchShare], part: PrefetchShare, *, has_unseen: bool) -> int:
    """How many messages `part` may ask for now. With unseen messages at hand it waits for a quarter of the total to be free."""
    free = prefetch - sum([each.held + each.asked for each in parts])
    if free <= 0 or (has_unseen and free * 4 < prefetch):
        return 0
    if len(parts) == 1:
        # A group that becomes known while this pull waits shall not wait for its end.
        return min(free - START if free > 4 * START else free, limits.PULL_MESSAGES_MAX)
    least = start(prefetch, len(parts))
    reserved = sum([max(least - each.held - each.asked, 0) for each in parts if each is not part])
    return max(min(free - reserved, max(part.want, least, 1), limits.PULL_MESSAGES_MAX), 0)


def bytes_allowance(prefetch_bytes: int, pull_bytes: int, parts: Sequence[PrefetchShare], part: PrefetchShare, *, has_unseen: bool) -> int:
    """How many bytes a pull of `part` may bring now, `pull_bytes` at most; 0 if it must wait."""
    used = sum([each.held_bytes + each.asked_bytes for each in parts])
    if not used:
        least = prefetch_bytes if len(parts) == 1 else prefetch_bytes // (2 * len(parts))
        return max(min(pull_bytes, least), 1)
    free = prefetch_bytes - used
    if free <= 0 or (has_unseen and free * 4 < prefetch_bytes):
        return 0
    if len(parts) > 1:
        share = prefetch_bytes // (2 * len(parts))
        free = min(free - sum([max(share - each.held_bytes - each.asked_bytes, 0) for each in parts if each is not part]), max(share, 1))
    return max(min(free, pull_bytes), 0)


def grown(want: int, asked: int, got: int, prefetch: int) -> int:
    """What an attachment wants next, after a pull for `asked` messages brought `got`."""
    if got >= asked:
        return min(max(asked, want) * GROWTH, prefetch)
    return min(2 * got, want)


def wait_ms(prefetch: int, prefetch_bytes: int, parts: int) -> int:
    """How long a pull may wait at its broker."""
    return WAIT_MS if parts == 1 or (start(prefetch, parts) and prefetch_bytes >= 2 * parts) else TURN_WAIT_MS
