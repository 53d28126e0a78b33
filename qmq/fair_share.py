"""Who pays when a place that all share is full: the owner that holds most of it. So nobody pushes out others by filling it. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import TypeVar

K = TypeVar("K")


def payer(held: Iterable[tuple[K, Hashable, int]]) -> K:
    """The thing to give up, of (thing, owner, amount), the oldest first: the oldest with an amount, of the owner that holds most.

    Of several owners that hold most, the one with the oldest thing pays. Raises ValueError if nothing is held.

        A: a1 a2 a3, B: b1    a1 goes, also if b1 is older
    """
    things = [each for each in held if each[2]]
    by_owner: dict[Hashable, int] = {}
    for _, owner, amount in things:
        by_owner[owner] = by_owner.get(owner, 0) + amount
    most = max(by_owner, key=by_owner.__getitem__)
    return next(thing for thing, owner, _ in things if owner == most)
