"""Dead letters: what consumers refused, what lies in the dead-letter queue, what was replayed.

    {"process":"w","type":"info","f":"refusal","group":"workers","queue":"campaign/0@g1","sequence":4,"value":8,"attempt":3,"how":"nack"}
    {"process":"a","type":"ok","f":"dead","place":"g1/0/1700000000000","value":8,"queue":"campaign/0@g1","sequence":4,"attempts":3}
    {"process":"o","type":"invoke","f":"replays"}
    {"process":"o","type":"ok","f":"replays","count":1}
    {"process":"w","type":"ok","f":"again","place":"g1/0/1700000000000","value":8,"queue":"campaign/0@g1","sequence":90}

`place` names a letter: broker group, sequence in the dead-letter queue and the time of the death, as
the header `qmq-replay-of` of its copy does. `queue` and `sequence` are the message's own. Deliveries
are polls, and acknowledgements are by sequence.

The contract's exception (a packet of a killed process that reaches a broker after the next replay
has looked) is not modelled: a process needs longer to start than packets on this machine take.

The planted bug bury-nowhere breaks `dead_or_done`. A writer of letters that forgets its numbers at a
failover, a count of attempts that is not in the log, and a replay that does not look for its copies
break the others.
"""  # noqa: E501

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import ClassVar, Final, TypeAlias

from history.events import Ack, Anomaly, Operation, Poll, learn

from campaign.values import Checker, Evidence

ATTEMPTS_MAX: Final = 3
"""What the workload sets for its group."""
PATIENCE_NS: Final = 60_000_000_000
"""A letter that waits longer for a replay, while replays are answered, is forgotten."""

Place: TypeAlias = tuple[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal(Operation):
    """A consumer nacks or rejects a message. Nothing tells it whether the broker heard it."""

    f: ClassVar[str] = "refusal"
    group: str
    queue: str
    sequence: int
    value: int
    attempt: int
    how: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadCopy(Operation):
    """A message lies in the dead-letter queue."""

    f: ClassVar[str] = "dead"
    place: str
    value: int
    queue: str
    sequence: int
    attempts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Replays(Operation):
    """All letters are sent again."""

    f: ClassVar[str] = "replays"
    count: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Again(Operation):
    """A replayed message is handed out."""

    f: ClassVar[str] = "again"
    place: str
    value: int
    queue: str
    sequence: int


learn(Refusal, DeadCopy, Replays, Again)


@dataclass(slots=True)
class _Deaths:
    given: dict[Place, int] = field(default_factory=dict)
    """Values by the place where they were handed out."""
    acked: dict[Place, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Ends of acknowledgements; `invoke` for one without an end."""
    rejected: set[Place] = field(default_factory=set)
    letters: dict[str, DeadCopy] = field(default_factory=dict)
    of: dict[Place, set[str]] = field(default_factory=lambda: defaultdict(set))
    """The letters of a message."""
    copies: dict[str, dict[Place, int]] = field(default_factory=lambda: defaultdict(dict))
    """By letter: where its replays lie, and their values."""
    attempts: dict[Place, int] = field(default_factory=dict)
    """The last one that was handed to an application."""
    replayed_ns: int = 0
    """When the last replay was answered."""

    @property
    def open(self) -> set[Place]:
        """Neither acknowledged, perhaps, nor dead."""
        return {
            place for place in self.given if not self.acked[place] - {"fail"} and not self.of[place]
        }

    @property
    def waiting(self) -> set[str]:
        """Letters that nobody saw replayed."""
        return self.letters.keys() - self.copies.keys()


def _deaths(events: Iterable[Operation]) -> _Deaths:
    found = _Deaths()
    for event in events:
        if isinstance(event, Poll) and event.type == "ok" and event.queue:
            for sequence, value, attempt in event.records:
                place = (event.queue, sequence)
                found.given.setdefault(place, value)
                found.attempts[place] = max(found.attempts.get(place, 0), attempt)
        elif isinstance(event, Ack):
            for sequence in event.sequences:
                ends = found.acked[event.queue, sequence]
                ends.add(event.type)
                if event.type != "invoke":
                    ends.discard("invoke")
        elif isinstance(event, Refusal) and event.how == "reject":
            found.rejected.add((event.queue, event.sequence))
        elif isinstance(event, DeadCopy):
            found.letters.setdefault(event.place, event)
            found.of[event.queue, event.sequence].add(event.place)
        elif isinstance(event, Again):
            found.copies[event.place][event.queue, event.sequence] = event.value
        elif isinstance(event, Replays) and event.type == "ok":
            found.replayed_ns = event.t_ns
    return found


@lru_cache(maxsize=2)
def _of(evidence: Evidence) -> _Deaths:
    return _deaths(evidence.history)


def all_buried(events: Sequence[Operation]) -> bool:
    """Whether all that was handed out is acknowledged or dead, and all that is dead was replayed
    and then acknowledged.
    """
    found = _deaths(events)
    return not found.open and not found.waiting


def _neither(evidence: Evidence) -> Iterator[Anomaly]:
    found = _of(evidence)
    for queue, sequence in sorted(found.open):
        yield Anomaly(
            "dead_or_done",
            f"{found.given[queue, sequence]} at {queue} {sequence} was handed out, and is neither "
            "acknowledged nor in the dead-letter queue",
        )


def _both(evidence: Evidence) -> Iterator[Anomaly]:
    found = _of(evidence)
    for place, ends in found.acked.items():
        if "ok" in ends and found.of[place]:
            yield Anomaly(
                "dead_xor_done",
                f"{found.given.get(place)} at {place} was acknowledged, and is the dead letter "
                f"{sorted(found.of[place])}",
            )


def _dead_twice(evidence: Evidence) -> Iterator[Anomaly]:
    for place, letters in _of(evidence).of.items():
        if len(letters) > 1:
            yield Anomaly("dead_once", f"{place} has {len(letters)} letters: {sorted(letters)}")


def _attempts(evidence: Evidence) -> Iterator[Anomaly]:
    found = _of(evidence)
    for place, attempt in found.attempts.items():
        if attempt > ATTEMPTS_MAX:
            yield Anomaly("dead_in_time", f"{place} was handed out as attempt {attempt}")
    for letter in found.letters.values():
        is_rejected = (letter.queue, letter.sequence) in found.rejected
        if letter.attempts != ATTEMPTS_MAX and not (is_rejected and letter.attempts > 0):
            yield Anomaly(
                "dead_in_time",
                f"{letter.value} died after {letter.attempts} attempts and was not rejected",
            )


def _beside(evidence: Evidence) -> Iterator[Anomaly]:
    """Who was never given the last attempt cannot have failed in it."""
    found = _of(evidence)
    for letter in found.letters.values():
        last = found.attempts.get((letter.queue, letter.sequence), 0)
        if last < letter.attempts:
            yield Anomaly(
                "dead_by_itself",
                f"{letter.value} died of attempt {letter.attempts}, and no consumer was given "
                f"more than attempt {last}",
            )


def _wrong_letter(evidence: Evidence) -> Iterator[Anomaly]:
    found = _of(evidence)
    for letter in found.letters.values():
        given = found.given.get((letter.queue, letter.sequence))
        if given is not None and given != letter.value:
            yield Anomaly(
                "letter_as_sent",
                f"letter {letter.place} has {letter.value}, and its message was {given}",
            )
    for place, copies in found.copies.items():
        for at, value in copies.items():
            if place in found.letters and found.letters[place].value != value:
                yield Anomaly(
                    "letter_as_sent",
                    f"letter {place} has {found.letters[place].value}, its replay at {at} {value}",
                )


def _replayed_twice(evidence: Evidence) -> Iterator[Anomaly]:
    for letter, copies in _of(evidence).copies.items():
        if len(copies) > 1:
            yield Anomaly("replayed_once", f"letter {letter} was sent again at {sorted(copies)}")


def _not_replayed(evidence: Evidence) -> Iterator[Anomaly]:
    found = _of(evidence)
    for place in sorted(found.waiting):
        letter = found.letters[place]
        if found.replayed_ns > letter.t_ns + PATIENCE_NS:
            yield Anomaly(
                "replay_comes",
                f"letter {place} of {letter.value} never came again, though replays were answered",
            )


CHECKERS = (
    Checker(
        name="dead_or_done",
        what="what was handed out ends acknowledged or in the dead-letter queue",
        find=_neither,
    ),
    Checker(
        name="dead_xor_done",
        what="no acknowledged message is in the dead-letter queue",
        find=_both,
    ),
    Checker(name="dead_once", what="a message is in the dead-letter queue once", find=_dead_twice),
    Checker(
        name="dead_in_time",
        what="a message is dead after its last attempt or a rejection, neither before nor later",
        find=_attempts,
    ),
    Checker(
        name="dead_by_itself",
        what="no message dies because it was prefetched beside one that kills its consumers",
        find=_beside,
    ),
    Checker(
        name="letter_as_sent",
        what="a letter and its replay have the content of their message",
        find=_wrong_letter,
    ),
    Checker(name="replayed_once", what="no letter is sent again twice", find=_replayed_twice),
    Checker(name="replay_comes", what="a replayed letter comes to its group", find=_not_replayed),
)
