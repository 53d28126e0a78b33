"""Histories of ordered subjects: what producers, consumers and the route did, and checkers for the
promises of docs/ORDERING.md.

    events     the lines: Put, Deliver, Settle, Rerouted, Outage; `OrderedHistory`: the events in
               columns, indexed for the checkers
    checkers   `check_ordered`: all checkers, and the `OrderedReport`

`history.Recorder` and `history.load` are the same as for other histories.
"""

from history.ordered.checkers import OrderedReport, check_ordered
from history.ordered.events import (
    Deliver,
    Handed,
    Keyed,
    OrderedEvent,
    OrderedHistory,
    Outage,
    Part,
    Put,
    Rerouted,
    Sealed,
    Settle,
    Stored,
)

__all__ = [
    "Deliver",
    "Handed",
    "Keyed",
    "OrderedEvent",
    "OrderedHistory",
    "OrderedReport",
    "Outage",
    "Part",
    "Put",
    "Rerouted",
    "Sealed",
    "Settle",
    "Stored",
    "check_ordered",
]
