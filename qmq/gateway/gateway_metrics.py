"""The metrics of a gateway. docs/METRICS.md has the table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from qmq.gateway.gateway_server import GatewayServer
from qmq.metrics.figures import COUNTER, GAUGE, Figure, Reading, one

CALLS: Final = Figure(
    "qmq_gateway_calls_total", COUNTER, ("method", "language", "code"), "Calls of RocketMQ's clients, by the code of the answer."
)
CLIENTS: Final = Figure("qmq_gateway_clients", GAUGE, (), "RocketMQ's clients that sent a call in the last two minutes, or have a stream.")
INVISIBLE: Final = Figure("qmq_gateway_invisible_messages", GAUGE, (), "Messages that clients received and have not acknowledged.")


class GatewaySource:
    """Reports the metrics of one process's gateway."""

    figures: Final = (CALLS, CLIENTS, INVISIBLE)

    def __init__(self, server: GatewayServer) -> None:
        self._server = server

    def read(self) -> Iterator[Reading | None]:
        yield Reading(CALLS, [((each.call, each.language, each.code), count) for each, count in self._server.counters.counts.items()])
        parts = self._server.all_parts
        yield one(CLIENTS, sum(each.sessions.alive for each in parts))
        yield one(INVISIBLE, sum(len(each.invisible) for each in parts))
