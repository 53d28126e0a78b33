"""Copies of a subject: what the target has of the source, and where the target's groups are.

    {"process":"w","type":"ok","f":"copied","value":7,"queue":"s/0@g1","sequence":0}
    {"process":"w","type":"ok","f":"place","group":"reader","queue":"s/0@g1","next_sequence":5}

Queues and sequences are the target's, which a mirror or a stream of Spark fills. `place` is where a
group of the target continues: everything before it counts as done there, so it must be done in the
source, or its acknowledgement was at least begun. Keys of an ordered subject are `fifo` and
`received` (checkers/fifo.py), the latter in the target.

A copier that forgets how far it was copies twice or leaves messages out. A mirror that moves groups
to what was handed out, and not to what was acknowledged, is ahead.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import ClassVar

from history.events import Ack, Anomaly, Operation, Send, learn

from campaign.values import Checker, Evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorCopy(Operation):
    """A message is in the target."""

    f: ClassVar[str] = "copied"
    value: int
    queue: str
    sequence: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetPlace(Operation):
    """Where a group of the target continues."""

    f: ClassVar[str] = "place"
    group: str
    queue: str
    next_sequence: int


learn(MirrorCopy, TargetPlace)


@dataclass(slots=True)
class _Target:
    acked: set[int] = field(default_factory=set)
    """Values that the source acknowledged to their sender."""
    copies: dict[int, set[tuple[str, int]]] = field(default_factory=dict)
    done_ns: dict[tuple[str, int], int] = field(default_factory=dict)
    """By group and value: when its first acknowledgement began."""
    places: list[TargetPlace] = field(default_factory=list)


def _target(events: Iterable[Operation]) -> _Target:
    found = _Target()
    for event in events:
        if isinstance(event, Send) and event.type == "ok":
            found.acked.update(event.values)
        elif isinstance(event, MirrorCopy):
            found.copies.setdefault(event.value, set()).add((event.queue, event.sequence))
        elif isinstance(event, Ack) and event.type == "invoke":
            for value in event.values:
                found.done_ns.setdefault((event.group, value), event.t_ns)
        elif isinstance(event, TargetPlace):
            found.places.append(event)
    return found


@lru_cache(maxsize=2)
def _of(evidence: Evidence) -> _Target:
    return _target(evidence.history)


def all_copied(events: Sequence[Operation]) -> bool:
    """Whether the target has everything that the source acknowledged."""
    found = _target(events)
    return found.acked <= found.copies.keys()


def _lost(evidence: Evidence) -> Iterator[Anomaly]:
    found = _of(evidence)
    left = sorted(found.acked - found.copies.keys())
    if left:
        some = ", ".join(map(str, left[:5]))
        yield Anomaly("copy_no_loss", f"{len(left)} messages are not in the target: {some}")


def _twice(evidence: Evidence) -> Iterator[Anomaly]:
    for value, places in _of(evidence).copies.items():
        if len(places) > 1:
            yield Anomaly("copy_once", f"{value} is in the target at {sorted(places)}")


def _phantom(evidence: Evidence) -> Iterator[Anomaly]:
    outcomes = evidence.history.outcomes
    for value in sorted(_of(evidence).copies.keys() - outcomes.acked - outcomes.unknown):
        yield Anomaly("copy_no_phantom", f"{value} is in the target, and was not sent")


def _ahead(evidence: Evidence) -> Iterator[Anomaly]:
    found = _of(evidence)
    for place in found.places:
        for value, copies in found.copies.items():
            is_before = any(
                queue == place.queue and sequence < place.next_sequence
                for queue, sequence in copies
            )
            done_ns = found.done_ns.get((place.group, value))
            if is_before and (done_ns is None or done_ns > place.t_ns):
                yield Anomaly(
                    "mirror_not_ahead",
                    f"{place.group} of the target is at {place.queue} {place.next_sequence}, and "
                    f"{value} before that is not done in the source",
                )
                break


CHECKERS = (
    Checker(name="copy_no_loss", what="the target gets every message", find=_lost),
    Checker(name="copy_once", what="the target gets each message once", find=_twice),
    Checker(name="copy_no_phantom", what="the target gets what was sent, no more", find=_phantom),
    Checker(
        name="mirror_not_ahead",
        what="a group of the target is not ahead of what was done in the source",
        find=_ahead,
    ),
)
