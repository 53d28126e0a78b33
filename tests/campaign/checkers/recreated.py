"""Subjects that are deleted and created again under the same name.

    {"process":"o","type":"invoke","f":"raze"}
    {"process":"o","type":"ok","f":"raze"}            deleted: with all messages and groups that were there before
    {"process":"o","type":"ok","f":"found"}           created
    {"process":"c","type":"ok","f":"joined","group":"g"}    from here on the process's polls are of a new consumer

A message that was acknowledged before a deletion began is an *old* one after the deletion's answer:

    send 7 [..ok]
    delete           [.....ok]
    send 8                     [..ok]
    consumer, joined               [joined  polls 8: fine;  polls 7: an old one

A deletion without an answer continues, so it ends with the answer to the next one: until then nothing
is said. Consumers are new ones after the answer, since a client may hand out what it holds. The
planted bug keep-deleted-subject breaks `nothing_of_the_old`.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import ClassVar

from history.events import Anomaly, Operation, Poll, Send, learn

from campaign.values import Checker, Evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class Raze(Operation):
    """The subject is deleted."""

    f: ClassVar[str] = "raze"


@dataclass(frozen=True, slots=True, kw_only=True)
class Founding(Operation):
    """The subject is created."""

    f: ClassVar[str] = "found"


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedAnew(Operation):
    """A consumer is made."""

    f: ClassVar[str] = "joined"
    group: str


learn(Raze, Founding, JoinedAnew)


@dataclass(slots=True)
class _Lives:
    acked: dict[int, tuple[int, int]] = field(default_factory=dict)
    """By value: when its send began and was answered."""
    begun_ns: int = 0
    """When the first deletion since the last answered one began; 0 if there is none."""
    razed: list[tuple[int, int]] = field(default_factory=list)
    """Answered deletions: when they began and ended."""
    polls: list[tuple[int, Poll]] = field(default_factory=list)
    """Each with the time when its consumer was made."""

    def old_before(self, joined_ns: int) -> tuple[int, int]:
        """The newest deletion that was answered before a consumer was made; (0, 0) without one."""
        return max((each for each in self.razed if each[1] < joined_ns), default=(0, 0))

    def missing(self) -> list[int]:
        """Acknowledged values of the last life that nobody got. None while a deletion is open."""
        if self.begun_ns:
            return []
        since_ns = max((end for _, end in self.razed), default=0)
        seen = {record.value for _, poll in self.polls for record in poll.records}
        return sorted(
            value
            for value, (begun_ns, _) in self.acked.items()
            if begun_ns > since_ns and value not in seen
        )


def _lives(events: Iterable[Operation]) -> _Lives:
    found = _Lives()
    sent_ns: dict[int, int] = {}
    joined_ns: dict[str, int] = {}
    for event in events:
        if isinstance(event, Send):
            if event.type == "invoke":
                sent_ns.update(dict.fromkeys(event.values, event.t_ns))
            elif event.type == "ok":
                for value in event.values:
                    found.acked[value] = (sent_ns[value], event.t_ns)
        elif isinstance(event, Raze):
            if event.type == "invoke":
                found.begun_ns = found.begun_ns or event.t_ns
            elif event.type == "ok":
                found.razed.append((found.begun_ns, event.t_ns))
                found.begun_ns = 0
        elif isinstance(event, JoinedAnew):
            joined_ns[event.process] = event.t_ns
        elif isinstance(event, Poll) and event.type == "ok" and event.records:
            found.polls.append((joined_ns.get(event.process, 0), event))
    return found


@lru_cache(maxsize=2)
def _of(evidence: Evidence) -> _Lives:
    return _lives(evidence.history)


def all_of_last_life(events: Sequence[Operation]) -> bool:
    """Whether readers got everything that was sent after the last deletion."""
    return not _lives(events).missing()


def _old(evidence: Evidence) -> Iterator[Anomaly]:
    found = _of(evidence)
    for joined_ns, poll in found.polls:
        begun_ns, ended_ns = found.old_before(joined_ns)
        for record in poll.records:
            _, acked_ns = found.acked.get(record.value, (0, joined_ns))
            if acked_ns < begun_ns:
                yield Anomaly(
                    "nothing_of_the_old",
                    f"{record.value} at {poll.queue} {record.sequence} was stored "
                    f"{(begun_ns - acked_ns) / 1e9:.2f} s before the subject was deleted, and "
                    f"came {(poll.t_ns - ended_ns) / 1e9:.2f} s after that",
                    (poll,),
                )
                break


def _lost(evidence: Evidence) -> Iterator[Anomaly]:
    left = _of(evidence).missing()
    if left:
        some = ", ".join(map(str, left[:5]))
        yield Anomaly(
            "recreated_keeps",
            f"{len(left)} messages were stored after the last deletion, and never came: {some}",
        )


CHECKERS = (
    Checker(
        name="nothing_of_the_old",
        what="a subject that was created again has no message of the deleted one",
        find=_old,
    ),
    Checker(
        name="recreated_keeps",
        what="what was stored in the new subject comes to its groups from the beginning",
        find=_lost,
    ),
)
