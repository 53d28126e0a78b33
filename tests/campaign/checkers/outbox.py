"""Messages of database transactions, and effects in a database: what the two databases have.

    {"process":"s","type":"invoke","f":"sale","value":7}
    {"process":"s","type":"fail","f":"sale","value":7}            rolled back
    {"process":"a","type":"ok","f":"sold","value":8,"row":1}      a row of the shop's table: committed
    {"process":"a","type":"ok","f":"booked","value":8,"row":1}    a row of the books: an effect
    {"process":"a","type":"ok","f":"audited"}                     both tables were read up to here

A sale inserts a row and sends a message in one transaction; a message's only effect is a row in the
books. An auditor reads both tables again and again, the books first: so it has seen the sale of each
booking that it saw. A row that is read twice has one number.

An outbox that sends before the commit, a relay that forgets rows when it dies, and a dedup that does
not share the handler's transaction are found here.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from history.events import Anomaly, Operation, learn

from campaign.values import Checker, Evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class Sale(Operation):
    """A transaction: `fail` if it was rolled back."""

    f: ClassVar[str] = "sale"
    value: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SoldRow(Operation):
    """A row of the shop."""

    f: ClassVar[str] = "sold"
    value: int
    row: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BookedRow(Operation):
    """A row of the books."""

    f: ClassVar[str] = "booked"
    value: int
    row: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Audited(Operation):
    """The auditor read both tables, the books first."""

    f: ClassVar[str] = "audited"


learn(Sale, SoldRow, BookedRow, Audited)


@dataclass(slots=True)
class _Tables:
    sold: set[int] = field(default_factory=set)
    booked: dict[int, set[int]] = field(default_factory=dict)
    """Rows by value."""
    audited: set[int] = field(default_factory=set)
    """Bookings that were seen before an audit ended."""
    audits: int = 0
    """Those that ended after the last sale."""


def _tables(events: Iterable[Operation]) -> _Tables:
    found = _Tables()
    for event in events:
        if isinstance(event, SoldRow):
            found.sold.add(event.value)
        elif isinstance(event, BookedRow):
            found.booked.setdefault(event.value, set()).add(event.row)
        elif isinstance(event, Audited):
            found.audited = set(found.booked)
            found.audits += 1
        elif isinstance(event, Sale):
            found.audits = 0
    return found


def all_booked(events: Sequence[Operation]) -> bool:
    """Whether each committed sale is in the books. The second audit has seen all sales."""
    found = _tables(events)
    return found.audits > 1 and found.sold <= found.booked.keys()


def _unsent(evidence: Evidence) -> Iterator[Anomaly]:
    found = _tables(evidence.history)
    for value in sorted(found.sold - found.booked.keys()):
        yield Anomaly("outbox_comes", f"{value} was sold, and its message never came")


def _rolled_back(evidence: Evidence) -> Iterator[Anomaly]:
    found = _tables(evidence.history)
    for value in sorted(found.audited - found.sold):
        yield Anomaly("outbox_no_phantom", f"{value} came, and no transaction committed it")


def _twice(evidence: Evidence) -> Iterator[Anomaly]:
    for value, rows in _tables(evidence.history).booked.items():
        if len(rows) > 1:
            yield Anomaly("effect_once", f"{value} has the effects {sorted(rows)}")


CHECKERS = (
    Checker(
        name="outbox_comes",
        what="the message of a committed transaction comes, also after its sender died",
        find=_unsent,
    ),
    Checker(
        name="outbox_no_phantom",
        what="no message of a transaction that was rolled back comes",
        find=_rolled_back,
    ),
    Checker(
        name="effect_once",
        what="with a dedup in the handler's transaction a message has its effect once",
        find=_twice,
    ),
)
