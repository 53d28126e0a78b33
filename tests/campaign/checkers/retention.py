"""Retention: what is deleted must be old enough, or too much, and groups that lag are told.

    {"process":"w","type":"ok","f":"kept","queue":"s/0@g1","first":40,"end":900}
    {"process":"c","type":"ok","f":"told","group":"slow"}                               MessagesExpired
    {"process":"c","type":"ok","f":"passing","group":"slow","queue":"s/0@g1","from_sequence":12,"to_sequence":40}
    {"process":"w","type":"ok","f":"uncounted","group":"slow","queue":"s/0@g1","count":0}

`kept` is a queue as somebody saw it: everything before `first` was deleted by then. `passing` is the answer to the reset with which a group continues after it was told.
`uncounted` is how many messages of a group were deleted while they waited for another attempt: the
broker counts them, and tells nobody else.

A message is stored between the beginning of its send and the answer. So a deleted message is surely
too young if even the longest possible age is too little:

    send      [.....stored.....ok]
    kept                                  [....first is behind it]
              |<-------- too young if this is less than the retention ------>|

The planted bugs delete-early, delete-much and skip-unsaid break `kept_while_young`, `kept_while_few`
and `deleted_is_said`.
"""  # noqa: E501

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import ClassVar, Final

from history.events import Anomaly, Operation, Poll, Send, learn

from campaign.values import Checker, Drained, Evidence

AGE_MS: Final = 8_000
"""The retention by age of the workload's subject."""
QUEUE_BYTES: Final = 400_000
"""The retention by size."""
BODY_BYTES: Final = 1_000
STORED_BYTES_MAX: Final = 1_400
"""What one such message takes at most: its body and its share of the batch."""
BATCH: Final = 10
SKIPPER: Final = "skipper"
"""The group whose consumer asks to be told nothing."""
SKEW_NS: Final = 100_000_000
"""Kept times of two replicas differ by less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptRange(Operation):
    """The messages `first` to `end` (exclusive) of a queue are kept."""

    f: ClassVar[str] = "kept"
    queue: str = ""
    first: int = 0
    end: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ToldExpired(Operation):
    """A consumer was told that its group's next messages were deleted."""

    f: ClassVar[str] = "told"
    group: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PassingBy(Operation):
    """A group continues behind deleted messages."""

    f: ClassVar[str] = "passing"
    group: str
    queue: str = ""
    from_sequence: int = 0
    to_sequence: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Uncounted(Operation):
    """Messages of a group that were deleted while they waited for another attempt."""

    f: ClassVar[str] = "uncounted"
    group: str
    queue: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeletionSeen(Operation):
    """Messages were deleted since somebody looked last: for the gates."""

    f: ClassVar[str] = "deleted"
    queue: str


learn(KeptRange, ToldExpired, PassingBy, Uncounted, DeletionSeen)


@dataclass(slots=True)
class _Queue:
    """What is known of one queue's messages."""

    sent_ns: dict[int, int] = field(default_factory=dict)
    """By sequence: when the send of an acknowledged message began."""
    value: dict[int, int] = field(default_factory=dict)
    seen: defaultdict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    """By group: sequences that were handed out."""
    passed: defaultdict[str, list[PassingBy]] = field(default_factory=lambda: defaultdict(list))
    expired: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    kept: list[KeptRange] = field(default_factory=list)

    def untold(self, group: str) -> list[int]:
        """Acknowledged messages that a group neither got nor was told of."""
        told = self.told(group)
        return [
            each for each in sorted(self.sent_ns) if each >= told and each not in self.seen[group]
        ]

    def told(self, group: str) -> int:
        """The group knows that everything before this is deleted."""
        return max((each.to_sequence for each in self.passed[group]), default=0)


def _queues(events: Iterable[Operation]) -> dict[str, _Queue]:
    found: defaultdict[str, _Queue] = defaultdict(_Queue)
    begun_ns: dict[int, int] = {}
    for event in events:
        if isinstance(event, Send):
            if event.type == "invoke":
                begun_ns.update(dict.fromkeys(event.values, event.t_ns))
            elif event.type == "ok" and event.queue and event.sequence is not None:
                for sequence, value in enumerate(event.values, event.sequence):
                    found[event.queue].sent_ns[sequence] = begun_ns[value]
                    found[event.queue].value[sequence] = value
        elif isinstance(event, Poll) and event.type == "ok" and event.queue:
            seen = found[event.queue].seen[event.group]
            seen.update(record.sequence for record in event.records)
        elif isinstance(event, PassingBy) and event.type == "ok" and event.queue:
            found[event.queue].passed[event.group].append(event)
        elif isinstance(event, Uncounted):
            expired = found[event.queue].expired
            expired[event.group] = max(expired[event.group], event.count)
        elif isinstance(event, KeptRange) and event.type == "ok":
            found[event.queue].kept.append(event)
    return found


@lru_cache(maxsize=2)
def _of(evidence: Evidence) -> dict[str, _Queue]:
    return _queues(evidence.history)


def all_read_or_told(groups: tuple[str, ...]) -> Drained:
    """Whether each group is at the end of each queue and knows of all that it did not get."""

    def is_drained(events: Sequence[Operation]) -> bool:
        found = _queues(events)
        return all(
            _is_through(queue, group) and len(queue.untold(group)) <= queue.expired[group]
            for queue in found.values()
            for group in groups
        )

    return is_drained


def has_skipped(events: Sequence[Operation]) -> bool:
    """Whether the group that is told nothing is at the end of each queue."""
    return all(_is_through(queue, SKIPPER) for queue in _queues(events).values())


def _is_through(queue: _Queue, group: str) -> bool:
    newest = max(queue.sent_ns, default=-1)
    return newest < queue.told(group) or newest in queue.seen[group]


def _deleted(evidence: Evidence) -> Iterator[tuple[str, _Queue, KeptRange, int]]:
    """(queue's name, queue, what was seen, newest deleted acknowledged message), for each first
    sight of a deletion.
    """
    for name, queue in _of(evidence).items():
        known, last = sorted(queue.sent_ns), -1
        for kept in queue.kept:
            at = bisect_left(known, kept.first) - 1
            if at >= 0 and known[at] > last:
                last = known[at]
                yield name, queue, kept, last


def _young(evidence: Evidence) -> Iterator[Anomaly]:
    for name, queue, kept, newest in _deleted(evidence):
        age_ns = kept.t_ns - queue.sent_ns[newest]
        if age_ns + SKEW_NS < AGE_MS * 1_000_000:
            yield Anomaly(
                "kept_while_young",
                f"{queue.value[newest]} at {name} {newest} was deleted at most "
                f"{age_ns / 1e9:.2f} s after it was sent, {AGE_MS / 1000:g} s are promised",
            )


def _few(evidence: Evidence) -> Iterator[Anomaly]:
    for name, queue, kept, newest in _deleted(evidence):
        left = (kept.end - kept.first + BATCH) * STORED_BYTES_MAX
        if left < QUEUE_BYTES:
            yield Anomaly(
                "kept_while_few",
                f"{queue.value[newest]} at {name} {newest} was deleted, and the "
                f"{kept.end - kept.first} messages behind it have at most {left} bytes of "
                f"{QUEUE_BYTES}",
            )


def _untold(evidence: Evidence) -> Iterator[Anomaly]:
    for name, queue in _of(evidence).items():
        for group in evidence.groups:
            left = queue.untold(group)
            if len(left) > queue.expired[group] and _is_through(queue, group):
                some = ", ".join(str(queue.value[each]) for each in left[:5])
                yield Anomaly(
                    "deleted_is_said",
                    f"{group} never got {len(left)} messages of {name}, and was not told "
                    f"(the broker counts {queue.expired[group]}): {some}",
                )


def _does_not_skip(evidence: Evidence) -> Iterator[Anomaly]:
    for event in evidence.history:
        if isinstance(event, ToldExpired) and event.group == SKIPPER:
            yield Anomaly("skip_goes_on", f"{event.process} asked to skip, and was told")
    for name, queue in _of(evidence).items():
        if not evidence.is_drained and not _is_through(queue, SKIPPER):
            yield Anomaly("skip_goes_on", f"{SKIPPER} did not come to the end of {name}")


def _passed_young(evidence: Evidence) -> Iterator[Anomaly]:
    for name, queue in _of(evidence).items():
        for group, answers in queue.passed.items():
            for event in answers:
                for sequence in range(event.from_sequence, event.to_sequence):
                    sent_ns = queue.sent_ns.get(sequence, 0)
                    if event.t_ns - sent_ns + SKEW_NS < AGE_MS * 1_000_000:
                        yield Anomaly(
                            "passed_is_old",
                            f"{group} was put behind {queue.value[sequence]} at {name} "
                            f"{sequence}, {(event.t_ns - sent_ns) / 1e9:.2f} s after it was sent",
                        )
                        break


CHECKERS = (
    Checker(name="kept_while_young", what="no message is deleted before its age", find=_young),
    Checker(
        name="kept_while_few", what="no message is deleted while its queue is small", find=_few
    ),
    Checker(
        name="deleted_is_said",
        what="a group gets every message, or is told, or the broker counts it as expired",
        find=_untold,
    ),
    Checker(
        name="skip_goes_on",
        what="a consumer that asks for it continues behind deleted messages by itself",
        find=_does_not_skip,
    ),
    Checker(
        name="passed_is_old",
        what="a group that is told continues with the oldest message that is not too old",
        find=_passed_young,
    ),
)
