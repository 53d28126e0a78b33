"""Checkers of disks: what lies in a log stays there, and who may go on after a failed call.

    {"process":"scanner0.7","type":"invoke","f":"scan","t_ns":10}
    {"process":"scanner0.7","type":"ok","f":"scan","t_ns":90,"queue":"s/0@g1","runs":[[0,7001,10],[10,9001,10]],"is_whole":true}
    {"process":"g1-a","type":"ok","f":"failed-call","t_ns":95,"call":"sync","times":1,"status":70}

A *scan* reads a queue from a sequence to its end, without a group. Its runs are (first sequence,
first value, count): sequences and values both grow by one. `is_whole`: it began at the first
message. A failed call is written down by the nemesis: how often the disk refused it, and the exit
status of the process; without a status it runs on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from history.events import Anomaly, Operation, Send, learn

from campaign.checkers.messages import all_seen
from campaign.values import Checker, Drained, Evidence, Strike

SHOWN_MAX = 5
FATAL = 70
"""The exit status of a server that must not go on."""


class Run(NamedTuple):
    """Messages one after another, with values one after another."""

    sequence: int
    value: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan(Operation):
    """A queue is read to its end."""

    f: ClassVar[str] = "scan"
    queue: str = ""
    runs: tuple[Run, ...] = ()
    is_whole: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedCall(Operation):
    """Calls of a server to its disk failed: sync, write or read."""

    f: ClassVar[str] = "failed-call"
    call: str
    times: int
    status: int | None = None
    """The exit status of the server's process; None: it runs on."""


learn(Scan, FailedCall, runs=lambda found: tuple(Run(*each) for each in found))


def runs_of(places: Iterable[tuple[int, int]]) -> tuple[Run, ...]:
    """Sequences and values, in the order of reading, as runs."""
    found: list[Run] = []
    for sequence, value in places:
        if found and (sequence, value) == (
            found[-1].sequence + found[-1].length,
            found[-1].value + found[-1].length,
        ):
            found[-1] = found[-1]._replace(length=found[-1].length + 1)
        else:
            found.append(Run(sequence, value, 1))
    return tuple(found)


def all_kept(groups: tuple[str, ...]) -> Drained:
    """Whether groups have everything, and a whole scan that began after the last fault, and after
    the last answer to a sender, has ended.
    """
    seen = all_seen(groups)

    def is_drained(events: Sequence[Operation]) -> bool:
        return _last_scans(events) is not None and seen(events)

    return is_drained


def _last_scans(events: Sequence[Operation]) -> list[Scan] | None:
    """The answers of the first whole scan that began after everything else; None if there is
    none.
    """
    since_ns = max(
        (each.t_ns for each in events if isinstance(each, Send | Strike) and each.type != "invoke"),
        default=0,
    )
    begun: dict[str, int] = {}
    found: dict[tuple[str, int], list[Scan]] = defaultdict(list)
    for event in events:
        if isinstance(event, Scan) and event.type == "invoke":
            begun[event.process] = event.t_ns
        elif isinstance(event, Scan) and event.type == "ok" and event.is_whole:
            begun_ns = begun[event.process]
            found[event.process, begun_ns].append(event)
    late = {key: scans for key, scans in found.items() if key[1] > since_ns}
    return late[min(late, key=lambda key: key[1])] if late else None


def _kept(evidence: Evidence) -> Iterator[Anomaly]:
    scans = _last_scans(evidence.history)
    if scans is None:
        return
    there = {
        value
        for scan in scans
        for run in scan.runs
        for value in range(run.value, run.value + run.length)
    }
    lost = sorted(evidence.history.outcomes.acked - there)
    if lost:
        some = ", ".join(map(str, lost[:SHOWN_MAX]))
        yield Anomaly(
            "still_there", f"{len(lost)} acknowledged messages are not in the log: {some}"
        )


def _one_value(evidence: Evidence) -> Iterator[Anomaly]:
    """Every scan, every poll and every answer to a sender agree on what lies at a place."""
    known: dict[tuple[str, int], int] = {}
    wrong = 0
    for queue, sequence, value in _places(evidence):
        first = known.setdefault((queue, sequence), value)
        if first != value:
            wrong += 1
            if wrong <= SHOWN_MAX:
                yield Anomaly("same_bytes", f"{queue} {sequence} was {first}, and was {value}")


def _places(evidence: Evidence) -> Iterator[tuple[str, int, int]]:
    for send, queue, sequence in evidence.history.acked_sends:
        for at, value in enumerate(send.values):
            yield queue, sequence + at, value
    for poll, queue in evidence.history.polls:
        for record in poll.records:
            yield queue, record.sequence, record.value
    for event in evidence.history:
        if isinstance(event, Scan) and event.type == "ok":
            for run in event.runs:
                for at in range(run.length):
                    yield event.queue, run.sequence + at, run.value + at


def _never_sent(evidence: Evidence) -> Iterator[Anomaly]:
    """A value that nobody sent: bytes of a damaged message."""
    sent = {value for send in evidence.history.sends for value in send.values}
    for event in evidence.history:
        if isinstance(event, Scan) and event.type == "ok":
            for run in event.runs:
                strange = set(range(run.value, run.value + run.length)) - sent
                if strange:
                    yield Anomaly(
                        "no_strange_bytes", f"{event.queue} {run.sequence}: {min(strange)}"
                    )


def _calls(evidence: Evidence, *calls: str) -> Iterator[FailedCall]:
    for event in evidence.history:
        if isinstance(event, FailedCall) and event.call in calls:
            yield event


def _went_on(evidence: Evidence) -> Iterator[Anomaly]:
    """It ends, and loudly: a process that ends in any other way stumbled over the failure."""
    for event in _calls(evidence, "sync", "write"):
        if event.status != FATAL:
            end = "it runs on" if event.status is None else f"it ended with {event.status}"
            yield Anomaly(
                "failed_call_stops",
                f"{event.times} calls ({event.call}) of {event.process} failed, and {end}",
            )


def _ended(evidence: Evidence) -> Iterator[Anomaly]:
    for event in _calls(evidence, "read"):
        if event.status is not None:
            yield Anomaly(
                "unreadable_goes_on",
                f"{event.process} ended with {event.status} when {event.times} reads had failed",
            )


CHECKERS = (
    Checker(
        name="still_there",
        what="all that was acknowledged is in the log after the last fault",
        find=_kept,
    ),
    Checker(
        name="same_bytes",
        what="a place in a log holds one message for all readers",
        find=_one_value,
    ),
    Checker(
        name="no_strange_bytes",
        what="what is read was sent, also while a copy is damaged",
        find=_never_sent,
    ),
    Checker(
        name="failed_call_stops",
        what="a process whose sync or write failed ends with status 70",
        find=_went_on,
    ),
    Checker(
        name="unreadable_goes_on",
        what="a process continues when a block cannot be read",
        find=_ended,
    ),
)
