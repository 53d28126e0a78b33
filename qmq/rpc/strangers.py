"""Bounds what strangers take at a port: connections and requests whose peers have not proven a
name. Pure; the clock is handed in.

A stranger takes a place, and memory for the bytes that it has sent of something unfinished: a
handshake, a request. It has `time_s`, and a further second for each `BYTES_PER_S` that arrive, so
that slow uploads finish. It leaves when its name is proven or what it sends is whole.

All strangers of a port share `places` and `bytes_max`. When they need more, the address that takes
most of it pays, with its oldest stranger: one address pushes out nobody but itself. IPv6 addresses
count by their /64, which one machine may own.

    10 places    address A has 9, B has 1    one more of A or B: A's oldest is ended

`owes_s` bounds in the same way how often an address may try to prove a name, which costs a question
to somebody else.

`payer` and `SharedPlaces` hold the same rule for other things that owners share: when all places
are taken, who holds most pays.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Final, TypeVar

from qmq.limits import MIB
from qmq.security.quotas import RateMeter

K = TypeVar("K")


def payer(held: Iterable[tuple[K, Hashable, int]]) -> K:
    """The thing to give up, of (thing, owner, amount), the oldest first: the oldest with an amount,
    of the owner that holds most.

    Of several owners that hold most, the one with the oldest thing pays. Raises ValueError if
    nothing is held.

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

    If all places are taken, a further thing gets one if its owner then holds less than the owner
    that holds most, which loses its oldest.
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


BYTES_PER_S: Final = 64 * 1024
PROOFS_PER_S: Final = 50
METERS_MAX: Final = 10_000


@dataclass(frozen=True, slots=True)
class StrangerBounds:
    """The bounds of one port, for the strangers of all addresses together."""

    places: int
    bytes_max: int = 64 * MIB
    time_s: float = 20.0


@dataclass(slots=True, eq=False)
class _Stranger:
    address: str
    came_s: float
    end: Callable[[], None]
    bytes: int = 0


class Strangers:
    """The strangers of one port, each under a key that the port chooses.
    `now_s` is a monotonic clock.
    """

    def __init__(self, bounds: StrangerBounds, now_s: Callable[[], float]) -> None:
        self._bounds, self._now_s = bounds, now_s
        self._all: dict[Hashable, _Stranger] = {}
        """The one that came first is first."""
        self._proofs: dict[str, RateMeter] = {}
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._all)

    def came(self, who: Hashable, address: str, end: Callable[[], None]) -> None:
        """A stranger is here; `end` ends it, and is called once at most. Of a known stranger only
        `end` changes.
        """
        present = self._all.get(who)
        if present is not None:
            present.end = end
            return
        self._all[who] = _Stranger(network_of(address), self._now_s(), end)
        while len(self._all) > self._bounds.places:
            self._end(payer((key, each.address, 1) for key, each in self._all.items()))

    def received(self, who: Hashable, size: int) -> None:
        """Bytes of something unfinished arrived. Does nothing for a peer that is no stranger."""
        known = self._all.get(who)
        if known is None:
            return
        known.bytes += size
        self.bytes += size
        while self.bytes > self._bounds.bytes_max:
            self._end(payer((key, each.address, each.bytes) for key, each in self._all.items()))

    def left(self, who: Hashable) -> None:
        """The peer has proven its name, has sent everything, or is gone."""
        known = self._all.pop(who, None)
        if known is not None:
            self.bytes -= known.bytes

    def end_late(self) -> None:
        """End the strangers whose time is over. Call this from time to time."""
        now_s = self._now_s()
        for who, each in list(self._all.items()):
            is_late = now_s - each.came_s >= self._bounds.time_s + each.bytes / BYTES_PER_S
            if is_late and who in self._all:  # the end of one may be that of others
                self._end(who)

    def owes_s(self, address: str) -> float:
        """Count an attempt to prove a name. Returns 0, or the seconds to wait: the attempt must
        then be refused, and is not counted.
        """
        now_s, network = self._now_s(), network_of(address)
        meter = self._proofs.get(network)
        if meter is None:
            if len(self._proofs) >= METERS_MAX:
                self._proofs.clear()
            meter = self._proofs[network] = RateMeter(PROOFS_PER_S, now_s)
        owed_s = meter.owes(now_s)
        if not owed_s:
            meter.take(1, now_s)
        return owed_s

    def _end(self, who: Hashable) -> None:
        end = self._all[who].end
        self.left(who)
        end()


def network_of(address: str) -> str:
    """Whom an address counts for: an IPv4 address itself, the /64 of an IPv6 address. Other text
    counts as it is. Pure.
    """
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv6Address):
        return str(
            found.ipv4_mapped or ipaddress.IPv6Network((found, 64), strict=False).network_address
        )
    return str(found)
