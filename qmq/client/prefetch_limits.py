"""How the attachments of one consumer share its limits of `prefetch` messages and `prefetch_bytes` bytes. Pure.

A pull that waits at a broker reserves the messages it asked for, so that the total is never exceeded. An idle queue must not reserve what a
busy one could use. So each attachment asks for few messages at first (`START`), for four times as many after a full answer, and for few
again after an empty one; and `START` messages stay free for each other attachment. A single attachment asks for all, except what a second
one would need to begin.

If the total is less than two messages for each attachment, the attachments take turns: a pull then waits only briefly, so that a message in
another queue waits no longer than a round.

Worked example: prefetch 2,000, three attachments. Two idle ones wait with 64 each; the busy one grows 64, 256, 1,024, to 1,872.

A message counts for its part of its batch's bytes. The bytes of a pull are known afterwards: a batch is never cut, so the last one may
exceed the total, and then no attachment pulls until there is room again. One half of the bytes is divided among all attachments, and idle
ones reserve no more than their part of it. An attachment that holds nothing may pull, however small the total is.

By default the total in messages follows the application (`PrefetchLimit`). A node that is busy with producers answers a pull once in each
round of its event loop, which takes a millisecond or more; an application that handles 2,000 messages in less time would wait for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, Protocol

from qmq import limits
from qmq.errors import InvalidArgument

PREFETCH: Final = 2_000
PREFETCH_MAX: Final = 16_000
QUICK_S: Final = 0.1
START: Final = 64
GROWTH: Final = 4
WAIT_MS: Final = 20_000
TURN_WAIT_MS: Final = 50


class PrefetchShare(Protocol):
    """The state of one attachment."""

    @property
    def held(self) -> int:
        """Unsettled messages."""
        ...

    asked: int
    """Messages that the current pull asked for; 0 without a pull."""
    want: int
    """Messages that the next pull would ask for."""

    @property
    def held_bytes(self) -> int:
        """Unsettled bytes."""
        ...

    asked_bytes: int
    """Bytes that the current pull may bring; 0 without a pull."""


def check_limits(prefetch: int, prefetch_bytes: int) -> None:
    """Raises InvalidArgument for invalid limits."""
    if not 0 < prefetch <= limits.CONSUMER_UNACKED_MAX:
        raise InvalidArgument(f"prefetch is 1 to {limits.CONSUMER_UNACKED_MAX}, not {prefetch}")
    if not 0 < prefetch_bytes <= limits.CONSUMER_UNACKED_BYTES_MAX:
        raise InvalidArgument(f"prefetch_bytes is 1 to {limits.CONSUMER_UNACKED_BYTES_MAX}, not {prefetch_bytes}")


class PrefetchLimit:
    """How many messages a consumer may hold.

    `chosen` is the application's number. Without one the limit is `PREFETCH`. It doubles when a full answer comes less than `QUICK_S` after
    its pull left, and the application has handled everything that it held by then. It halves when pulls leave less often than that.
    """

    def __init__(self, chosen: int | None) -> None:
        self.messages = PREFETCH if chosen is None else chosen
        self._is_chosen = chosen is not None
        self._left_s = -math.inf
        self._is_ahead = False

    def choose(self, messages: int) -> None:
        """The application chose a number."""
        self.messages, self._is_chosen = messages, True

    def left(self, now_s: float, *, is_ahead: bool) -> None:
        """A pull leaves. `is_ahead`: the application still has messages to handle."""
        if now_s - self._left_s > QUICK_S and not self._is_chosen:
            self.messages = max(self.messages // 2, PREFETCH)
        self._left_s, self._is_ahead = now_s, is_ahead

    def starved(self, now_s: float) -> None:
        """A full answer came, and the application held nothing any more."""
        if self._is_ahead and now_s - self._left_s <= QUICK_S and not self._is_chosen:
            self.messages = min(2 * self.messages, PREFETCH_MAX)


def start(prefetch: int, parts: int) -> int:
    """How many messages each attachment may always ask for; 0 if there are not enough for all."""
    return min(START, prefetch // (2 * parts))


def allowance(prefetch: int, parts: Sequence[PrefetchShare], part: PrefetchShare, *, has_unseen: bool) -> int:
    """How many messages `part` may ask for now. While it has unseen messages, it waits until a quarter of the total is free."""
    free = prefetch - sum([each.held + each.asked for each in parts])
    if free <= 0 or (has_unseen and free * 4 < prefetch):
        return 0
    if len(parts) == 1:
        # A broker group that is added while this pull waits must not wait for its end.
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
    """How many messages an attachment asks for next, after a pull for `asked` messages brought `got`."""
    if got >= asked:
        return min(max(asked, want) * GROWTH, prefetch)
    return min(2 * got, want)


def wait_ms(prefetch: int, prefetch_bytes: int, parts: int) -> int:
    """How long a pull may wait at its broker."""
    return WAIT_MS if parts == 1 or (start(prefetch, parts) and prefetch_bytes >= 2 * parts) else TURN_WAIT_MS
