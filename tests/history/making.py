"""Short notation for hand-made histories: each function gives the lines of one operation, and `+` joins operations.

    sent(1, 2, at=0) + got((0, 1), (1, 2)) + done(1)

means: p1 sent the batch 1, 2 and got the answer that it is stored from sequence 0 on; c1 polled both; c1 acknowledged 1 and got the answer.
For overlapping operations, take the lines apart: `begun, answered = sent(1, at=0)`.
"""

from __future__ import annotations

from history.events import Ack, Event, Poll, Record, Reset, Send, Type

Q = "orders/0@g1"
R = "orders/0@g2"


def tried(*values: int, by: str = "p1") -> list[Event]:
    """A send without an end."""
    return [Send(process=by, type="invoke", subject="orders", values=values)]


def unknown(*values: int, by: str = "p1") -> list[Event]:
    """A send of unknown outcome."""
    return [*tried(*values, by=by), Send(process=by, type="info", subject="orders", values=values)]


def refused(*values: int, by: str = "p1") -> list[Event]:
    """A send that was certainly not stored."""
    return [*tried(*values, by=by), Send(process=by, type="fail", subject="orders", values=values)]


def sent(*values: int, at: int, by: str = "p1", queue: str = Q, master: tuple[int, str] | None = None) -> list[Event]:
    """A send that was answered, by a replica in an epoch if that matters."""
    epoch, replica = master or (None, None)
    end = Send(process=by, type="ok", subject="orders", values=values, queue=queue, sequence=at, epoch=epoch, replica=replica)
    return [*tried(*values, by=by), end]


def got(*records: tuple[int, ...], by: str = "c1", group: str = "billing", queue: str = Q) -> list[Event]:
    """A poll that got (sequence, value) or (sequence, value, attempt)."""
    held = tuple(Record(*record) for record in records)
    return [Poll(process=by, type="invoke", group=group), Poll(process=by, type="ok", group=group, queue=queue, records=held)]


def lost_poll(by: str = "c1", group: str = "billing") -> list[Event]:
    """A poll without an answer."""
    return [Poll(process=by, type=kind, group=group) for kind in ("invoke", "info")]


def done(*values: int, by: str = "c1", group: str = "billing", queue: str = Q, end: Type = "ok") -> list[Event]:
    """An acknowledgement by value."""
    return [Ack(process=by, type=kind, group=group, queue=queue, values=values) for kind in ("invoke", end)]


def done_at(*sequences: int, by: str = "c1", group: str = "billing", queue: str = Q) -> list[Event]:
    """An acknowledgement by sequence."""
    return [Ack(process=by, type=kind, group=group, queue=queue, sequences=sequences) for kind in ("invoke", "ok")]


def reset(group: str | None = "billing", end: Type = "ok") -> list[Event]:
    """An operator's reset of a group, or of all."""
    return [Reset(process="operator", type=kind, group=group) for kind in ("invoke", end)]
