"""Whether a run is a pass: the checkers' findings, and the gates. Pure.

    fail        a checker found a broken promise, or the cluster did not serve again after a fault
    no proof    nothing is broken, but the run shows too little: an operation of the workload was
                never answered, the fault was not met or healed, or nothing was answered after it
    pass        neither

Where the contract lets a fault destroy the last messages (`Fault.loses_sends`), what was sent
shortly before and during it is *doubtful*: checkers do not get to see it, and it is counted. What
that means for its events, a workload says (`Workload.doubting`); for Send and Poll it is here.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from history.events import Anomaly, History, Operation, Poll, Send

from campaign.values import CampaignTest, Checker, Doubt, Evidence, Strike

SHOWN_MAX: Final = 10
DOUBTFUL_S: Final = 1.0
"""How long before the last sync began a message may have been acknowledged that is not on a disk:
"about the last two flushes", on slow disks, and on a busy machine.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a test showed."""

    test: str
    verdict: str
    """pass, fail, no proof, skipped or error."""
    seed: int
    seconds: float
    reason: str = ""
    counts: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Ends of operations, by operation and outcome."""
    strikes: Mapping[str, int] = field(default_factory=dict)
    """How often each fault took effect."""
    during: Mapping[str, int] = field(default_factory=dict)
    """Operations that were answered while a fault lasted."""
    effects: Sequence[str] = ()
    unmet: Sequence[str] = ()
    """Gates that stayed closed."""
    found: Mapping[str, int] = field(default_factory=dict)
    """Broken promises, by checker."""
    anomalies: Sequence[str] = ()
    doubtful: int = 0
    """Messages that the fault may have destroyed, and that nothing is said of."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def judged(
    test: CampaignTest,
    events: Iterable[Operation],
    checkers: Mapping[str, Checker],
    *,
    is_drained: bool,
    seed: int,
    seconds: float,
    reason: str = "",
) -> Result:
    """The verdict on the events of all processes, in the order of time. `reason` is why the run
    could not go to its end.
    """
    events = tuple(events)
    doubts = doubts_of(events) if test.durability in test.fault.loses_sends else ()
    known, left_out = (test.workload.doubting or of_messages)(events, doubts)
    evidence = Evidence(
        history=History(known),  # type: ignore[arg-type]
        is_drained=is_drained,
        groups=test.workload.groups,
        strict=test.workload.strict,
    )
    anomalies: dict[str, list[Anomaly]] = {
        name: found for name in test.checkers if (found := list(checkers[name].find(evidence)))
    }
    unmet = list(gates(test, events, is_drained=is_drained))
    is_broken = bool(anomalies or reason)
    return Result(
        test=test.name,
        verdict="fail" if is_broken else "no proof" if unmet else "pass",
        seed=seed,
        seconds=round(seconds, 1),
        reason=reason,
        counts=counts_of(events),
        strikes=dict(Counter(each.fault for each in _effective(events))),
        during=during_faults(events),
        effects=[each.effect for each in _effective(events)],
        unmet=unmet,
        found={name: len(found) for name, found in anomalies.items()},
        anomalies=[
            f"{name}: {each}" for name, found in anomalies.items() for each in found[:SHOWN_MAX]
        ],
        doubtful=left_out,
    )


def counts_of(events: Iterable[Operation]) -> dict[str, dict[str, int]]:
    """How often each operation ended how."""
    found: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for event in events:
        if not isinstance(event, Strike) and event.type != "invoke":
            found[name_of(event)][event.type] += 1
    return {name: dict(counts) for name, counts in sorted(found.items())}


def name_of(event: Operation) -> str:
    """The operation's name in a line."""
    return str(event.f)  # type: ignore[attr-defined]


def during_faults(events: Iterable[Operation]) -> dict[str, int]:
    """How many operations of each kind were answered between a strike's effect and its end."""
    found: Counter[str] = Counter()
    lasting = False
    for event in events:
        if isinstance(event, Strike):
            lasting = event.type == "info"
        elif lasting and event.type == "ok":
            found[name_of(event)] += 1
    return dict(found)


def gates(test: CampaignTest, events: Sequence[Operation], *, is_drained: bool) -> Iterator[str]:
    """What the run did not show."""
    counts = counts_of(events)
    for name, least in test.workload.gates.items():
        count = counts.get(name, {}).get("ok", 0)
        if count < least:
            yield f"{name}: {count} answered, at least {least} are wanted"
    if not is_drained:
        yield "readers did not get everything in time"
    strikes = [event for event in events if isinstance(event, Strike)]
    if not any(each.type == "info" and each.effect for each in strikes):
        yield f"the fault {test.fault.name} was never met"
    ends = [each.t_ns for each in strikes if each.type == "ok"]
    if len(ends) < sum(each.type == "invoke" for each in strikes):
        yield "a fault was not healed"
    for name in test.workload.gates:
        is_later = any(
            name_of(event) == name and event.type == "ok" and event.t_ns > max(ends, default=0)
            for event in events
        )
        if not is_later:
            yield f"{name}: nothing was answered after the last fault"


def _effective(events: Iterable[Operation]) -> list[Strike]:
    return [
        event
        for event in events
        if isinstance(event, Strike) and event.type == "info" and event.effect
    ]


def doubts_of(events: Iterable[Operation]) -> list[Doubt]:
    """The times of the strikes, from shortly before until each took effect. A strike that first
    makes disks slow says when their last syncs began: until then nothing is doubtful.
    """
    found: list[Doubt] = []
    begun: Strike | None = None
    for event in events:
        if isinstance(event, Strike) and event.type == "invoke":
            begun = event
        elif isinstance(event, Strike) and event.type == "info" and begun is not None:
            found.append(
                Doubt(
                    since_ns=(event.unsynced_ns or begun.t_ns) - int(DOUBTFUL_S * 1e9),
                    until_ns=event.t_ns,
                    since_ms=(event.unsynced_ms or begun.at_ms) - int(DOUBTFUL_S * 1e3),
                    until_ms=event.at_ms,
                )
            )
    return found


def of_messages(
    events: Sequence[Operation], doubts: Sequence[Doubt]
) -> tuple[Sequence[Operation], int]:
    """For Send and Poll."""
    values = doubtful(events, doubts)
    return tuple(without(events, values)), len(values)


def doubtful(events: Iterable[Operation], doubts: Sequence[Doubt]) -> frozenset[int]:
    """Values whose last send was answered in such a time, or was under way then."""
    times: dict[int, list[int]] = {}
    for event in events if doubts else ():
        if isinstance(event, Send):
            for value in event.values:
                times.setdefault(value, []).append(event.t_ns)
    return frozenset(
        value
        for value, found in times.items()
        if any(doubt.has(found[0], found[-1], is_open=len(found) == 1) for doubt in doubts)
    )


def without(events: Iterable[Operation], values: frozenset[int]) -> Iterator[Operation]:
    """The events as if nothing were known of these values: their sends have an unknown outcome, and
    no poll has them.
    """
    for event in events:
        if values and isinstance(event, Send) and event.type == "ok":
            known = tuple(value for value in event.values if value not in values)
            if len(known) < len(event.values):
                yield replace(event, type="info", queue=None, sequence=None)
                continue
        elif values and isinstance(event, Poll) and event.records:
            kept = tuple(each for each in event.records if each.value not in values)
            if not kept and event.records:
                yield replace(event, records=(), queue=None)
                continue
            yield replace(event, records=kept)
            continue
        yield event
