"""Checks what a simulated cluster does with an ordered subject against Ordering.tla.

Turns observations of an ordered subject into lines for docs/specs/OrderingTrace.tla.

Between the observations it puts the actions that nobody can see, as late as possible: a message is
sent and accepted where it is committed, a route is learned where a message needs it, a consumer
pulls where a handler is given the message. What a fenced partition commits after the fence was
accepted before, if its master appended it before. A master's lease ends before a fence if the store
no longer had the master's key. It decides nothing: TLC says whether each action is allowed where it
stands.

The keys of the specification are the messages' keys, and one without messages for each logical
partition that has none of these.

Simulations for traces: a run ends with its trace. In a run with a planted bug the simulator's own
checks are off, so that it continues, and only the specification judges its trace.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from ordersim.checks import Checks, Ledger, Routes
from ordersim.nemesis import Plan, draw
from ordersim.run import ROUND_MS, SUBJECT, Simulation, simulate
from ordersim.tracer import (
    Acked,
    Changed,
    Fenced,
    Given,
    Granted,
    Handled,
    Inherited,
    Made,
    Moved,
    Observation,
    Parked,
    Released,
    Routed,
    Sealed,
    Settled,
    Stored,
    Tracer,
)
from qmq_ordering.routes import Change, LpRange, Phase, Route

from qmq.log.envelopes import Entry
from specs.model_checker import TraceVerdict, check_trace

STEP_MS: Final = 500
CALM_MS: Final = 30_000


class TracedSimulation(Simulation):
    """One round of faults, and a calm time."""

    def _rounds(self) -> None:
        self._begin_round()
        self._run(ROUND_MS)
        self._heal()
        self._run(CALM_MS)

    def _run(self, ms: int) -> None:
        until = self.world.now + ms
        while not self.tracer.end and self.world.now < until:
            self.world.run(self.world.now + STEP_MS)


class _NoLedger(Ledger):
    def _apply(self, _: Any, entry: Entry) -> None:
        self._simulation.tracer.entry(entry)


class _NoRoutes(Routes):
    """It knows the routes, from which the nemesis chooses."""

    def _put(self, key: str, value: bytes, _: Any) -> None:
        what = key.partition("/")[0]
        if what == "v":
            route = Route.decode(value)
            self.routes[route.version] = route
        elif what == "latest":
            self.latest = int(value)

    def _fenced(self, *_: Any) -> None:
        pass


class _NoChecks(Checks):
    def acknowledged(self, *_: Any) -> None:
        pass

    def handed(self, *_: Any) -> None:
        pass


class UncheckedSimulation(TracedSimulation):
    """See the module."""

    checks_class = _NoChecks
    ledger_class = _NoLedger
    routes_class = _NoRoutes


Line = dict[str, Any]
UNLIMITED: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class OrderingLines:
    """A trace for TLC, with the constants that it needs."""

    constants: Mapping[str, Any]
    lines: Sequence[Line]


@dataclass(slots=True)
class _Partition:
    """A partition, as the lines before have it."""

    log: list[tuple[str, int]] = field(default_factory=list)
    accepted: list[tuple[str, int]] = field(default_factory=list)
    outstanding: list[tuple[str, int]] = field(default_factory=list)
    is_sealed: bool = False
    is_fenced: bool = False
    is_away: bool = False
    grants: dict[int, tuple[str, LpRange]] = field(default_factory=dict)
    """By token. Those that ended stay."""
    tokens: int = 0


@dataclass(slots=True)
class _Lane:
    """A partition's lane for one key."""

    holder: str = ""
    token: int = 0
    given: dict[int, int] = field(default_factory=dict)
    """The broker's token of a grant, and the lane's."""
    done: int = 0
    settled: set[int] = field(default_factory=set)
    """Positions after `done` with a verdict."""
    is_parked: bool = False
    aside: set[int] = field(default_factory=set)
    """Positions of messages that were set aside."""


@dataclass(frozen=True, slots=True)
class _Hand:
    partition: int
    position: int
    token: int


def ordering_lines(found: Sequence[Observation]) -> OrderingLines:
    """The lines of a trace. The first observation that is no `Made` or grant is the first route."""
    return _Writer(found).write()


class _Writer:
    def __init__(self, found: Sequence[Observation]) -> None:
        self._found = found
        first = next(each.route for each in found if isinstance(each, Routed))
        self._keys, self._lps = _keys_of(found, first.logical_partitions)
        self._names = {key: name for name, key in self._keys.items()}
        self._late = _late(found, self._names)
        self._lines: list[Line] = []
        self._parts: defaultdict[int, _Partition] = defaultdict(_Partition)
        self._routes: list[dict[str, int]] = []
        self._known = 1
        self._versions = dict.fromkeys(self._lps, 1)
        self._numbers: dict[tuple[str, int], int] = {}
        """Of each message: the specification's number."""
        self._made: defaultdict[str, int] = defaultdict(int)
        self._copied = _copied(found, self._names)
        self._lanes: defaultdict[tuple[int, str], _Lane] = defaultdict(_Lane)
        self._hands: dict[tuple[str, str], _Hand] = {}
        self._seen: set[tuple[str, int]] = set()

    def write(self) -> OrderingLines:
        take = {
            Routed: self._routed,
            Changed: self._changed,
            Fenced: self._fenced,
            Moved: self._moved,
            Stored: self._stored,
            Sealed: self._sealed,
            Granted: self._granted,
            Released: self._released,
            Settled: self._settled,
            Parked: self._parked,
            Inherited: self._inherited,
            Made: self._made_one,
            Acked: self._was_acked,
            Given: self._given,
            Handled: self._handled,
        }
        for each in self._found:
            take[type(each)](each)  # type: ignore[operator]
        consumers = {
            each.consumer for each in self._found if isinstance(each, Granted | Given | Handled)
        }
        limits = dict.fromkeys(("MaxMessages", "MaxFences", "MaxToken", "MaxParked"), UNLIMITED)
        last = max(
            [
                *self._parts,
                *(number for route in self._routes for number in route.values()),
                *_targets(self._found),
            ]
        )
        constants = {
            "Keys": set(self._lps),
            "Consumers": consumers or {"nobody else"},
            "Nobody": "nobody",
            "MaxPartition": last,
            **limits,
        }
        constants["FirstRoute"] = self._routes[0]
        return OrderingLines(constants, self._lines)

    def _add(self, do: str, **values: Any) -> None:
        self._lines.append({"do": do, **values})

    def _in(self, lps: LpRange) -> list[str]:
        """The keys of a range."""
        return [key for key, lp in self._lps.items() if lps.first <= lp < lps.end]

    # --- the coordination store -------------------------------------------------------------------

    def _routed(self, each: Routed) -> None:
        route = {key: each.route.holder(lp).number for key, lp in self._lps.items()}
        self._routes.append(route)
        if len(self._routes) > 1:
            self._add("Publish", route=route)

    def _changed(self, each: Changed) -> None:
        if each.change.phase is Phase.SEALED:
            self._add("AllClosed", version=each.change.to_version)
            return
        after = _after(self._routes[-1], each.change, self._lps)
        moved = {key for key in self._lps if self._routes[-1][key] in each.change.sources}
        self._add("Prepare", keys=moved, next=after, version=each.change.to_version)

    def _fenced(self, each: Fenced) -> None:
        part = self._parts[each.partition]
        for key, number in self._late[each.partition]:
            self._accept(each.partition, key, self._numbers.get((key, number), number))
        part.is_fenced = part.is_away = True
        if not each.is_led:
            self._add("GoAway", pp=each.partition)
            self._add("LoseLease", pp=each.partition)
        self._add("Fence", pp=each.partition)

    def _moved(self, each: Moved) -> None:
        for piece in each.group.frontier.pieces:
            for key in self._in(piece.range):
                while self._versions[key] < piece.version:
                    self._versions[key] += 1
                    self._add("Advance", k=key, version=self._versions[key])
                if self._versions[key] > piece.version:
                    self._add("Advance", k=key, version=piece.version)  # it went back: refused

    # --- logs -------------------------------------------------------------------------------------

    def _stored(self, each: Stored) -> None:
        key = self._names[each.key]
        number = self._numbers.get((key, each.number), each.number)
        part, position = self._parts[each.partition], each.sequence + 1
        if part.is_away:
            self._come_back(each.partition)
        if part.is_fenced and not part.is_away and (key, number) in part.log:
            self._add("IsStored", pp=each.partition, k=key, n=number, pos=position)
            return
        self._accept(each.partition, key, number)
        part.accepted.remove((key, number))
        part.log.append((key, number))
        self._add("Commit", pp=each.partition, k=key, n=number, pos=position)

    def _accept(self, partition: int, key: str, number: int) -> None:
        self._send(partition, key, number)
        self._parts[partition].accepted.append((key, number))
        self._add("Accept", pp=partition, k=key, n=number)

    def _send(self, partition: int, key: str, number: int) -> None:
        for version in range(self._known, len(self._routes) + 1):
            if self._routes[version - 1][key] == partition:
                for _ in range(self._known, version):
                    self._add("LearnRoute")
                self._known = version
                break
        for other, part in self._parts.items():
            if other != partition:
                self._settle_outcomes(other, part, key)
        self._add("Send", k=key, n=number, pp=partition)
        self._parts[partition].outstanding.append((key, number))

    def _settle_outcomes(self, number: int, part: _Partition, key: str) -> None:
        """The producer has to know what became of the key's messages on another partition: it was
        answered, or gives them up.
        """
        while (
            any(each[0] == key for each in part.outstanding)
            and part.outstanding[0] in part.log
            and not self._is_again(part)
        ):
            self._answer(number, part)
        if any(each[0] == key for each in part.outstanding):
            self._add("GiveUp", pp=number)
            part.outstanding.clear()

    def _is_again(self, part: _Partition) -> bool:
        """Whether the first message that waits for an answer is stored once more later: its answer
        was lost.
        """
        return part.is_fenced and part.outstanding[0] in self._copied

    def _answer(self, number: int, part: _Partition) -> None:
        key, message = part.outstanding.pop(0)
        self._add("Answered", pp=number, k=key, n=message)

    def _sealed(self, each: Sealed) -> None:
        part = self._parts[each.partition]
        if part.is_away and not part.is_sealed:
            self._come_back(each.partition)
        do = "IsSealed" if part.is_sealed else "Seal"
        part.is_sealed = True
        self._add(do, pp=each.partition, pos=each.sequence + 1)

    def _come_back(self, partition: int) -> None:
        """The group is back. The specification commits the messages and the command message in one
        step.
        """
        part = self._parts[partition]
        part.log += part.accepted
        part.accepted.clear()
        part.is_away, part.is_sealed = False, True
        self._add("ComeBack", pp=partition, pos=len(part.log) + 1)

    # --- the application's messages ---------------------------------------------------------------

    def _made_one(self, each: Made) -> None:
        key = self._names[each.key]
        self._made[key] += 1
        self._numbers[key, each.number] = self._made[key]
        self._add("Make", k=key, n=self._made[key])

    def _was_acked(self, each: Acked) -> None:
        key = self._names[each.key]
        message = (key, self._numbers.get((key, each.number), each.number))
        part = self._parts[each.partition]
        while message in part.outstanding:
            self._answer(each.partition, part)
        self._add("IsAcked", k=key, n=message[1], pp=each.partition)

    # --- lanes ------------------------------------------------------------------------------------

    def _granted(self, each: Granted) -> None:
        part = self._parts[each.partition]
        part.tokens += 1
        part.grants[part.tokens] = each.consumer, each.range
        for key in self._in(each.range):
            lane = self._lanes[each.partition, key]
            lane.token += 1
            lane.holder = each.consumer
            lane.given[part.tokens] = lane.token
            self._add("Attach", c=each.consumer, k=key, pp=each.partition)

    def _released(self, each: Released) -> None:
        found = self._parts[each.partition].grants.get(each.token)
        for key in self._in(found[1]) if found is not None else ():
            lane = self._lanes[each.partition, key]
            if not lane.holder or lane.given.get(each.token) != lane.token:
                continue
            hand = self._hands.get((lane.holder, key))
            if (hand is None or hand.partition != each.partition) and self._next(
                each.partition, key, lane.done
            ):
                # its handlers may get what it pulled before
                self._pull(lane.holder, each.partition, key)
            lane.holder = ""
            self._add("Revoke", pp=each.partition, k=key)

    def _next(self, partition: int, key: str, after: int) -> int:
        """The position of the next message of a key, or of the command message; 0 if there is
        none.
        """
        part = self._parts[partition]
        for position in range(after + 1, len(part.log) + 1):
            if part.log[position - 1][0] == key:
                return position
        return len(part.log) + 1 if part.is_sealed and after <= len(part.log) else 0

    def _pull(self, consumer: str, partition: int, key: str) -> None:
        lane = self._lanes[partition, key]
        if (consumer, key) in self._hands:
            self._add("Drop", c=consumer, k=key)
        self._add("Pull", c=consumer, pp=partition, k=key)
        self._hands[consumer, key] = _Hand(
            partition, self._next(partition, key, lane.done), lane.token
        )

    def _reach(
        self, consumer: str, partition: int, key: str, position: int, token: int | None = None
    ) -> None:
        """The consumer has the key's message at a position."""
        hand, lane = self._hands.get((consumer, key)), self._lanes[partition, key]
        is_usable = (
            hand is not None
            and hand.partition == partition
            and hand.position <= position
            and (token is None or hand.token == token)
            and (hand.token == lane.token or lane.holder != consumer)
        )
        if not is_usable:
            self._pull(consumer, partition, key)
        while (hand := self._hands[consumer, key]).position < position:
            after = self._next(partition, key, hand.position)
            if not after or after > position:
                break
            self._hands[consumer, key] = _Hand(partition, after, hand.token)
            self._add("GoOn", c=consumer, k=key, pos=after)

    def _given(self, each: Given) -> None:
        key = self._message(each)[0]
        self._reach(each.consumer, each.partition, key, each.sequence + 1)
        self._add("Has", c=each.consumer, k=key, pp=each.partition, pos=each.sequence + 1)

    def _message(self, each: Given | Handled | Parked) -> tuple[str, int]:
        log = self._parts[each.partition].log
        return log[each.sequence] if each.sequence < len(log) else (next(iter(self._lps)), 0)

    def _handled(self, each: Handled) -> None:
        message, position = self._message(each), each.sequence + 1
        if message in self._seen:
            self._add("IsSeen", pp=each.partition, pos=position)
            return
        self._seen.add(message)
        self._reach(each.consumer, each.partition, message[0], position)
        self._add("Handle", c=each.consumer, k=message[0], pp=each.partition, pos=position)

    def _settled(self, each: Settled) -> None:
        part = self._parts[each.partition]
        for key in self._in(part.grants.get(each.token, ("", LpRange(0, 1 << 30)))[1]):
            lane = self._lanes[each.partition, key]
            position = lane.done
            while position := self._next(each.partition, key, position):
                if _has(each.ranges, position - 1):
                    lane.settled.add(position)
            self._settle_on(each.partition, key, each.token)

    def _settle_on(self, partition: int, key: str, token: int) -> None:
        """Settle the key's messages that have a verdict, up to the first one that has none."""
        lane = self._lanes[partition, key]
        position = lane.done
        while (after := self._next(partition, key, position)) and after in lane.settled:
            position = after
        if position > lane.done:
            consumer = self._parts[partition].grants.get(token, ("",))[0]
            self._settle(consumer, partition, key, position, lane.given.get(token, 0))

    def _parked(self, each: Parked) -> None:
        key, position = self._message(each)[0], each.sequence + 1
        lane = self._lanes[each.partition, key]
        if position in lane.aside:
            return  # the answer was lost, and the consumer asked again
        consumer = self._parts[each.partition].grants.get(each.token, ("",))[0]
        token = lane.given.get(each.token, 0)
        self._reach(consumer, each.partition, key, position, token)
        self._add("Park", c=consumer, k=key, pos=position, token=token)
        self._hands.pop((consumer, key), None)
        lane.done, lane.is_parked = position, True
        lane.aside.add(position)
        self._settle_on(each.partition, key, each.token)

    def _inherited(self, each: Inherited) -> None:
        for name in each.keys:
            key = self._names[name]
            lane = self._lanes[each.partition, key]
            if lane.is_parked:
                continue
            for token, (_, lps) in self._parts[each.partition].grants.items():
                if key in self._in(lps):
                    self._released(Released(each.partition, token))  # its reader attaches again
            lane.is_parked, lane.holder = True, ""
            self._add("Inherit", k=key, pp=each.partition)

    def _settle(self, consumer: str, partition: int, key: str, position: int, token: int) -> None:
        before, lane = self._hands.get((consumer, key)), self._lanes[partition, key]
        self._reach(consumer, partition, key, position, token)
        self._add("Settle", c=consumer, k=key, pos=position, token=token)
        lane.done = position
        self._hands.pop((consumer, key), None)
        if before is not None and before.partition == partition and before.position > position:
            self._reach(consumer, partition, key, before.position)


def _keys_of(
    found: Iterable[Observation], logical_partitions: int
) -> tuple[dict[str, bytes], dict[str, int]]:
    """(the messages' keys by their names, the logical partitions of all keys)."""
    lps = {each.key: each.lp for each in found if isinstance(each, Made)}
    names = {f"k{number}": key for number, key in enumerate(lps, 1)}
    empty = sorted(set(range(logical_partitions)) - set(lps.values()))
    return names, {
        **{name: lps[key] for name, key in names.items()},
        **{f"lp{lp}": lp for lp in empty},
    }


def _late(
    found: Sequence[Observation], names: Mapping[bytes, str]
) -> dict[int, list[tuple[str, int]]]:
    """Of each fenced partition: what it commits after the fence and appended before."""
    late: defaultdict[int, list[tuple[str, int]]] = defaultdict(list)
    fenced = dict[int, int]()
    for each in found:
        if isinstance(each, Fenced):
            fenced[each.partition] = each.at_ms
        elif isinstance(each, Stored) and each.appended_ms <= fenced.get(each.partition, -1):
            late[each.partition].append((names[each.key], each.number))
    return late


def _copied(found: Iterable[Observation], names: Mapping[bytes, str]) -> set[tuple[str, int]]:
    """The messages that several partitions have, by the numbers of the specification."""
    numbers, made = dict[tuple[bytes, int], int](), defaultdict[bytes, int](int)
    places: defaultdict[tuple[str, int], set[int]] = defaultdict(set)
    for each in found:
        if isinstance(each, Made):
            made[each.key] += 1
            numbers[each.key, each.number] = made[each.key]
        elif isinstance(each, Stored) and (each.key, each.number) in numbers:
            places[names[each.key], numbers[each.key, each.number]].add(each.partition)
    return {message for message, partitions in places.items() if len(partitions) > 1}


def _after(route: Mapping[str, int], change: Change, lps: Mapping[str, int]) -> dict[str, int]:
    """Where the keys are after a change."""
    return {
        key: next(
            (
                part.number
                for part in change.targets
                if part.range.first <= lps[key] < part.range.end
            ),
            number,
        )
        for key, number in route.items()
    }


def _targets(found: Iterable[Observation]) -> list[int]:
    return [
        part.number for each in found if isinstance(each, Changed) for part in each.change.targets
    ]


def _has(ranges: Iterable[tuple[int, int]], sequence: int) -> bool:
    return any(first <= sequence <= last for first, last in ranges)


Bug = Callable[[], AbstractContextManager[None]]

FENCING: Final = {
    "is_lease": True,
    "change_every_ms": 10_000,
    "fault_every_ms": 3_000,
    "faults": ("hide_group",),
    "consumers": 1,
}
METASERVERS: Final = {"metaservers": 3, "arrow_stall": 0.5, "change_every_ms": 700, "handler_ms": 5}
LANES: Final = {
    "consumers": 3,
    "keys": 8,
    "concurrency": 1,
    "handler_ms": 200,
    "send_every_ms": 700,
    "gate": "lanes",
}
SEVERAL: Final = {
    **LANES,
    "metaservers": 3,
    "arrow_stall": 0.1,
    "change_every_ms": 1_500,
    "handler_ms": 100,
    "partitions": 2,
    "changes": ("move", "split", "split_many"),
}
SLOW: Final = {**LANES, "handler_ms": 1_000}
WRITES: Final = {
    **SLOW,
    "consumers": 1,
    "keys": 2,
    "send_every_ms": 300,
    "faults": ("disk_full",),
    "fault_every_ms": 1_000,
}
AIMED: Final = {
    "send_every_ms": 300,
    "consumers": 1,
    "aim": 1.0,
    "change_every_ms": 2_000,
    "faults": ("silence_group", "cut_connections"),
}
NEEDS: Final[dict[str, dict[str, Any]]] = {
    "prepare a change without comparing the latest version": METASERVERS,
    "call a change sealed without comparing": METASERVERS,
    "publish without comparing": METASERVERS,
    "put a frontier without comparing": SEVERAL,
    "advance when the first of several sources is finished": {
        **SLOW,
        "partitions": 3,
        "changes": ("merge", "split_many"),
    },
    "open a range when another one of its source is finished": {
        **LANES,
        "partitions": 1,
        "changes": ("move", "split"),
    },
    "skip a version": {**SLOW, "change_every_ms": 700, "changes": ("move", "split")},
    "leave parked keys behind when a group moves on": {
        "on_failure": "park",
        "handler_fails": 0.2,
        "changes": ("move", "split"),
    },
    "park a message without what follows for its key": {
        "on_failure": "park",
        "handler_fails": 0.2,
        "prefetch": 40,
    },
    "fence without waiting for the lease": FENCING,
    "fence without comparing the master's key": {
        **FENCING,
        "faults": ("hide_group", "isolate_group_long"),
        "aim": 1.0,
    },
    "never end the right by the clock": FENCING,
    "keep the right for longer than the lease": {
        **FENCING,
        "send_every_ms": 300,
        "concurrency": 1,
        "handler_ms": 1_000,
    },
    "do not list the fences under a new lease": FENCING,
    "report a lane finished before that is committed": {
        "change_every_ms": 1_000,
        "faults": ("stall_group",),
        "fault_every_ms": 1_000,
    },
    "take a lane over while its lease runs": {
        **SLOW,
        "prefetch": 40,
        "faults": ("join_consumer", "isolate_client"),
        "fault_every_ms": 1_500,
    },
    "hand out after the lease may be over": {
        **SLOW,
        "prefetch": 40,
        "faults": ("pause_consumer_long",),
        "fault_every_ms": 1_500,
    },
    "let a zombie's verdicts count": {
        **SLOW,
        "prefetch": 40,
        "faults": ("pause_consumer_long", "isolate_client"),
        "fault_every_ms": 1_500,
    },
    "continue with what was held under a token that is void": {
        **SLOW,
        "prefetch": 40,
        "faults": ("pause_consumer_long", "isolate_client"),
    },
    "count as done what is another lane's": {**SLOW, "partitions": 1},
    "take batches without looking for gaps in their numbers": WRITES,
    "say of a batch that is stored that it is not, once sealed": AIMED,
    "send on before the fate of earlier batches is known": AIMED,
    "give up waiting for a partition that is not fenced": AIMED,
}
"""What planted bugs of the simulator need, so that they have an effect within a few seeds: other
values of the plan.
"""
OUTSIDE: Final = {
    "leave a fence in the store for ever": "removed fences",
    "remove a fence before its seal is known": "removed fences",
    "leave the last message of a parked key out of its replay": "replays",
    "replay a key and let its reader read on": "replays",
    "count what is given back as parked for ever": "replays",
    "begin a new session as another producer": "failed messages",
    "take an unknown outcome for not stored": "failed messages",
    "send again under another message id": "message ids",
}
"""Planted bugs of the simulator in what the specification leaves out."""
REFUSED_AT: Final = {
    "publish before the sources are sealed": 1,
    "prepare a change without comparing the latest version": 1,
    "call a change sealed without comparing": 1,
    "publish without comparing": 5,
    "advance when the first of several sources is finished": 4,
    "open a range when another one of its source is finished": 2,
    "skip a version": 4,
    "take progress that is missing for done": 26,
    "put a frontier without comparing": 2,
    "leave parked keys behind when a group moves on": 2,
    "fence without waiting for the lease": 2,
    "fence without comparing the master's key": 18,
    "never end the right by the clock": 3,
    "keep the right for longer than the lease": 5,
    "do not list the fences under a new lease": 5,
    "tell a reader of no parked keys": 13,
    "answer a grant before it is committed": 1,
    "grant a lane that overlaps another one": 3,
    "take a lane over while its lease runs": 1,
    "report a lane finished before that is committed": 18,
    "begin a target at its end": 2,
    "hand out after the lease may be over": 1,
    "hand out several messages of a key at once": 1,
    "let a zombie's verdicts count": 1,
    "count as done what is another lane's": 1,
    "settle a message when it is handed out": 1,
    "park a message without what follows for its key": 2,
    "continue with what was held under a token that is void": 2,
    "take batches without looking for gaps in their numbers": 1,
    "take batches behind the command message": 1,
    "say of a batch that is stored that it is not, once sealed": 12,
    "answer a seal before it is committed": 2,
    "send on before the fate of earlier batches is known": 13,
    "give up waiting for a partition that is not fenced": 13,
}
"""Planted bugs of the simulator, with the first seed at which the specification does not allow what
they do (`tools/run traces --ordering --bugs`).
"""
LEFT_OUT: Final = ("kill_producer", "new_group", "unpark")
"""Faults after which a trace would end at once."""


def _plan(seed: int, needs: Mapping[str, Any]) -> Plan:
    """Changes follow each other faster than in other plans: groups fall behind, and partitions are
    closed that nobody has read.
    """
    chance = random.Random(f"trace {seed}")
    drawn = draw(chance)
    is_parking = chance.random() < 0.3
    plan = replace(
        drawn,
        rounds=1,
        producers=1,
        groups=("g",),
        unknown="resend",
        delivery_s=600.0,
        hold_every_ms=0,
        on_failure="park" if is_parking else "block",
        handler_fails=0.1 if is_parking else drawn.handler_fails,
        change_every_ms=chance.choice((700, 2_000, 4_000)),
        faults=tuple(each for each in drawn.faults if each not in LEFT_OUT) or ("kill_master",),
    )
    return replace(plan, **needs)


def traced(
    seed: int, observations_max: int, bug: Bug | None = None, needs: Mapping[str, Any] | None = None
) -> Tracer:
    """What is seen of a seed's run: of one producer and one group, without messages that fail. With
    a bug, the simulator's checks are off; `needs` replaces values of the plan.
    """
    tracer = Tracer(SUBJECT, "g", observations_max, lambda body: int(body.rpartition(b"/")[2]))
    simulation_class = TracedSimulation if bug is None else UncheckedSimulation
    result = simulate(
        seed,
        None if bug is None else bug(),
        plan=_plan(seed, needs or {}),
        tracer=tracer,
        simulation_class=simulation_class,
    )
    if result.failure and bug is None:
        raise RuntimeError(f"seed {seed}: {result.failure}")
    return tracer


def check_observations(found: Sequence[Observation], folder: Path) -> TraceVerdict:
    """Whether what was seen is a behaviour of the specification."""
    lines = ordering_lines(found)
    return check_trace("Ordering", lines.constants, lines.lines, folder)


def check_ordering_seed(seed: int, observations_max: int, folder: Path) -> TraceVerdict:
    """Whether the first observations of a seed's run are a behaviour of the specification."""
    return check_observations(traced(seed, observations_max).found, folder)
