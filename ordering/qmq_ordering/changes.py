"""The phases of a change, as one table. The code follows the table, and docs/ORDERING.md shows it. Pure.

A change is a record in the coordination store, and any metaserver continues a record that another one left unfinished. For each step the
table therefore lists the metaserver's compares and puts, and the state after a crash before or after the step. `step` returns the changed
record; its caller compares and puts. A step that the table does not have is a bug in the program, so `step` asserts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from enum import Enum
from typing import Final, NamedTuple

from qmq_ordering.routes import FENCED, Change, Phase


class PhaseEvent(Enum):
    """An event of a change."""

    SOURCE_SEALED = "a source is closed"
    """The master reported the sequence of the command message, or a fence was put (FENCED)."""
    ALL_SEALED = "all are closed"
    PUBLISHED = "the next version is the latest"
    EVERY_GROUP_ADVANCED = "every group has it"


class Transition(NamedTuple):
    """A row of the table: a phase, an event, the next phase, the step's compares and puts, and the state after a crash."""

    phase: Phase
    event: PhaseEvent
    next: Phase
    compared: str
    put: str
    before: str
    after: str


_LATE: Final = ("the record as read", "the sequence instead of -1", "a fence without its sequence; a metaserver asks for it again", "done")

TRANSITIONS: Final = (
    Transition(
        Phase.PREPARED,
        PhaseEvent.SOURCE_SEALED,
        Phase.PREPARED,
        "nothing: the partition's log, or the fence, decides",
        "nothing; the metaserver asks the source",
        "the source is open; the metaserver asks it again",
        "the source is closed; asked again, it gives the same answer",
    ),
    Transition(
        Phase.PREPARED,
        PhaseEvent.ALL_SEALED,
        Phase.SEALED,
        "the record as read",
        "phase sealed, and the sequence of each command message (-1: fenced)",
        "the metaserver asks every source again, and gets the same answers",
        "the metaserver publishes",
    ),
    Transition(
        Phase.SEALED,
        PhaseEvent.PUBLISHED,
        Phase.PUBLISHED,
        "the record as read, and `latest` is v",
        "the route of v + 1, `latest` = v + 1, phase published: one transaction",
        "brokers refuse writers of the sources until a metaserver continues",
        "writers use v + 1; the metaserver looks at the groups",
    ),
    Transition(
        Phase.PUBLISHED,
        PhaseEvent.EVERY_GROUP_ADVANCED,
        Phase.DONE,
        "the record as read",
        "phase done",
        "the metaserver looks at the groups again; nothing waits for this step",
        "done",
    ),
    *(Transition(phase, PhaseEvent.SOURCE_SEALED, phase, *_LATE) for phase in (Phase.SEALED, Phase.PUBLISHED, Phase.DONE)),
)
"""All steps. The last three are for a fenced broker group that is back and reports the sequence of its command message."""

_NEXT: Final[Mapping[tuple[Phase, PhaseEvent], Phase]] = {(each.phase, each.event): each.next for each in TRANSITIONS}


def step(change: Change, event: PhaseEvent, *, number: int | None = None, sequence: int | None = None, now_ms: int | None = None) -> Change:
    """The change after an event; SOURCE_SEALED needs `number` and `sequence`. `now_ms`, if given, is recorded for a new phase.

    A repeated event changes nothing. Raises AssertionError for an event that the phase does not have.
    """
    following = _NEXT.get((change.phase, event))
    assert following is not None, f"change {change.id} is {change.phase.value}: {event.value!r} cannot happen now"
    if event is PhaseEvent.SOURCE_SEALED:
        return _with_sealed(change, number, sequence)
    open_still = [source for source in change.sources if source not in change.sealed]
    assert not open_still, f"change {change.id} is {change.phase.value}: {event.value!r}, and its sources {open_still} are not closed"
    times_ms = change.times_ms if now_ms is None else {**change.times_ms, following.value: now_ms}
    return replace(change, phase=following, times_ms=times_ms)


def _with_sealed(change: Change, number: int | None, sequence: int | None) -> Change:
    assert number in change.sources, f"change {change.id} closes {list(change.sources)}, not partition {number}"
    assert sequence is not None, f"change {change.id}: partition {number} is closed, but at which sequence?"
    assert sequence >= FENCED, f"change {change.id}: partition {number} cannot be closed at {sequence}"
    known = change.sealed.get(number)
    if known is None:
        assert change.phase is Phase.PREPARED, f"change {change.id} is {change.phase.value}, and partition {number} was never closed"
    elif sequence in (known, FENCED):
        return change
    else:
        assert known == FENCED, f"change {change.id}: partition {number} was closed at {known}, and now at {sequence}: two command messages"
    return replace(change, sealed={**change.sealed, number: sequence})


# --- documentation -----------------------------------------------------------------------------------------------------------


def table() -> str:
    """All transitions as a table in Markdown."""
    lines = [
        "| phase | event | next | compared | put | a crash before it leaves | a crash after it leaves |",
        "|---" * 7 + "|",
    ]
    for each in TRANSITIONS:
        cells = (each.phase.value, each.event.value, each.next.value, each.compared, each.put, each.before, each.after)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def mermaid() -> str:
    """All transitions as a state diagram for Mermaid."""
    drawn = [f"    {each.phase.value} --> {each.next.value}: {each.event.value}" for each in TRANSITIONS]
    return "\n".join(["stateDiagram-v2", f"    [*] --> {Phase.PREPARED.value}: prepare", *drawn, f"    {Phase.DONE.value} --> [*]"])


def document() -> str:
    """The diagram and the table, which docs/ORDERING.md has between its marks."""
    return f"```mermaid\n{mermaid()}\n```\n\n{table()}"
