"""Histories of ordered subjects: what producers, consumers and the route did, and checkers for the promises of docs/ORDERING.md.

    events     the lines: Put, Deliver, Settle, Rerouted, Outage
    columns    what is known of each message, delivery and grant
    past       `OrderedHistory`: the events in columns, indexed for the checkers
    routes     `Routes`: for each logical partition the chain of its partitions
    losses     lost, unsettled, phantom
    order      skipped, torn_replay
    exclusive  zombie_ack, came_back, shared_token
    versions   early
    log        two_at_one_place, behind_seal, wrong_partition, log_order, stored_twice
    stalls     stalled, and how long writers and readers were blocked
    checkers   `check_ordered`: all of them, and the `OrderedReport`

`history.Recorder` and `history.load` are the same as for other histories.
"""

from history.ordered.checkers import OrderedReport, check_ordered
from history.ordered.events import Deliver, Handed, Keyed, OrderedEvent, Outage, Part, Put, Rerouted, Sealed, Settle, Stored
from history.ordered.past import OrderedHistory

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
