"""A history with indexes that several checkers need: who tried which value, the outcome of the value, when an operation began. `History` is
a value: everything in it follows from its events, and each index is made once, at its first use. Checkers are plain functions of a
`History`, so a million events are walked a few times in all and not a few times for each checker. The outcome of a value is the best
outcome of its attempts: one `ok` and it is acknowledged; otherwise one attempt without a certain end (`info`, or an `invoke` and nothing
more) and it is unknown; only if every attempt said `fail` it failed.

    invoke 7, fail 7                  failed      a poll that shows 7 is wrong
    invoke 7, info 7                  unknown     a poll may show 7 or not
    invoke 7                          unknown     as above: the producer died
    invoke 7, fail 7, invoke 7, ok 7  acked       a poll must show 7
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, overload

from history.events import Event, Poll, Send, brief


@dataclass(frozen=True, slots=True)
class Anomaly:
    """A broken promise: which one, what happened in one sentence, and the least events that prove it."""

    name: str
    what: str
    evidence: tuple[Event, ...]

    def __str__(self) -> str:
        return "\n    ".join([f"{self.name}: {self.what}", *map(brief, self.evidence)])


class Outcomes(NamedTuple):
    """The outcomes of sent values; each value is in exactly one set."""

    acked: frozenset[int]
    unknown: frozenset[int]
    failed: frozenset[int]


class History(Sequence[Event]):
    """Events in real-time order. Do not change them afterwards: the indexes would not notice."""

    def __init__(self, events: Iterable[Event]) -> None:
        self._events = tuple(events)

    @overload
    def __getitem__(self, index: int) -> Event: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Event]: ...
    def __getitem__(self, index: int | slice) -> Event | Sequence[Event]:
        return self._events[index]

    def __len__(self) -> int:
        return len(self._events)

    def __iter__(self) -> Iterator[Event]:
        return iter(self._events)

    @cached_property
    def sends(self) -> tuple[Send, ...]:
        """All lines of sends."""
        return tuple(event for event in self._events if isinstance(event, Send))

    @cached_property
    def acked_sends(self) -> tuple[tuple[Send, str, int], ...]:
        """Sends that were answered, each with its queue and base sequence."""
        found = []
        for event in self.sends:
            if event.type == "ok":
                if event.queue is None or event.sequence is None:
                    raise ValueError(f"an acknowledged send must say where: {brief(event)}")
                found.append((event, event.queue, event.sequence))
        return tuple(found)

    @cached_property
    def polls(self) -> tuple[tuple[Poll, str], ...]:
        """Polls that got messages, each with its queue."""
        found = []
        for event in self._events:
            if isinstance(event, Poll) and event.type == "ok" and event.records:
                if event.queue is None:
                    raise ValueError(f"a poll with messages must say from where: {brief(event)}")
                found.append((event, event.queue))
        return tuple(found)

    @cached_property
    def outcomes(self) -> Outcomes:
        """The outcome of every value that was tried to send."""
        ended: dict[str, set[int]] = {"ok": set(), "fail": set(), "info": set()}
        under_way: Counter[int] = Counter()
        for event in self.sends:
            if event.type == "invoke":
                under_way.update(event.values)
            else:
                under_way.subtract(event.values)
                ended[event.type].update(event.values)
        unfinished = {value for value, attempts in under_way.items() if attempts > 0}
        acked = frozenset(ended["ok"])
        unknown = frozenset(ended["info"] | unfinished) - acked
        return Outcomes(acked, unknown, frozenset(ended["fail"]) - acked - unknown)

    @cached_property
    def seen(self) -> dict[str, set[int]]:
        """The values delivered to each group at least once."""
        found: defaultdict[str, set[int]] = defaultdict(set)
        for poll, _ in self.polls:
            found[poll.group].update(record.value for record in poll.records)
        return dict(found)

    @cached_property
    def seen_by_any(self) -> frozenset[int]:
        """The values delivered to any group."""
        return frozenset().union(*self.seen.values())

    @cached_property
    def beginnings(self) -> list[int]:
        """For each line the line where its operation began; the line itself if there is no invoke. One invoke may have several ends (a
        poll answered from two queues).
        """
        begun: dict[tuple[str, str, int | None], int] = {}
        found = []
        for place, event in enumerate(self._events):
            key = (event.process, event.f, event.op)
            if event.type == "invoke":
                begun[key] = place
            found.append(begun.get(key, place))
        return found

    def first_polls(self, values: Collection[int]) -> dict[int, Poll]:
        """The first poll that shows each of these values: evidence, searched for only when something is wrong."""
        found: dict[int, Poll] = {}
        for poll, _ in self.polls if values else ():
            for record in poll.records:
                if record.value in values:
                    found.setdefault(record.value, poll)
        return found
