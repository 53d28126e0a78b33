"""Backups of a running cluster, each restored into another one.

    {"process":"k","type":"invoke","f":"backup","op":3}
    {"process":"k","type":"ok","f":"backup","op":3}
    {"process":"k","type":"ok","f":"restored","op":3,"group":"auditor","queue":"s/0@g1","records":[[0,7,1]]}

`restored` is what a group got in the cluster that was restored from the backup of that `op`, until
nothing came for a while. A new group gets everything that the backup has; the group `reader`, which
consumes in the original cluster, gets what it had not acknowledged there.

A backup that takes the brokers' logs at different moments, or leaves out what is not in a sealed
segment, is found here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import ClassVar, Final

from history.events import Ack, Anomaly, Record, Send, learn
from history.events import Operation as Event

from campaign.values import Checker, Evidence

AUDITOR: Final = "auditor"
READER: Final = "reader"


@dataclass(frozen=True, slots=True, kw_only=True)
class BackupMade(Event):
    """A backup of the whole cluster is made."""

    f: ClassVar[str] = "backup"


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoredRead(Event):
    """What a group got in the restored cluster."""

    f: ClassVar[str] = "restored"
    group: str
    queue: str
    records: tuple[Record, ...] = ()


learn(BackupMade, RestoredRead)


@dataclass(slots=True)
class _Backup:
    process: str
    begun_ns: int
    ended_ns: int = 0
    read: dict[str, dict[tuple[str, int], int]] = field(default_factory=dict)
    """By group: values by their place."""


@dataclass(slots=True)
class _Story:
    backups: dict[tuple[str, int | None], _Backup] = field(default_factory=dict)
    stored: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict)
    """By place: the value of an acknowledged message, and when the answer came."""
    acks: defaultdict[int, list[tuple[int, str]]] = field(default_factory=lambda: defaultdict(list))
    """By value: when the reader's acknowledgements began and were answered."""


@lru_cache(maxsize=2)
def _of(evidence: Evidence) -> _Story:
    found = _Story()
    for event in evidence.history:
        if isinstance(event, Send) and event.type == "ok" and event.queue:
            for sequence, value in enumerate(event.values, event.sequence or 0):
                found.stored[event.queue, sequence] = (value, event.t_ns)
        elif isinstance(event, Ack) and event.group == READER:
            for value in event.values:
                found.acks[value].append((event.t_ns, event.type))
        elif isinstance(event, BackupMade):
            key = (event.process, event.op)
            if event.type == "invoke":
                found.backups[key] = _Backup(event.process, event.t_ns)
            elif event.type == "ok":
                found.backups[key].ended_ns = event.t_ns
        elif isinstance(event, RestoredRead):
            read = found.backups[event.process, event.op].read.setdefault(event.group, {})
            read.update({(event.queue, each.sequence): each.value for each in event.records})
    return found


def _incomplete(evidence: Evidence) -> Iterator[Anomaly]:
    found = _of(evidence)
    for backup in found.backups.values():
        if AUDITOR not in backup.read:
            continue
        left = [
            value
            for place, (value, acked_ns) in found.stored.items()
            if acked_ns < backup.begun_ns and backup.read[AUDITOR].get(place) != value
        ]
        if left:
            some = ", ".join(map(str, left[:5]))
            yield Anomaly(
                "backup_has_all",
                f"{len(left)} messages were acknowledged before a backup began, and the cluster "
                f"restored from it lacks them: {some}",
            )


def _phantom(evidence: Evidence) -> Iterator[Anomaly]:
    found = _of(evidence)
    outcomes = evidence.history.outcomes
    for backup in found.backups.values():
        for read in backup.read.values():
            wrong = [
                value
                for value in read.values()
                if value not in outcomes.acked and value not in outcomes.unknown
            ]
            if wrong:
                yield Anomaly("backup_no_phantom", f"restored, and never sent: {wrong[:5]}")


def _again(evidence: Evidence) -> Iterator[Anomaly]:
    found = _of(evidence)
    for backup in found.backups.values():
        for place, value in backup.read.get(READER, {}).items():
            if any(end == "ok" and t_ns < backup.begun_ns for t_ns, end in found.acks[value]):
                yield Anomaly(
                    "backup_has_progress",
                    f"{value} at {place} was acknowledged before a backup began, and came again "
                    "after the restore",
                )


def _not_continued(evidence: Evidence) -> Iterator[Anomaly]:
    """What nobody tried to acknowledge before the backup's end must come after the restore."""
    found = _of(evidence)
    for backup in found.backups.values():
        if READER not in backup.read:
            continue
        seen = set(backup.read[READER].values())
        left = [
            value
            for value, acked_ns in found.stored.values()
            if acked_ns < backup.begun_ns
            and value not in seen
            and not any(t_ns < backup.ended_ns for t_ns, _ in found.acks[value])
        ]
        if left:
            some = ", ".join(map(str, left[:5]))
            yield Anomaly(
                "restored_continues",
                f"{len(left)} messages were not acknowledged when a backup was made, and did not "
                f"come after the restore: {some}",
            )


CHECKERS = (
    Checker(
        name="backup_has_all",
        what="a restored cluster has everything acknowledged before the backup began",
        find=_incomplete,
    ),
    Checker(
        name="backup_no_phantom",
        what="a restored cluster has nothing that was not sent",
        find=_phantom,
    ),
    Checker(
        name="backup_has_progress",
        what="what a group had acknowledged before the backup stays done in the restored cluster",
        find=_again,
    ),
    Checker(
        name="restored_continues",
        what="a group continues in the restored cluster with all that it had not acknowledged",
        find=_not_continued,
    ),
)
