"""The master's decision about failed messages and messages of lost consumers, by the group's settings. Pure.

    NACK, attempt < attempts_max       requeued after its own delay, or the group's for this attempt
    NACK, attempt = attempts_max       dead
    lost, on its first attempt         requeued immediately: it is not known which messages had been begun
    lost, later, begun                 as NACK, with the group's delay
    lost, later, never begun           released: the attempt stays the same

The attempt of a directed message includes earlier failures (`qmq/targeted.py`). All other verdicts pass unchanged, even on messages that
the consumer does not hold: the share ignores those.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Final, NamedTuple

from qmq import limits
from qmq.log.share import HeldMessages
from qmq.model import GroupSettings
from qmq.wire.settle_payloads import BY_GROUP_MS, Settlement, Verdict

Failures = Callable[[int, int], Sequence[tuple[int, int]]]
"""(first sequence, count) -> [(count, failures before they were sent again)]: together all of them, in order."""

RANGES_MIN: Final = 64
_pull_of: Final = attrgetter("pull")
_LOST_TEXT: Final = "its consumer was lost while it worked on it"


class Decided(NamedTuple):
    """Settlements in the form of the action log."""

    settlements: tuple[tuple[int, int, int, int], ...]
    errors: tuple[tuple[int, str], ...] = ()
    """(number of the settlement, error text), for dead messages."""


def decide(
    held: Sequence[HeldMessages], asked: Iterable[Settlement], settings: GroupSettings, failures: Failures, *, can_die: bool = True
) -> Decided:
    """The decisions for a consumer's verdicts. Where messages cannot die, a rejection counts as one more failure."""
    found: list[Settlement] = []
    for given in asked:
        each = given if can_die or given.verdict != Verdict.DEAD else given._replace(verdict=Verdict.NACK, delay_ms=BY_GROUP_MS)
        if each.verdict == Verdict.NACK:
            found += _failed(held, each, settings, failures) or (each._replace(delay_ms=0),)
        else:
            found.append(each)
    return _joined(found)


def put_back(held: Sequence[HeldMessages], was_begun: Callable[[int], bool], settings: GroupSettings, failures: Failures) -> Decided:
    """The decisions for the messages of a lost consumer; `was_begun` tells for a pull sequence."""
    found: list[Settlement] = []
    for item in held:
        if item.attempt == 1:
            found.append(Settlement(item.pull, item.pull + item.count - 1, Verdict.NACK, 0))
            continue
        for first, last, is_begun in _runs(item, was_begun):
            if is_begun:
                nack = Settlement(first, last, Verdict.NACK, BY_GROUP_MS, _LOST_TEXT)
                found += _failed([item], nack, settings, failures)
            else:
                found.append(Settlement(first, last, Verdict.RELEASE, 0))
    return _joined(found)


def _runs(item: HeldMessages, was_begun: Callable[[int], bool]) -> Iterator[tuple[int, int, bool]]:
    """Ranges of pull sequences with the same attempt, reason and time of the next delivery."""
    first, end = item.pull, item.pull + item.count
    is_begun = was_begun(first)
    for pull in range(first + 1, end):
        if was_begun(pull) != is_begun:
            yield first, pull - 1, is_begun
            first, is_begun = pull, not is_begun
    yield first, end - 1, is_begun


def _failed(held: Sequence[HeldMessages], nack: Settlement, settings: GroupSettings, failures: Failures) -> list[Settlement]:
    """A NACK, cut where attempts differ."""
    found: list[Settlement] = []
    begin = max(bisect_right(held, nack.first, key=_pull_of) - 1, 0)
    for at in range(begin, len(held)):  # not a slice: slicing for each of many NACKs is quadratic
        item = held[at]
        if item.pull > nack.last:
            break
        low, high = max(nack.first, item.pull), min(nack.last, item.pull + item.count - 1)
        if low > high:
            continue
        for count, failed in failures(item.first + low - item.pull, high - low + 1):
            attempt = item.attempt + failed
            is_dead = 0 < settings.attempts_max <= attempt
            delay_ms = settings.delay_ms(attempt) if nack.delay_ms == BY_GROUP_MS else min(nack.delay_ms, limits.REQUEUE_MS_MAX)
            verdict = (Verdict.DEAD, 0) if is_dead else (Verdict.NACK, delay_ms)
            found.append(Settlement(low, low + count - 1, *verdict, nack.error))
            low += count
    return found


def _joined(found: Iterable[Settlement]) -> Decided:
    """The fewest equivalent ranges. Error texts are kept for dead messages only."""
    parts: list[Settlement] = []
    for each in found:
        kept = each if each.verdict == Verdict.DEAD else each._replace(error="")
        last = parts[-1] if parts else None
        if last is not None and last.last + 1 == kept.first and last[2:] == kept[2:]:
            parts[-1] = last._replace(last=kept.last)
        else:
            parts.append(kept)
    settlements = tuple([(each.first, each.last, int(each.verdict), each.delay_ms) for each in parts])
    return Decided(settlements, tuple([(at, each.error) for at, each in enumerate(parts) if each.error]))


class Begun:
    """The pull sequences that one consumer has begun to work on, among those that failed before. In the master's memory only."""

    __slots__ = ("_look_at", "_ranges")

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []
        self._look_at = RANGES_MIN

    def add(self, first: int, last: int) -> None:
        """Both ends included."""
        if self._ranges and self._ranges[-1][0] <= first <= self._ranges[-1][1] + 1:
            self._ranges[-1] = self._ranges[-1][0], max(last, self._ranges[-1][1])
        else:
            self._ranges.append((first, last))

    def __contains__(self, pull: int) -> bool:
        return any(first <= pull <= last for first, last in self._ranges)

    def forget(self, held: Sequence[HeldMessages]) -> None:
        """Keep ranges that touch a held message; done only when the list has doubled."""
        if len(self._ranges) >= self._look_at:
            self._ranges = [each for each in self._ranges if _touches(held, *each)]
            self._look_at = max(2 * len(self._ranges), RANGES_MIN)


def _touches(held: Sequence[HeldMessages], first: int, last: int) -> bool:
    at = bisect_right(held, last, key=_pull_of) - 1
    return at >= 0 and held[at].pull + held[at].count > first
