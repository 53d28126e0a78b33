"""How a change goes from phase to phase: one table, which is printed, drawn and obeyed. Pure.

A change is a record in the coordination store that any metaserver takes up where another one left it. So for each step the table says what
is compared and put, and what there is if whoever makes the step dies before or behind it. `step` moves the record; what is compared and put
is the business of who calls it. What a record cannot do is a fault of the program, never of the outside world: `step` asserts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from enum import Enum
from typing import Final, NamedTuple

from qmq_ordering.route import FENCED, Change, Phase


class PhaseEvent(Enum):
    """An event in the course of a change."""

    SOURCE_SEALED = "a source is closed"
    """The master reported the sequence of the command message, or a fence was put (FENCED)."""
    ALL_SEALED = "all are closed"
    PUBLISHED = "the next version is the latest"
    EVERY_GROUP_ADVANCED = "every group has it"


class Transition(NamedTuple):
    """A row of the table: a phase, an event and the next phase; what the step compares and puts; what a crash leaves."""

    phase: Phase
    event: PhaseEvent
    next: Phase
    compared: str
    put: str
    before: str
    behind: str


_LATE: Final = ("the record as read", "the sequence instead of -1", "a fence without its sequence, which is asked for again", "done")

TRANSITIONS: Final = (
    Transition(
        Phase.PREPARED,
        PhaseEvent.SOURCE_SEALED,
        Phase.PREPARED,
        "nothing: the partition's log, or the fence, is what counts",
        "nothing; known by asking",
        "not closed: it is asked again",
        "closed: it is asked again, and answers the same",
    ),
    Transition(
        Phase.PREPARED,
        PhaseEvent.ALL_SEALED,
        Phase.SEALED,
        "the record as read",
        "phase sealed, and the sequence of each command message (-1: fenced)",
        "every source is asked again, and answers the same",
        "go on and publish",
    ),
    Transition(
        Phase.SEALED,
        PhaseEvent.PUBLISHED,
        Phase.PUBLISHED,
        "the record as read, and `latest` is v",
        "the route of v + 1, `latest` = v + 1, phase published: one transaction",
        "writers of the sources are refused until somebody goes on",
        "writers use v + 1; groups are looked at",
    ),
    Transition(
        Phase.PUBLISHED,
        PhaseEvent.EVERY_GROUP_ADVANCED,
        Phase.DONE,
        "the record as read",
        "phase done",
        "the groups are looked at again; nothing waits for it",
        "done",
    ),
    *(Transition(phase, PhaseEvent.SOURCE_SEALED, phase, *_LATE) for phase in (Phase.SEALED, Phase.PUBLISHED, Phase.DONE)),
)
"""Every step that there is. The last three: a broker group that was fenced is back, and says where its command message is."""

_NEXT: Final[Mapping[tuple[Phase, PhaseEvent], Phase]] = {(each.phase, each.event): each.next for each in TRANSITIONS}


def step(change: Change, event: PhaseEvent, *, number: int | None = None, sequence: int | None = None, now_ms: int | None = None) -> Change:
    """The change behind an event; `number` and `sequence` go with SOURCE_SEALED. `now_ms`, if given, is noted for a new phase.

    Saying again what is known changes nothing. Raises AssertionError for what cannot happen.
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
        "| phase | what becomes known | next | compared | put | a crash before it leaves | a crash behind it leaves |",
        "|---" * 7 + "|",
    ]
    for each in TRANSITIONS:
        cells = (each.phase.value, each.event.value, each.next.value, each.compared, each.put, each.before, each.behind)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def mermaid() -> str:
    """All transitions as a state diagram for Mermaid."""
    drawn = [f"    {each.phase.value} --> {each.next.value}: {each.event.value}" for each in TRANSITIONS]
    return "\n".join(["stateDiagram-v2", f"    [*] --> {Phase.PREPARED.value}: prepare", *drawn, f"    {Phase.DONE.value} --> [*]"])


def document() -> str:
    """The diagram and the table, as docs/ORDERING.md shows them between its marks."""
    return f"```mermaid\n{mermaid()}\n```\n\n{table()}"
