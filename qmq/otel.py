"""OpenTelemetry: spans for messages that are sent and handled. Needs `pip install qmq[otel]`;
OpenTelemetry is imported at first use.

    mq = qmq.connect("localhost:20880", interceptors=[OpenTelemetryInterceptor()])

By the semantic conventions for messaging:

    send SUBJECT       PRODUCER   from `send` (or `send_many`: one span for all) until the messages
                                  are stored or failed
    process SUBJECT    CONSUMER   around the handler of a message; child of the span that sent it,
                                  and linked to it
    ack SUBJECT        CLIENT     one request with verdicts, until the broker's answer; a separate
                                  trace, since it settles many messages

The headers `traceparent` and `tracestate` carry the context, or the headers of the propagator that
OpenTelemetry is configured with. A message that is delivered a month later, or to ten groups,
should not be part of the sender's trace: with `new_traces=True` each handling begins a new trace,
linked to the sender's span. If the application set `traceparent` itself, the header stays, and the
span is linked to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from qmq.client.interceptors import BaseInterceptor, Headers, Outgoing
from qmq.client.tracing import TRACEPARENT
from qmq.errors import InvalidArgument
from qmq.process.address import parse

if TYPE_CHECKING:
    from opentelemetry.propagators.textmap import TextMapPropagator
    from opentelemetry.trace import Link, Span, TracerProvider

    from qmq.client.connection.pool import SettleReport
    from qmq.client.interceptors import AnyMessage
    from qmq.client.producing.receipts import Receipt

SYSTEM: Final = "qmq"
LINKS_MAX: Final = 128
"""OpenTelemetry's default limit of links per span."""


class OpenTelemetryInterceptor(BaseInterceptor):
    """Creates the spans. The defaults are the tracer provider and the propagator that OpenTelemetry
    is configured with.

    Raises InvalidArgument if OpenTelemetry is not installed.
    """

    def __init__(
        self,
        tracer_provider: TracerProvider | None = None,
        *,
        propagator: TextMapPropagator | None = None,
        new_traces: bool = False,
    ) -> None:
        try:
            from opentelemetry import context, propagate, trace
        except ImportError as cause:
            raise InvalidArgument(
                "tracing with OpenTelemetry needs its library: pip install 'qmq[otel]'"
            ) from cause
        self._trace = trace
        self._context = context
        self._tracer = trace.get_tracer("qmq", tracer_provider=tracer_provider)
        self._propagator = propagator or propagate.get_global_textmap()
        self._new_traces = new_traces

    # --- sending ----------------------------------------------------------------------------------

    def sending(self, outgoing: Outgoing) -> Headers | Sequence[Headers]:
        """Begins the span, and adds its context to the messages."""
        kind = self._trace.SpanKind.PRODUCER
        attributes = operation_attributes("send", outgoing.subject)
        if outgoing.is_batch:
            attributes["messaging.batch.message_count"] = outgoing.count
        own = [each for each in outgoing.headers if TRACEPARENT in each][:LINKS_MAX]
        links = [link for each in own for link in self._links(each)]
        span = self._tracer.start_span(
            f"send {outgoing.subject}", kind=kind, attributes=attributes, links=links
        )
        outgoing.kept[self] = span
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, self._trace.set_span_in_context(span))
        return (
            [{} if TRACEPARENT in each else carrier for each in outgoing.headers]
            if own
            else carrier
        )

    def sent(self, outgoing: Outgoing, receipts: Iterable[Receipt]) -> None:
        span: Span = outgoing.kept.pop(self)
        span.set_attributes(server_attributes(outgoing.server))
        if not outgoing.is_batch:
            for receipt in receipts:
                span.set_attribute("messaging.message.id", str(receipt.id))
                span.set_attribute("messaging.qmq.broker_group", receipt.broker_group)
        span.end()

    def failed(self, outgoing: Outgoing, error: Exception) -> None:
        """Ends the span with the error."""
        span: Span = outgoing.kept.pop(self)
        self._fail(span, error)
        span.end()

    # --- handling ---------------------------------------------------------------------------------

    @contextmanager
    def handling(self, message: AnyMessage, group: str) -> Iterator[None]:
        """Runs the handler inside a span."""
        before = self._context.get_current()
        headers = _texts(message.headers)
        parent = self._propagator.extract(headers, before)
        if self._new_traces:
            parent = self._trace.set_span_in_context(self._trace.INVALID_SPAN, parent)
        span = self._tracer.start_span(
            f"process {message.subject}",
            parent,
            kind=self._trace.SpanKind.CONSUMER,
            links=self._links(message.headers),
            attributes=self._message_attributes(message, group),
        )
        inside = self._trace.set_span_in_context(span, parent)
        # The token is not used: a generator may be left in another task than the one that entered
        # it, where the token is invalid.
        self._context.attach(inside)
        try:
            yield
        except GeneratorExit:  # a loop outside asyncio was left
            raise
        except BaseException as error:
            self._fail(span, error)
            raise
        finally:
            span.end()
            if self._context.get_current() is inside:
                self._context.attach(before)

    def _message_attributes(self, message: AnyMessage, group: str) -> dict[str, Any]:
        found = operation_attributes("process", message.subject)
        found["messaging.message.id"] = str(message.id)
        found["messaging.message.body.size"] = len(message.body)
        found["messaging.qmq.message.attempt"] = message.attempt
        found["messaging.qmq.broker_group"] = message.broker_group
        if group:
            found["messaging.consumer.group.name"] = group
        return found | server_attributes(message.server)

    # --- verdicts ---------------------------------------------------------------------------------

    def settled(self, report: SettleReport) -> None:
        """Makes the span of a request that has ended."""
        attributes = settle_attributes(report)
        span = self._tracer.start_span(
            f"{attributes['messaging.operation.name']} {report.subject}",
            self._context.Context(),
            kind=self._trace.SpanKind.CLIENT,
            attributes=attributes,
            start_time=report.began_ns,
        )
        if report.error is not None:
            self._fail(span, report.error)
        span.end(report.ended_ns)

    # --- all --------------------------------------------------------------------------------------

    def _links(self, headers: Mapping[str, bytes]) -> list[Link]:
        """Links to the span that a message's headers name."""
        remote = self._propagator.extract(_texts(headers), self._context.Context())
        named = self._trace.get_current_span(remote).get_span_context()
        return [self._trace.Link(named)] if named.is_valid else []

    def _fail(self, span: Span, error: BaseException) -> None:
        span.set_attribute("error.type", type(error).__qualname__)
        span.record_exception(error)
        span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, str(error)))


def operation_attributes(operation: str, subject: str, kind: str | None = None) -> dict[str, Any]:
    """The attributes of every span and metric of an operation. `kind` is the type of the operation,
    by default its name.
    """
    return {
        "messaging.system": SYSTEM,
        "messaging.operation.name": operation,
        "messaging.operation.type": kind or operation,
        "messaging.destination.name": subject,
    }


def settle_attributes(report: SettleReport) -> dict[str, Any]:
    """Of a request with verdicts. The operation is the verdict;
    "settle" if there are several kinds.
    """
    (verdict, *others) = report.verdicts
    found = operation_attributes(
        "settle" if others else verdict, report.subject, "settle"
    ) | server_attributes(report.server)
    found["messaging.consumer.group.name"] = report.group
    found["messaging.batch.message_count"] = sum(report.verdicts.values())
    found["messaging.qmq.broker_group"] = report.broker_group
    return found


def server_attributes(server: str | None) -> dict[str, Any]:
    """Where a broker is, if it is known. A Unix socket has no port."""
    if server is None:
        return {}
    address = parse(server)
    return (
        {"server.address": address.path}
        if address.path
        else {"server.address": address.host, "server.port": address.port}
    )


def _texts(headers: Mapping[str, bytes]) -> dict[str, str]:
    """Headers as propagators read them, without those that are not text."""
    return {name: value.decode("ascii") for name, value in headers.items() if value.isascii()}
