"""Judges delayed messages by what senders, cancellers and consumers saw. Pure.

A *wish* is one message as its sender knows it; a *sight* is one stored copy of it in its subject. The model: each wish that was
acknowledged and not cancelled has exactly one sight, not before its due time; a cancelled wish
has none; a wish of unknown outcome has at most one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(slots=True)
class Wish:
    """A message that was sent. `due_times_ms` are its possible due times: several while the outcome of a move is unknown."""

    number: int
    key: int
    due_times_ms: set[int]
    is_acked: bool = False
    is_refused: bool = False
    """It is certain that it was not stored."""
    is_cancelled: bool = False
    may_be_cancelled: bool = False
    """The answer to a cancel was lost, for good."""


class Sight(NamedTuple):
    """A stored copy: where, and when the real-time broker stored it."""

    number: int
    queue: str
    sequence: int
    append_ms: int


@dataclass(slots=True)
class Verdict:
    """Anomalies, and the delays of the other messages."""

    anomalies: list[str] = field(default_factory=list)
    lateness_ms: list[int] = field(default_factory=list)
    delivered: int = 0
    cancelled: int = 0

    def object_to(self, text: str) -> None:
        """Something is wrong."""
        self.anomalies.append(text)


def judge(wishes: Iterable[Wish], sights: Iterable[Sight], *, early_ms: int = 0) -> Verdict:
    """Compare. `early_ms`: how far the clocks of the delay group and of the real-time brokers may differ."""
    verdict = Verdict()
    seen: dict[int, dict[tuple[str, int], Sight]] = defaultdict(dict)
    for sight in sights:
        seen[sight.number][sight.queue, sight.sequence] = sight
    known = {wish.number: wish for wish in wishes}
    for number in seen.keys() - known.keys():
        verdict.object_to(f"{number} was never sent, and came: {list(seen[number])}")
    for wish in known.values():
        _judge_one(verdict, wish, list(seen[wish.number].values()), early_ms)
    return verdict


def _judge_one(verdict: Verdict, wish: Wish, copies: list[Sight], early_ms: int) -> None:
    name = f"{wish.number} (due {sorted(wish.due_times_ms)})"
    if len(copies) > 1:
        verdict.object_to(f"{name} came {len(copies)} times: {[(each.queue, each.sequence) for each in copies]}")
    if wish.is_cancelled:
        verdict.cancelled += 1
        if copies:
            verdict.object_to(f"{name} was cancelled, and came")
        return
    if not copies:
        if wish.is_acked and not wish.may_be_cancelled:
            verdict.object_to(f"{name} was acknowledged, and never came")
        return
    if wish.is_refused:
        verdict.object_to(f"{name} was refused, and came")
    verdict.delivered += 1
    late_ms = copies[0].append_ms - min(wish.due_times_ms)
    if late_ms < -early_ms:
        verdict.object_to(f"{name} came {-late_ms} ms early")
    if len(wish.due_times_ms) == 1:
        verdict.lateness_ms.append(late_ms)


def out_of_order(wishes: Iterable[Wish], sights: Iterable[Sight]) -> list[str]:
    """On an ordered subject: where a message came behind one of its key that was due later, or at the same time and sent later.

    `sights` are in the order in which a group consumed them; senders number in the order of sending, and send well before what is due.
    """
    known = {wish.number: wish for wish in wishes if len(wish.due_times_ms) == 1}
    found: list[str] = []
    last: dict[int, tuple[int, int]] = {}
    done: set[int] = set()
    for sight in sights:
        wish = known.get(sight.number)
        if wish is None or sight.number in done:
            continue
        done.add(sight.number)
        (due,) = wish.due_times_ms
        mine, before = (due, wish.number), last.get(wish.key, (-1, -1))
        if mine < before:
            found.append(f"key {wish.key}: {wish.number} (due {due}) came behind {before[1]} (due {before[0]})")
        last[wish.key] = max(mine, before)
    return found
