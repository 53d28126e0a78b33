"""How the attachments of one consumer share what it may hold: `prefetch` messages in all. Pure.

A pull that waits at a broker reserves what it asked for, so the total is never exceeded; and an idle queue must not reserve what a busy one
could use. So each attachment asks for little at first (`START`), for four times as much when it got all it asked for, and for
little again when it got nothing; and none may take the last `START` messages that each other one needs to begin. An only one asks for all,
but for what a second one would need to begin.

When the total is smaller than two messages an attachment, the attachments take turns: a pull then waits only briefly, so that a message
in another queue waits no longer than a round.

Worked example: prefetch 2,000, three attachments. Two idle ones wait with 64 each; the busy one grows 64, 256, 1,024, to 1,872.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

from qmq import limits

START: Final = 64
GROWTH: Final = 4
WAIT_MS: Final = 20_000
TURN_WAIT_MS: Final = 50


class Part(Protocol):
    """One attachment's part."""

    @property
    def held(self) -> int:
        """Messages it holds unsettled."""
        ...

    asked: int
    """What the pull that is under way asked for; 0 if there is none."""
    want: int
    """What it would ask for."""


def start(prefetch: int, parts: int) -> int:
    """What each attachment may always ask for; 0 if there is not enough for all."""
    return min(START, prefetch // (2 * parts))


def allowance(prefetch: int, parts: Sequence[Part], part: Part, *, has_unseen: bool) -> int:
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


def grown(want: int, asked: int, got: int, prefetch: int) -> int:
    """What an attachment wants next, after a pull for `asked` messages brought `got`."""
    if got >= asked:
        return min(max(asked, want) * GROWTH, prefetch)
    return min(2 * got, want)


def wait_ms(prefetch: int, parts: int) -> int:
    """How long a pull may wait at its broker."""
    return WAIT_MS if parts == 1 or start(prefetch, parts) else TURN_WAIT_MS
