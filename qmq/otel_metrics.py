"""OpenTelemetry: the four client metrics of the semantic conventions for messaging. Needs `pip
install qmq[otel]`.

    mq = qmq.connect("localhost:20880", interceptors=[OpenTelemetryMetrics()])

    messaging.client.operation.duration    seconds of a call of `send` or `send_many`, or of a
                                           request with verdicts
    messaging.client.sent.messages         messages that the client tried to send
    messaging.client.consumed.messages     messages that were handed to the application
    messaging.process.duration             seconds of the handling of a message

Each has the attribute `error.type` if the call or the handler failed; the count of consumed
messages does not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from qmq.client.interceptors import BaseInterceptor, Headers, Outgoing
from qmq.errors import InvalidArgument
from qmq.otel import operation_attributes, server_attributes, settle_attributes

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider

    from qmq.client.connection.pool import SettleReport
    from qmq.client.interceptors import AnyMessage
    from qmq.client.producing.receipts import Receipt

BOUNDARIES_S: Final = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
"""The bounds of the buckets of both durations, as the conventions advise."""


class OpenTelemetryMetrics(BaseInterceptor):
    """Records the metrics. The default is the meter provider that OpenTelemetry is configured with.

    Raises InvalidArgument if OpenTelemetry is not installed.
    """

    def __init__(
        self,
        meter_provider: MeterProvider | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`clock` returns seconds."""
        try:
            from opentelemetry import metrics
        except ImportError as cause:
            raise InvalidArgument(
                "metrics with OpenTelemetry need its library: pip install 'qmq[otel]'"
            ) from cause
        meter = metrics.get_meter("qmq", meter_provider=meter_provider)
        self._clock = clock
        self._sent = meter.create_counter("messaging.client.sent.messages", "{message}")
        self._consumed = meter.create_counter("messaging.client.consumed.messages", "{message}")
        self._operation, self._process = (
            meter.create_histogram(name, "s", explicit_bucket_boundaries_advisory=BOUNDARIES_S)
            for name in ("messaging.client.operation.duration", "messaging.process.duration")
        )

    def sending(self, outgoing: Outgoing) -> Headers:
        """Notes when the call began."""
        outgoing.kept[self] = self._clock()
        return {}

    def sent(self, outgoing: Outgoing, receipts: Iterable[Receipt]) -> None:
        self._record_sent(
            outgoing,
            operation_attributes("send", outgoing.subject) | server_attributes(outgoing.server),
        )

    def failed(self, outgoing: Outgoing, error: Exception) -> None:
        self._record_sent(outgoing, operation_attributes("send", outgoing.subject) | _error(error))

    def _record_sent(self, outgoing: Outgoing, attributes: dict[str, Any]) -> None:
        self._operation.record(self._clock() - outgoing.kept.pop(self), attributes)
        self._sent.add(outgoing.count, attributes)

    @contextmanager
    def handling(self, message: AnyMessage, group: str) -> Iterator[None]:
        """Counts the message, and times its handler."""
        attributes = operation_attributes("process", message.subject) | server_attributes(
            message.server
        )
        if group:
            attributes["messaging.consumer.group.name"] = group
        self._consumed.add(1, attributes)
        began, failure = self._clock(), {}
        try:
            yield
        except GeneratorExit:  # a loop outside asyncio has ended
            raise
        except BaseException as error:
            failure = _error(error)
            raise
        finally:
            self._process.record(self._clock() - began, attributes | failure)

    def settled(self, report: SettleReport) -> None:
        """Times a request with verdicts."""
        attributes = settle_attributes(report)
        del attributes[
            "messaging.batch.message_count"
        ]  # the count is no attribute of a metric: each count would be a separate series
        self._operation.record(
            (report.ended_ns - report.began_ns) / 1e9,
            attributes | (_error(report.error) if report.error else {}),
        )


def _error(error: BaseException) -> dict[str, Any]:
    return {"error.type": type(error).__qualname__}
