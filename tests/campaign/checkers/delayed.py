"""Delayed messages: what senders and cancellers asked for, what came, and the rules for both.

    {"process":"p","type":"invoke","f":"later","t_ns":10,"values":[7],"due_ms":[1500]}
    {"process":"p","type":"ok","f":"later","t_ns":20,"values":[7],"due_ms":[1500]}
    {"process":"p","type":"ok","f":"cancel","t_ns":90,"value":7}                 cancelled, for certain
    {"process":"p","type":"fail","f":"cancel","t_ns":90,"value":7}               too late
    {"process":"c","type":"ok","f":"arrive","t_ns":99,"value":8,"queue":"s/0@g1","sequence":4,"stored_ms":1720}

`due_ms` and `stored_ms` (when the real-time broker stored the message) are of the machines' clocks,
which agree in these tests. A message that is handed out again is another `arrive` at the same
place, and no second copy.
"""  # noqa: E501

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import ClassVar, Final

from history.events import Anomaly, Operation, learn

from campaign.values import Checker, Doubt, Evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class Later(Operation):
    """Messages are sent, each with its due time."""

    f: ClassVar[str] = "later"
    values: tuple[int, ...] = ()
    due_ms: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel(Operation):
    """A pending message is cancelled."""

    f: ClassVar[str] = "cancel"
    value: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrive(Operation):
    """A consumer has a delayed message."""

    f: ClassVar[str] = "arrive"
    value: int
    queue: str
    sequence: int
    stored_ms: int


learn(Later, Cancel, Arrive, due_ms=tuple)


@dataclass(slots=True)
class _Message:
    """What is known of one message at the end."""

    due_ms: int
    end: str = "info"
    cancels: set[str] = field(default_factory=set)
    """Ends of its cancellations; `invoke` for one without an end."""
    places: dict[tuple[str, int], Arrive] = field(default_factory=dict)


@dataclass(slots=True)
class _Known:
    messages: dict[int, _Message] = field(default_factory=dict)
    strangers: list[Arrive] = field(default_factory=list)


def _known(events: Iterable[Operation]) -> _Known:
    known = _Known()
    arrived: defaultdict[int, dict[tuple[str, int], Arrive]] = defaultdict(dict)
    for event in events:
        if isinstance(event, Later):
            for value, due_ms in zip(event.values, event.due_ms, strict=True):
                message = known.messages.setdefault(value, _Message(due_ms))
                if event.type != "invoke":
                    message.end = event.type
        elif isinstance(event, Cancel):
            ends = known.messages[event.value].cancels
            ends.add(event.type)
            if event.type != "invoke":
                ends.discard("invoke")
        elif isinstance(event, Arrive):
            arrived[event.value].setdefault((event.queue, event.sequence), event)
    for value, places in arrived.items():
        if value in known.messages:
            known.messages[value].places = places
        else:
            known.strangers += places.values()
    return known


@lru_cache(maxsize=2)
def _of(evidence: Evidence) -> _Known:
    return _known(evidence.history)


def all_arrived(events: Sequence[Operation]) -> bool:
    """Whether everything acknowledged that nobody cancelled, for certain or perhaps, has come."""
    return not any(_is_missing(each) for each in _known(events).messages.values())


LATE_MS: Final = 15_000
"""How late a message may be on its way to the broker group: machines of tests are busy, and a group
may just elect.
"""


def doubting(
    events: Sequence[Operation], doubts: Sequence[Doubt]
) -> tuple[Sequence[Operation], int]:
    """Doubtful is a message that was sent in such a time, cancelled, or given to its broker group:
    stored there in that time, or never seen, and due shortly before. Nothing is said of it.
    """
    if not doubts:
        return events, 0
    times: dict[int, list[int]] = {}
    stored: dict[int, int] = {}
    for event in events:
        if isinstance(event, Later):
            for value in event.values:
                times.setdefault(value, []).append(event.t_ns)
        elif isinstance(event, Cancel):
            times[event.value].append(event.t_ns)
        elif isinstance(event, Arrive):
            first_ms = stored.setdefault(event.value, event.stored_ms)
            stored[event.value] = min(first_ms, event.stored_ms)
    due = {value: message.due_ms for value, message in _known(events).messages.items()}
    values = frozenset(
        value
        for value, found in times.items()
        if any(
            any(doubt.has(at_ns, at_ns) for at_ns in found)
            or (len(found) == 1 and doubt.has(found[0], found[0], is_open=True))
            or _went_in(doubt, due[value], stored.get(value))
            for doubt in doubts
        )
    )
    return tuple(_without(events, values)), len(values)


def _went_in(doubt: Doubt, due_ms: int, stored_ms: int | None) -> bool:
    if stored_ms is not None:
        return doubt.since_ms <= stored_ms <= doubt.until_ms
    return doubt.since_ms - LATE_MS <= due_ms <= doubt.until_ms


def _without(events: Iterable[Operation], values: frozenset[int]) -> Iterator[Operation]:
    for event in events:
        if isinstance(event, Later):
            kept = [at for at, value in enumerate(event.values) if value not in values]
            event = replace(
                event,
                values=tuple(event.values[at] for at in kept),
                due_ms=tuple(event.due_ms[at] for at in kept),
            )
        if not (isinstance(event, Cancel | Arrive) and event.value in values):
            yield event


def _is_missing(message: _Message) -> bool:
    may_be_cancelled = bool(message.cancels - {"fail"})
    return message.end == "ok" and not message.places and not may_be_cancelled


def _lost(evidence: Evidence) -> Iterator[Anomaly]:
    for value, message in _of(evidence).messages.items():
        if _is_missing(message):
            yield Anomaly("due_comes", f"{value}, due {message.due_ms}, never came")


def _early(evidence: Evidence) -> Iterator[Anomaly]:
    for value, message in _of(evidence).messages.items():
        for each in message.places.values():
            if each.stored_ms < message.due_ms:
                early_ms = message.due_ms - each.stored_ms
                yield Anomaly("never_early", f"{value} came {early_ms} ms early")


def _twice(evidence: Evidence) -> Iterator[Anomaly]:
    for value, message in _of(evidence).messages.items():
        if len(message.places) > 1:
            yield Anomaly("due_once", f"{value} was stored at {sorted(message.places)}")


def _cancelled(evidence: Evidence) -> Iterator[Anomaly]:
    for value, message in _of(evidence).messages.items():
        if "ok" in message.cancels and message.places:
            yield Anomaly(
                "cancelled_or_delivered", f"{value} was cancelled, and came at {[*message.places]}"
            )


def _phantom(evidence: Evidence) -> Iterator[Anomaly]:
    known = _of(evidence)
    for each in known.strangers:
        yield Anomaly("due_no_phantom", f"{each.value} came, and was never sent")
    for value, message in known.messages.items():
        if message.end == "fail" and message.places:
            yield Anomaly("due_no_phantom", f"{value} came, and its send failed for certain")


CHECKERS = (
    Checker(
        name="due_comes",
        what="an acknowledged delayed message comes, unless it was cancelled",
        find=_lost,
    ),
    Checker(name="never_early", what="no delayed message comes before its time", find=_early),
    Checker(name="due_once", what="a delayed message is stored once when it is due", find=_twice),
    Checker(
        name="cancelled_or_delivered",
        what="of cancelled and delivered exactly one happens, and the answer says which",
        find=_cancelled,
    ),
    Checker(
        name="due_no_phantom",
        what="what comes was sent, and did not fail for certain",
        find=_phantom,
    ),
)
