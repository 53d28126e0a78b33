"""The metrics of a broker's messages and requests, by `qmq.broker.broker_counters` and by the queues."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from qmq.broker.broker import Broker
from qmq.broker.data_server import DataServer
from qmq.metrics.figures import COUNTER, GAUGE, SLICE, Figure, Reading, one, rows_of

_OF: Final = ("broker_group",)
_SUBJECT: Final = ("broker_group", "subject")

CONNECTIONS: Final = Figure("qmq_connections", GAUGE, _OF, "Connections to the data port, of clients and of other replicas.")
UNREAD: Final = Figure(
    "qmq_unread_connections", GAUGE, _OF, "Connections whose client does not read its answers: the broker sends it no messages."
)
UNANSWERED: Final = Figure("qmq_unanswered_bytes", GAUGE, _OF, "Bytes of received batches that are not committed yet.")
THROTTLED: Final = Figure(
    "qmq_throttled_seconds_total",
    COUNTER,
    _OF,
    "Seconds in which the broker did not read from connections, because their principals were over a quota.",
)
ACCEPTED: Final = Figure("qmq_connections_accepted_total", COUNTER, _OF, "Connections that the data port accepted.")
REFUSED: Final = Figure(
    "qmq_refused_requests_total", COUNTER, (*_OF, "error"), "Requests answered with an error, by its name (qmq.errors)."
)
QUEUES: Final = Figure("qmq_queues", GAUGE, _OF, "Queues: subjects, and partitions of ordered subjects, that are stored here.")
READ_ONLY: Final = Figure("qmq_read_only", GAUGE, _OF, "1 if the broker group is drained, and takes no new messages.")

STORED: Final = Figure("qmq_stored_messages_total", COUNTER, _SUBJECT, "Messages stored for producers, as master; a retry counts once.")
STORED_BYTES: Final = Figure("qmq_stored_bytes_total", COUNTER, _SUBJECT, "Bytes of those messages' batches in the message log.")
STORED_BATCHES: Final = Figure("qmq_stored_batches_total", COUNTER, _SUBJECT, "Those messages' batches.")
KEPT: Final = Figure("qmq_kept_messages", GAUGE, _SUBJECT, "Stored messages that retention has not deleted yet, on this replica.")


class BrokerSource:
    """`group` is the broker group's name."""

    figures: Final = (
        CONNECTIONS,
        THROTTLED,
        UNREAD,
        UNANSWERED,
        ACCEPTED,
        REFUSED,
        QUEUES,
        READ_ONLY,
        STORED,
        STORED_BYTES,
        STORED_BATCHES,
        KEPT,
    )

    def __init__(self, broker: Broker, group: str, server: DataServer) -> None:
        self._broker = broker
        self._group = group
        self._server = server

    def read(self) -> Iterator[Reading | None]:
        broker, counters, group = self._broker, self._broker.counters, self._group
        yield one(CONNECTIONS, self._server.connections, group)
        yield one(THROTTLED, self._server.throttle.paused_s, group)
        yield one(UNREAD, self._server.unread, group)
        yield one(UNANSWERED, self._server.unanswered_bytes, group)
        yield one(ACCEPTED, counters.accepted, group)
        yield Reading(REFUSED, [((group, name), count) for name, count in sorted(counters.refused.items())])
        yield one(QUEUES, len(broker.store.queues), group)
        yield one(READ_ONLY, int(broker.is_read_only), group)
        yield None
        yield from self._stored()
        yield from self._kept()

    def _stored(self) -> Iterator[Reading | None]:
        counters, found = self._broker.counters, dict(self._broker.counters.stored)
        for number, queue in enumerate(list(self._broker.store.queues.values())):
            more = counters.more(queue)
            if more is not None:
                found[queue.id.subject] = more.plus(found.get(queue.id.subject))
            if number % SLICE == 0:
                yield None
        labels = [(self._group, subject) for subject in found]
        for figure, place in ((STORED, 0), (STORED_BYTES, 1), (STORED_BATCHES, 2)):
            yield Reading(figure, rows_of(labels, [each[place] for each in found.values()]))
            yield None

    def _kept(self) -> Iterator[Reading | None]:
        kept: dict[str, int] = {}
        for number, queue in enumerate(list(self._broker.store.queues.values())):
            kept[queue.id.subject] = kept.get(queue.id.subject, 0) + max(queue.visible_sequence - queue.start_sequence, 0)
            if number % SLICE == 0:
                yield None
        yield Reading(KEPT, rows_of([(self._group, subject) for subject in kept], kept.values()))
        yield None
