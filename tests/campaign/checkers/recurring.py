"""Recurring messages: what runs, and how often.

    {"process":"p","type":"invoke","f":"recur","value":7,"start_ms":10001}
    {"process":"p","type":"ok","f":"recur","value":7,"start_ms":10001}
    {"process":"p","type":"ok","f":"revoke","value":7,"now_ms":190000}         cancelled: no further runs
    {"process":"c","type":"ok","f":"run","value":7,"queue":"s/0@g1","sequence":4,"stored_ms":120200,"id":77}
    {"process":"c","type":"ok","f":"clock","now_ms":190000}                     what the wall clock says

Each message runs at every full minute from its start on. Runs that were due before the message was
sent are late runs, and come one after another: a start half an hour ago gives thirty ticks at once.
A run does not say which tick it is, but runs come in order, so the n-th run belongs to the n-th tick:

    ticks      60000   120000   180000
    stored       60210    60710   180100        early: the second run came before the second tick

`stored_ms` and `now_ms` are of the machines' clocks, which agree in these tests; `id` is the run's
message id. A run that is handed out again is at the same place.

The planted bug skip-runs breaks `every_tick_comes`; a plan that a next master sends under another
number breaks `tick_once`.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import ClassVar, Final

from history.events import Anomaly, Operation, learn

from campaign.values import Checker, Evidence

MINUTE_MS: Final = 60_000
DUE_MS: Final = 15_000
"""So old a tick has come when readers have everything."""
LOST_MS: Final = 90_000
"""So old a tick will not come any more, when readers waited in vain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrence(Operation):
    """A message that runs every minute is sent."""

    f: ClassVar[str] = "recur"
    value: int
    start_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Revoke(Operation):
    """All further runs are cancelled."""

    f: ClassVar[str] = "revoke"
    value: int
    now_ms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CronRun(Operation):
    """A consumer has a run."""

    f: ClassVar[str] = "run"
    value: int
    queue: str
    sequence: int
    stored_ms: int
    id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WallClock(Operation):
    """The time."""

    f: ClassVar[str] = "clock"
    now_ms: int


learn(Recurrence, Revoke, CronRun, WallClock)


@dataclass(slots=True)
class _Plan:
    start_ms: int
    end: str = "info"
    revoked_ms: int | None = None
    """When its cancellation was answered."""
    may_be_revoked: bool = False
    runs: dict[tuple[str, int], CronRun] = field(default_factory=dict)

    def ticks(self, until_ms: int) -> int:
        """How many there were up to a time."""
        first = -(-self.start_ms // MINUTE_MS)
        return max(until_ms // MINUTE_MS - first + 1, 0)

    def tick_ms(self, number: int) -> int:
        """The time of a tick, from 0 on."""
        return (-(-self.start_ms // MINUTE_MS) + number) * MINUTE_MS


@dataclass(slots=True)
class _Plans:
    by_value: dict[int, _Plan] = field(default_factory=dict)
    strangers: list[CronRun] = field(default_factory=list)
    now_ms: int = 0

    def missing(self, before_ms: int) -> Iterator[tuple[int, int]]:
        """Values with ticks up to then that did not come, and how many."""
        for value, plan in self.by_value.items():
            left = plan.ticks(before_ms) - len(plan.runs)
            if plan.end == "ok" and not plan.may_be_revoked and left > 0:
                yield value, left


def _plans(events: Iterable[Operation]) -> _Plans:
    """What is known. While a test runs, events of different processes are in any order."""
    found = _Plans()
    runs: list[CronRun] = []
    for event in events:
        if isinstance(event, Recurrence):
            plan = found.by_value.setdefault(event.value, _Plan(event.start_ms))
            if event.type != "invoke":
                plan.end = event.type
        elif isinstance(event, Revoke):
            plan = found.by_value[event.value]
            plan.may_be_revoked = plan.may_be_revoked or event.type != "fail"
            if event.type == "ok":
                plan.revoked_ms = event.now_ms
        elif isinstance(event, WallClock):
            found.now_ms = max(found.now_ms, event.now_ms)
        elif isinstance(event, CronRun):
            runs.append(event)
    for run in runs:
        if run.value in found.by_value:
            found.by_value[run.value].runs.setdefault((run.queue, run.sequence), run)
        else:
            found.strangers.append(run)
    return found


@lru_cache(maxsize=2)
def _of(evidence: Evidence) -> _Plans:
    return _plans(evidence.history)


def all_ran(events: Sequence[Operation]) -> bool:
    """Whether each tick but the newest has come."""
    found = _plans(events)
    return found.now_ms > 0 and not any(found.missing(found.now_ms - DUE_MS))


def _lost(evidence: Evidence) -> Iterator[Anomaly]:
    found = _of(evidence)
    before_ms = found.now_ms - (DUE_MS if evidence.is_drained else LOST_MS)
    for value, left in found.missing(before_ms):
        yield Anomaly("every_tick_comes", f"{left} runs of {value} never came")


def _twice(evidence: Evidence) -> Iterator[Anomaly]:
    for value, plan in _of(evidence).by_value.items():
        places: dict[int, tuple[str, int]] = {}
        for place, run in plan.runs.items():
            if places.setdefault(run.id, place) != place:
                yield Anomaly(
                    "tick_once", f"a run of {value} was stored at {places[run.id]} and at {place}"
                )


def _early(evidence: Evidence) -> Iterator[Anomaly]:
    for value, plan in _of(evidence).by_value.items():
        stored_ms = sorted(run.stored_ms for run in plan.runs.values())
        for number, each in enumerate(stored_ms):
            if each < plan.tick_ms(number):
                yield Anomaly(
                    "tick_in_time",
                    f"run {number + 1} of {value} was stored at {each}, before its tick at "
                    f"{plan.tick_ms(number)}: it is early, or another one came twice",
                )
                break


def _revoked(evidence: Evidence) -> Iterator[Anomaly]:
    for value, plan in _of(evidence).by_value.items():
        if plan.revoked_ms is not None and len(plan.runs) > plan.ticks(plan.revoked_ms):
            yield Anomaly(
                "revoked_ends",
                f"{value} was cancelled at {plan.revoked_ms} after {plan.ticks(plan.revoked_ms)} "
                f"ticks, and ran {len(plan.runs)} times",
            )


def _phantom(evidence: Evidence) -> Iterator[Anomaly]:
    found = _of(evidence)
    for run in found.strangers:
        yield Anomaly("run_no_phantom", f"{run.value} ran, and was never sent")
    for value, plan in found.by_value.items():
        if plan.end == "fail" and plan.runs:
            yield Anomaly("run_no_phantom", f"{value} ran, and its send failed for certain")


CHECKERS = (
    Checker(
        name="every_tick_comes",
        what="each run of a recurring message comes, also those missed in an outage",
        find=_lost,
    ),
    Checker(name="tick_once", what="a run is stored once", find=_twice),
    Checker(name="tick_in_time", what="no run comes before its tick", find=_early),
    Checker(name="revoked_ends", what="no tick after a cancellation's answer runs", find=_revoked),
    Checker(
        name="run_no_phantom",
        what="what runs was sent, and did not fail for certain",
        find=_phantom,
    ),
)
