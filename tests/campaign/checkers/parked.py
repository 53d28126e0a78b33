"""Parked keys: a consumer refuses messages of an ordered subject, and their keys are set aside.

    {"process":"c","type":"info","f":"refuse","group":"g","partition":1,"token":7,"key":"k1","producer":"p","serial":3,"attempt":2,"how":"fail"}
    {"process":"o","type":"invoke","f":"unpark","group":"g","partition":1,"key":"k1"}
    {"process":"o","type":"ok","f":"unpark","group":"g","partition":1,"key":"k1","count":4}

beside the events of ordered subjects (tests/history/ordered), where a refused message is also a
settlement that failed. Whether a refusal reached the broker is not told. The planted bug
forget-parked breaks the rule here, replay-not-all breaks `key_order`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

from history.events import Anomaly, Operation, learn
from history.ordered.events import Deliver

from campaign.values import Checker, Evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse(Operation):
    """A handler fails or rejects a message."""

    f: ClassVar[str] = "refuse"
    group: str
    partition: int
    token: int
    key: str
    producer: str
    serial: int
    attempt: int
    how: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpark(Operation):
    """A parked key is given back: its messages come again, in order. `count` of them."""

    f: ClassVar[str] = "unpark"
    group: str
    partition: int
    key: str
    count: int = 0


learn(Refuse, Unpark)


@dataclass(slots=True)
class _KeyLine:
    """What a group was given of one producer's messages of a key."""

    given: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    """By serial: how often."""
    refused: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))

    def blocks(self, serial: int) -> int | None:
        """An earlier message that was refused whenever it was given, if there is one."""
        return next(
            (
                each
                for each, times in self.refused.items()
                if each < serial and times >= self.given[each]
            ),
            None,
        )


def _passed(evidence: Evidence) -> Iterator[Anomaly]:
    """A message is given while an earlier one of its key, refused each time, waits."""
    lines: defaultdict[tuple[str, str, str], _KeyLine] = defaultdict(_KeyLine)
    for event in evidence.history:
        if isinstance(event, Refuse):
            lines[event.group, event.producer, event.key].refused[event.serial] += 1
        elif isinstance(event, Deliver):
            for handed in event.handed:
                line = lines[event.group, handed.producer, handed.key]
                before = line.blocks(handed.serial)
                if before is not None:
                    yield Anomaly(
                        "parked_waits",
                        f"{event.process} was given {handed.key} {handed.serial} of "
                        f"{handed.producer} while {before} was refused and not given again",
                    )
                    del line.refused[before]
                line.given[handed.serial] += 1


CHECKERS = (
    Checker(
        name="parked_waits",
        what="later messages of a key wait while a refused one is retried or parked",
        find=_passed,
    ),
)
