"""What a stream of Spark left in an ordered subject, and how its queries ended.

    {"process":"r","type":"ok","f":"placed","producer":"k","key":"a","serial":3,
     "queue":"s/2@g1","sequence":17,"is_source":false}
    {"process":"d","type":"info","f":"query-ended","errors":["NotConnected"]}

A fence leaves a second copy of a message in the source, which is a message of its own there: the
target may have it, too. Order across partitions is `fifo_order` (checkers/fifo.py), by what a
consumer of the target receives; here it is the order in each partition.

A sink that does not know its rows again, and a reader that plans a micro-batch in another way, copy
twice. A reader that reads the target of a change together with its sources mixes the messages of
keys. If the sink refuses what a query repeats by its own checkpoint, one of the two does not keep
to the offsets: queries end because they are killed, or because nobody answers, and for nothing
else.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, Final, NamedTuple

from history.events import Anomaly, Operation, learn

from campaign.checkers.fifo import FifoSend
from campaign.values import Checker, Evidence

REFUSALS: Final = frozenset(
    {"InvalidArgument", "MessagesExpired", "LogDamaged", "OrderMismatch", "UnknownSubject"}
)
"""Errors other than those of brokers that are away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyedPlace(Operation):
    """A message of a key is in the log."""

    f: ClassVar[str] = "placed"
    producer: str
    key: str
    serial: int
    queue: str
    sequence: int
    is_source: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryEnded(Operation):
    """A driver of Spark ended, and these errors of the product are in its output."""

    f: ClassVar[str] = "query-ended"
    errors: tuple[str, ...] = ()


learn(KeyedPlace, QueryEnded, errors=tuple)


class _Name(NamedTuple):
    producer: str
    key: str
    serial: int


def _places(events: Iterable[Operation], *, is_source: bool) -> dict[_Name, set[tuple[str, int]]]:
    found: defaultdict[_Name, set[tuple[str, int]]] = defaultdict(set)
    for event in events:
        if isinstance(event, KeyedPlace) and event.is_source is is_source:
            name = _Name(event.producer, event.key, event.serial)
            found[name].add((event.queue, event.sequence))
    return found


def all_placed(events: Iterable[Operation]) -> bool:
    """Whether everything acknowledged was seen in the source and in the target."""
    events = tuple(events)
    acked = {
        _Name(event.process, event.key, event.serial)
        for event in events
        if isinstance(event, FifoSend) and event.type == "ok"
    }
    return all(acked <= _places(events, is_source=each).keys() for each in (True, False))


def _twice(evidence: Evidence) -> Iterator[Anomaly]:
    sources = _places(evidence.history, is_source=True)
    for name, places in _places(evidence.history, is_source=False).items():
        if len(places) > max(len(sources.get(name, ())), 1):
            yield Anomaly(
                "keyed_once", f"{name.key} {name.serial} of {name.producer} is at {sorted(places)}"
            )


def _mixed(evidence: Evidence) -> Iterator[Anomaly]:
    acked = {
        _Name(event.process, event.key, event.serial)
        for event in evidence.history
        if isinstance(event, FifoSend) and event.type == "ok"
    }
    first: defaultdict[tuple[str, str, str], dict[int, int]] = defaultdict(dict)
    """By queue, producer and key: serial → its first sequence there."""
    for name, places in _places(evidence.history, is_source=False).items():
        for queue, sequence in places if name in acked else ():
            found = first[queue, name.producer, name.key]
            found[name.serial] = min(found.get(name.serial, sequence), sequence)
    for (queue, producer, key), found in first.items():
        for (earlier, one), (later, other) in pairwise(sorted(found.items())):
            if other < one:
                yield Anomaly(
                    "keyed_in_order",
                    f"{key} {later} of {producer} is in {queue} at {other}, before {earlier} at "
                    f"{one}",
                )


def _refused(evidence: Evidence) -> Iterator[Anomaly]:
    for event in evidence.history:
        if isinstance(event, QueryEnded) and REFUSALS.intersection(event.errors):
            wrong = ", ".join(event.errors)
            yield Anomaly("stream_goes_on", f"a query of {event.process} ended with {wrong}")


CHECKERS = (
    Checker(
        name="keyed_once",
        what="the ordered target of a stream has each message once",
        find=_twice,
    ),
    Checker(
        name="keyed_in_order",
        what="each partition of a stream's target has a key's messages in order",
        find=_mixed,
    ),
    Checker(
        name="stream_goes_on",
        what="a query that continues from its checkpoint is refused nothing",
        find=_refused,
    ),
)
