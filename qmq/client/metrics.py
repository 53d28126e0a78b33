"""A client's figures for Prometheus. docs/reference/metrics.md has the table.

    prometheus_client.REGISTRY.register(mq.metrics)      into the application's own registry
    await mq.serve_metrics(9400)                         or on their own port

Needs prometheus_client (`pip install qmq[metrics]`), which is imported at first use. A registry may
be read in another thread, so this module reads only numbers, and copies of lists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from qmq.client.consuming.consumer import Consumer
from qmq.errors import InvalidArgument
from qmq.metrics.figures import COUNTER, GAUGE, HISTOGRAM, Figure, Reading, one
from qmq.model import base_group
from qmq.rpc.network import NETWORK

if TYPE_CHECKING:
    from qmq.client.connection.pool import ConnectionPool
    from qmq.client.consuming.ordered.consumer import OrderedConsumer
    from qmq.client.producing.ordered.producer import OrderedProducer
    from qmq.client.producing.producer import Producer
    from qmq.metrics.endpoint import Collector, MetricsServer

_SUBJECT: Final = ("subject",)
_GROUP: Final = ("subject", "group")

SENT: Final = Figure(
    "qmq_client_sent_messages_total", COUNTER, _SUBJECT, "Messages that were stored."
)
SENT_BYTES: Final = Figure(
    "qmq_client_sent_bytes_total",
    COUNTER,
    _SUBJECT,
    "Bytes of their bodies and columns, before compression.",
)
SENT_BATCHES: Final = Figure("qmq_client_sent_batches_total", COUNTER, _SUBJECT, "Their batches.")
RESENT: Final = Figure(
    "qmq_client_resent_batches_total",
    COUNTER,
    _SUBJECT,
    "Repeated sends of batches that were stored in the end.",
)
FAILED: Final = Figure(
    "qmq_client_failed_messages_total",
    COUNTER,
    _SUBJECT,
    "Messages that failed for good: their tickets raised an error.",
)
SEND_SECONDS: Final = Figure(
    "qmq_client_send_seconds",
    HISTOGRAM,
    (),
    "Time from the closing of a batch to its receipt, retries included.",
)
WAITING: Final = Figure(
    "qmq_client_waiting_bytes",
    GAUGE,
    (),
    "Bytes of batches that are not decided yet; 64 MiB a producer at most.",
)
RECEIVED: Final = Figure(
    "qmq_client_received_messages_total", COUNTER, _GROUP, "Messages that were received."
)
SETTLED: Final = Figure(
    "qmq_client_settled_messages_total",
    COUNTER,
    (*_GROUP, "verdict"),
    "Verdicts that were sent: ack, nack, release, reject; not of ordered subjects.",
)
STALE: Final = Figure(
    "qmq_client_stale_messages_total",
    COUNTER,
    _GROUP,
    "Messages that other consumers got before they were settled.",
)
HELD: Final = Figure(
    "qmq_client_held_messages",
    GAUGE,
    _GROUP,
    "Messages that were received and have no verdict yet; not of ordered subjects.",
)
UNHEARD: Final = Figure(
    "qmq_client_unheard_verdicts",
    GAUGE,
    _GROUP,
    "Messages whose verdict no broker has answered yet; not of ordered subjects.",
)
CONNECTIONS: Final = Figure("qmq_client_connections", GAUGE, (), "Connections to brokers.")


class ClientSource:
    """The figures of one client; `producers` and `consumers` return those that are not closed."""

    figures: Final = (
        SENT,
        SENT_BYTES,
        SENT_BATCHES,
        RESENT,
        FAILED,
        SEND_SECONDS,
        WAITING,
        RECEIVED,
        SETTLED,
        STALE,
        HELD,
        UNHEARD,
        CONNECTIONS,
    )

    def __init__(
        self,
        links: ConnectionPool,
        producers: Callable[[], Sequence[Producer | OrderedProducer]],
        consumers: Callable[[], Sequence[Consumer | OrderedConsumer]],
    ) -> None:
        self._links, self._producers, self._consumers = links, producers, consumers

    def read(self) -> Iterator[Reading | None]:
        yield from self._sends()
        yield from self._takes()
        yield one(CONNECTIONS, self._links.connections)

    def _sends(self) -> Iterator[Reading | None]:
        counters = self._links.counters
        sends = sorted(counters.sends.items())
        yield Reading(SENT, [((subject,), each.messages) for subject, each in sends])
        yield Reading(SENT_BYTES, [((subject,), each.bytes) for subject, each in sends])
        yield Reading(SENT_BATCHES, [((subject,), each.batches) for subject, each in sends])
        yield Reading(RESENT, [((subject,), each.resent) for subject, each in sends])
        yield Reading(FAILED, [((subject,), each.failed) for subject, each in sends])
        yield one(SEND_SECONDS, counters.seconds.histogram())
        yield one(WAITING, sum([each.waiting_bytes for each in self._producers()]))
        yield None

    def _takes(self) -> Iterator[Reading | None]:
        takes = sorted(self._links.counters.takes.items())
        yield Reading(RECEIVED, [(names, each.received) for names, each in takes])
        verdicts = [
            ((*names, verdict), count)
            for names, each in takes
            for verdict, count in (
                ("ack", each.acked),
                ("nack", each.nacked),
                ("release", each.released),
                ("reject", each.rejected),
            )
        ]
        yield Reading(SETTLED, verdicts)
        stale: dict[tuple[str, str], int] = {names: each.stale for names, each in takes}
        held: dict[tuple[str, str], int] = {}
        unheard: dict[tuple[str, str], int] = {}
        for consumer in self._consumers():
            names = (consumer.subject, base_group(consumer.group))
            stale[names] = stale.get(names, 0) + consumer.stale
            if isinstance(consumer, Consumer):
                held[names] = held.get(names, 0) + consumer.held
                unheard[names] = unheard.get(names, 0) + consumer.unanswered_verdicts
        yield Reading(STALE, sorted(stale.items()))
        yield Reading(HELD, sorted(held.items()))
        yield Reading(UNHEARD, sorted(unheard.items()))


def collector_of(source: ClientSource) -> Collector:
    """A collector for a registry. Raises InvalidArgument if prometheus_client is not installed."""
    try:
        from qmq.metrics.endpoint import Collector
    except ImportError as cause:
        raise _missing() from cause
    return Collector([source])


async def serve(source: ClientSource, port: int, host: str) -> MetricsServer:
    """Serve metrics over HTTP. Raises InvalidArgument if prometheus_client is not installed,
    OSError if the port is taken.
    """
    try:
        from qmq.metrics.endpoint import MetricsServer
    except ImportError as cause:
        raise _missing() from cause
    endpoint = MetricsServer([source])
    await endpoint.start(host, port, NETWORK.listen)
    return endpoint


def _missing() -> InvalidArgument:
    return InvalidArgument("metrics need prometheus_client: pip install 'qmq[metrics]'")
