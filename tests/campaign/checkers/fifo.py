"""FIFO messages through the RocketMQ gateway, as RocketMQ's client sends and receives them.

    {"process":"s","type":"invoke","f":"fifo","key":"g1","serial":3}
    {"process":"s","type":"ok","f":"fifo","key":"g1","serial":3}
    {"process":"r","type":"ok","f":"received","producer":"s","key":"g1","serial":3,"attempt":1}

A sender sends one message after another, each when the one before is answered; its serials grow by
message group. An error of the client says nothing of the message. Only first deliveries are in
order: what was not acknowledged comes again.

A gateway that hands several messages of a group out at once, or sends a group's messages over two
connections, is found here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import ClassVar

from history.events import Anomaly, Operation, learn

from campaign.values import Checker, Evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class FifoSend(Operation):
    """A message of a message group is sent."""

    f: ClassVar[str] = "fifo"
    key: str
    serial: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FifoReceive(Operation):
    """A consumer has a message."""

    f: ClassVar[str] = "received"
    producer: str
    key: str
    serial: int
    attempt: int


learn(FifoSend, FifoReceive)


@dataclass(slots=True)
class _Group:
    """One sender's messages of a message group."""

    begun: set[int] = field(default_factory=set)
    acked: set[int] = field(default_factory=set)
    received: dict[int, int] = field(default_factory=dict)
    """By serial: the number of its first delivery."""


def _groups(events: Iterable[Operation]) -> dict[tuple[str, str], _Group]:
    found: defaultdict[tuple[str, str], _Group] = defaultdict(_Group)
    for event in events:
        if isinstance(event, FifoSend):
            group = found[event.process, event.key]
            (group.acked if event.type == "ok" else group.begun).add(event.serial)
        elif isinstance(event, FifoReceive):
            received = found[event.producer, event.key].received
            received.setdefault(event.serial, len(received))
    return found


def all_received(events: Sequence[Operation]) -> bool:
    """Whether everything acknowledged was received."""
    return all(group.acked <= group.received.keys() for group in _groups(events).values())


def _lost(evidence: Evidence) -> Iterator[Anomaly]:
    for (process, key), group in _groups(evidence.history).items():
        for serial in sorted(group.acked - group.received.keys()):
            yield Anomaly("fifo_comes", f"{key} {serial} of {process} never came")


def _disordered(evidence: Evidence) -> Iterator[Anomaly]:
    for (process, key), group in _groups(evidence.history).items():
        known = sorted(group.acked & group.received.keys())
        for earlier, later in pairwise(known):
            if group.received[later] < group.received[earlier]:
                yield Anomaly(
                    "fifo_order", f"{key} {later} of {process} came before {key} {earlier}"
                )


def _phantom(evidence: Evidence) -> Iterator[Anomaly]:
    for (process, key), group in _groups(evidence.history).items():
        for serial in sorted(group.received.keys() - group.begun):
            yield Anomaly("fifo_no_phantom", f"{key} {serial} of {process} was never sent")


CHECKERS = (
    Checker(name="fifo_comes", what="every acknowledged FIFO message comes", find=_lost),
    Checker(
        name="fifo_order",
        what="first deliveries of a message group are in the order of sending",
        find=_disordered,
    ),
    Checker(name="fifo_no_phantom", what="what comes was sent", find=_phantom),
)
