"""Delayed messages that change their time: what senders asked for, and the rules for it.

    {"process":"p","type":"invoke","f":"postpone","t_ns":30,"value":7,"until_ms":2500}
    {"process":"p","type":"ok","f":"postpone","t_ns":40,"value":7,"until_ms":2500}      due then, for certain
    {"process":"p","type":"fail","f":"postpone","t_ns":40,"value":7,"until_ms":2500}    too late: the old time holds

beside `later`, `cancel` and `arrive` (checkers/delayed.py). Senders move and cancel one message in
one task, one step after another.

Some messages are due far beyond the run, and are moved into it: only those come whose move was
answered, so a move that is answered and not done (the planted bug move-nothing) loses them.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import ClassVar, Final

from history.events import Anomaly, Operation, learn

from campaign.checkers.delayed import Arrive, Cancel, Later
from campaign.values import Checker, Evidence

SOON_MS: Final = 60_000
"""A message that is due so long after the last arrival is not expected in this run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Postponing(Operation):
    """A pending message gets another due time, later or earlier."""

    f: ClassVar[str] = "postpone"
    value: int
    until_ms: int


learn(Postponing)


@dataclass(slots=True)
class _Wish:
    dues_ms: set[int]
    """Its possible due times: several while the outcome of a move is unknown."""
    end: str = "info"
    may_be_cancelled: bool = False
    before_ms: set[int] = field(default_factory=set)
    """Those from before the move that is under way."""
    arrivals: list[Arrive] = field(default_factory=list)


def _wishes(events: Iterable[Operation]) -> tuple[dict[int, _Wish], int]:
    """Messages by value, and when the last one arrived. While a test runs, events of different
    processes are in any order.
    """
    found: dict[int, _Wish] = {}
    arrived: list[Arrive] = []
    for event in events:
        if isinstance(event, Later):
            for value, due_ms in zip(event.values, event.due_ms, strict=True):
                wish = found.setdefault(value, _Wish({due_ms}))
                if event.type != "invoke":
                    wish.end = event.type
        elif isinstance(event, Postponing):
            _move(found[event.value], event)
        elif isinstance(event, Cancel):
            wish = found[event.value]
            wish.may_be_cancelled = event.type != "fail"
        elif isinstance(event, Arrive):
            arrived.append(event)
    for each in arrived:
        if each.value in found:
            found[each.value].arrivals.append(each)
    return found, max((each.stored_ms for each in arrived), default=0)


def _move(wish: _Wish, event: Postponing) -> None:
    if event.type == "invoke":
        wish.before_ms = set(wish.dues_ms)
        wish.dues_ms.add(event.until_ms)
    elif event.type == "ok":
        wish.dues_ms = {event.until_ms}
    elif event.type == "fail":
        wish.dues_ms = wish.before_ms


@lru_cache(maxsize=2)
def _of(evidence: Evidence) -> tuple[dict[int, _Wish], int]:
    return _wishes(evidence.history)


def _missing(wishes: dict[int, _Wish], last_ms: int) -> Iterator[int]:
    """Values that should have come: acknowledged, surely not cancelled, at no time due later."""
    for value, wish in wishes.items():
        is_expected = wish.end == "ok" and not wish.may_be_cancelled
        if is_expected and not wish.arrivals and max(wish.dues_ms) <= last_ms + SOON_MS:
            yield value


def all_moved_arrived(events: Sequence[Operation]) -> bool:
    """Whether everything that is due in this run for certain has come."""
    return not any(_missing(*_wishes(events)))


def _lost(evidence: Evidence) -> Iterator[Anomaly]:
    wishes, last_ms = _of(evidence)
    for value in _missing(wishes, last_ms):
        yield Anomaly("moved_comes", f"{value}, due {sorted(wishes[value].dues_ms)}, never came")


def _early(evidence: Evidence) -> Iterator[Anomaly]:
    wishes, _ = _of(evidence)
    for value, wish in wishes.items():
        for each in wish.arrivals:
            early_ms = min(wish.dues_ms) - each.stored_ms
            if early_ms > 0:
                yield Anomaly(
                    "moved_in_time", f"{value} came {early_ms} ms before {sorted(wish.dues_ms)}"
                )


CHECKERS = (
    Checker(
        name="moved_comes",
        what="a delayed message comes at the time to which it was moved, also from far away",
        find=_lost,
    ),
    Checker(
        name="moved_in_time",
        what="no message comes before the time to which it was moved",
        find=_early,
    ),
)
