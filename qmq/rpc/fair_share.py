"""Who pays when a place that all share is full: the owner that holds most of it. So nobody pushes out others by filling it. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
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


class SharedPlaces:
    """Things under way, of owners that share `places_max` places. `end` ends a thing.

    If all places are taken, a further thing gets one if its owner then holds less than the owner that holds most, which loses its oldest.
    """

    def __init__(self, places_max: int) -> None:
        self._places_max = places_max
        self._held: dict[Hashable, tuple[Hashable, Callable[[], None]]] = {}
        """The owner of each thing and its end, the oldest thing first."""

    def __len__(self) -> int:
        return len(self._held)

    def take(self, thing: Hashable, owner: Hashable, end: Callable[[], None]) -> bool:
        """Give the thing a place, and True; False if there is none for its owner."""
        if len(self._held) >= self._places_max:
            owners = Counter(each for each, _ in self._held.values())
            paying = payer((each, of, 1) for each, (of, _) in self._held.items())
            if owners[self._held[paying][0]] <= owners[owner] + 1:
                return False
            self._held.pop(paying)[1]()
        self._held[thing] = owner, end
        return True

    def pass_on(self, thing: Hashable, owner: Hashable) -> None:
        """The thing belongs to this owner. Does nothing for a thing without a place."""
        if thing in self._held:
            self._held[thing] = owner, self._held[thing][1]

    def leave(self, thing: Hashable) -> None:
        """The thing has ended."""
        self._held.pop(thing, None)
