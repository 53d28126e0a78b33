"""Groups that are moved while they consume.

    {"process":"o","type":"invoke","f":"rewind","group":"g","to":"time","at_ms":170500,"now_ms":171000}
    {"process":"o","type":"ok","f":"rewind","group":"g","to":"time","at_ms":170500,"now_ms":171000,"queue":"s/0@g1","from_sequence":90,"to_sequence":40}

`to` is earliest, latest or time; `at_ms` is that time and `now_ms` the time of the line's beginning,
both by the machine's wall clock. An answer says where the group continues: everything from there on
comes, again or for the first time. The last reset of each group is judged by that, because nothing
is moved after it; each answer is judged by where it points. The planted bug reset-nothing breaks
`reset_gives_all`.
"""  # noqa: E501

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import ClassVar, Final

from history.events import Anomaly, Operation, Poll, Send, learn

from campaign.values import Checker, Evidence

SLACK_MS: Final = 1_000
"""Brokers stamp messages with a kept time, which follows the machine's clock slowly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewind(Operation):
    """An operator moves a group."""

    f: ClassVar[str] = "rewind"
    group: str
    to: str
    now_ms: int
    at_ms: int = 0
    queue: str = ""
    from_sequence: int = 0
    to_sequence: int = 0


learn(Rewind)


@dataclass(frozen=True, slots=True)
class _Stored:
    queue: str
    sequence: int
    begun_ns: int
    ended_ns: int


@dataclass(slots=True)
class _Log:
    stored: dict[int, _Stored] = field(default_factory=dict)
    """Acknowledged values."""
    answers: list[tuple[Rewind, Rewind]] = field(default_factory=list)
    """Beginning and end of each reset that was answered, one for each queue."""
    last: dict[str, Rewind] = field(default_factory=dict)
    """Of each group the beginning of its last reset, answered or not."""
    polled: defaultdict[str, list[tuple[int, Poll]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    """By group: when a poll was answered, and what it brought."""

    def seen_since(self, group: str, since_ns: int) -> set[int]:
        """The values that a group got after a time."""
        return {
            record.value
            for t_ns, poll in self.polled[group]
            if t_ns > since_ns
            for record in poll.records
        }

    def missing(self, group: str) -> list[int]:
        """Values behind the place where the last reset put the group, that it did not get after
        that. Nothing is missing where the last reset has no answer, or answered nothing.
        """
        begun = self.last.get(group)
        ends = {
            end.queue: end.to_sequence for each, end in self.answers if begun is each and end.queue
        }
        if begun is None or not ends:
            return []
        seen = self.seen_since(group, begun.t_ns)
        return sorted(
            value
            for value, at in self.stored.items()
            if at.queue in ends and at.sequence >= ends[at.queue] and value not in seen
        )


def _log(events: Iterable[Operation]) -> _Log:
    found = _Log()
    begun_ns: dict[int, int] = {}
    rewinding: dict[tuple[str, str], Rewind] = {}
    for event in events:
        if isinstance(event, Send):
            if event.type == "invoke":
                begun_ns.update(dict.fromkeys(event.values, event.t_ns))
            elif event.type == "ok" and event.queue and event.sequence is not None:
                for sequence, value in enumerate(event.values, event.sequence):
                    found.stored[value] = _Stored(
                        event.queue, sequence, begun_ns[value], event.t_ns
                    )
        elif isinstance(event, Rewind):
            key = (event.process, event.group)
            if event.type == "invoke":
                rewinding[key] = found.last[event.group] = event
            elif event.type == "ok":
                found.answers.append((rewinding[key], event))
        elif isinstance(event, Poll) and event.type == "ok" and event.records:
            found.polled[event.group].append((event.t_ns, event))
    return found


@lru_cache(maxsize=2)
def _of(evidence: Evidence) -> _Log:
    return _log(evidence.history)


def all_again(events: Sequence[Operation]) -> bool:
    """Whether each group got what is behind its last reset."""
    found = _log(events)
    return not any(found.missing(group) for group in found.last)


def _not_again(evidence: Evidence) -> Iterator[Anomaly]:
    found = _of(evidence)
    for group, begun in found.last.items():
        left = found.missing(group)
        if left:
            some = ", ".join(map(str, left[:5]))
            yield Anomaly(
                "reset_gives_all",
                f"{group}, moved to {begun.to}, did not get {len(left)} messages from there on: "
                f"{some}",
            )


def _wrong_place(evidence: Evidence) -> Iterator[Anomaly]:
    found = _of(evidence)
    for begun, end in found.answers:
        for value, at in found.stored.items():
            if at.queue == end.queue and (why := _misplaced(begun, end, at)):
                yield Anomaly(
                    "reset_to_place",
                    f"{end.group} was moved to {begun.to}, {end.queue} {end.to_sequence}, and "
                    f"{value} at {at.sequence} {why}",
                )
                break


def _misplaced(begun: Rewind, end: Rewind, at: _Stored) -> str:
    """What is wrong with a place, by one message; empty if nothing is."""
    is_behind = at.sequence >= end.to_sequence
    if begun.to == "earliest":
        return "" if is_behind else "is earlier"
    if begun.to == "latest":
        was_there = at.ended_ns < begun.t_ns
        return (
            "was there before"
            if is_behind and was_there
            else ("came after it" if not is_behind and at.begun_ns > end.t_ns else "")
        )
    time_ns = begun.t_ns - (begun.now_ms - begun.at_ms) * 1_000_000
    slack_ns = SLACK_MS * 1_000_000
    if is_behind and at.ended_ns < time_ns - slack_ns:
        return "was stored before that time"
    if not is_behind and at.begun_ns > time_ns + slack_ns:
        return "was stored after that time"
    return ""


CHECKERS = (
    Checker(
        name="reset_gives_all",
        what="after a reset the group gets everything from the place on that the answer names",
        find=_not_again,
    ),
    Checker(
        name="reset_to_place",
        what="a reset to the beginning, the end or a time goes there",
        find=_wrong_place,
    ),
)
