"""OpenTelemetry: which spans there are, how they lie in each other, and what they say, by the
conventions for messaging.
"""

from __future__ import annotations

import asyncio
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

import qmq
from qmq.client.connection.pool import SettleReport
from qmq.client.interceptors import Chain, Outgoing
from qmq.client.producing.receipts import BatchReceipt
from qmq.errors import InvalidArgument, NotConnected, QmqError
from qmq.model import MessageId, Order, SubjectConfig
from qmq.node.dev_node import Node
from qmq.otel import OpenTelemetryInterceptor

PARENT = b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
ID = MessageId(7, 1, 2)


class Spans:
    """The recorded spans."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.chain = Chain([OpenTelemetryInterceptor(self.provider)])

    def named(self, name: str) -> list[ReadableSpan]:
        return [each for each in self.exporter.get_finished_spans() if each.name == name]

    def one(self, name: str) -> ReadableSpan:
        (span,) = self.named(name)
        return span


@pytest.fixture
def spans() -> Spans:
    return Spans()


def handled(**headers: bytes) -> Any:
    return SimpleNamespace(
        subject="s",
        headers=headers,
        id=ID,
        body=b"body",
        attempt=2,
        broker_group="g1",
        server="host:7",
    )


def outgoing(*headers: dict[str, bytes], is_batch: bool = False) -> Outgoing:
    count = len(headers)
    return Outgoing("s", count, [None] * count, [()] * count, list(headers), is_batch)


def settled(error: QmqError | None = None, server: str = "host:7", **verdicts: int) -> SettleReport:
    return SettleReport("s", "billing", "g1", server, verdicts, 1_000, 3_000, error)


def receipt() -> qmq.Receipt:
    return BatchReceipt(
        "s", 0, 5, 1, ID.producer_id, ID.batch_sequence, 1, "g1", [ID.to_bytes()]
    ).receipt(0)


def test_a_message_sent_is_a_producer_span_that_lasts_until_it_is_stored(spans: Spans) -> None:
    told = outgoing({})
    spans.chain.sending(told)
    assert not spans.exporter.get_finished_spans()
    spans.chain.sent(told, [receipt()])
    span = spans.one("send s")
    assert span.kind is SpanKind.PRODUCER
    assert span.attributes == {
        "messaging.system": "qmq",
        "messaging.operation.name": "send",
        "messaging.operation.type": "send",
        "messaging.destination.name": "s",
        "messaging.message.id": str(ID),
        "messaging.qmq.broker_group": "g1",
    }
    context = span.get_span_context()
    assert told.headers == [
        {
            "traceparent": f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}".encode()  # noqa: E501
        }
    ]


def test_a_span_says_which_server_has_the_message_once_it_is_stored(spans: Spans) -> None:
    for server in ("[::1]:7", "unix:/run/qmq", None):
        told = outgoing({})
        spans.chain.sending(told)
        told.server = server
        spans.chain.sent(told, [receipt()])
    found = [
        {name: value for name, value in (each.attributes or {}).items() if "server" in name}
        for each in spans.named("send s")
    ]
    assert found == [
        {"server.address": "[::1]", "server.port": 7},
        {"server.address": "/run/qmq"},
        {},
    ]


def test_a_request_with_verdicts_is_a_client_span_of_its_own_trace(spans: Spans) -> None:
    with spans.provider.get_tracer("test").start_as_current_span("around"):
        spans.chain.settled(settled(ack=3))
    span = spans.one("ack s")
    assert (span.kind, span.parent, span.start_time, span.end_time) == (
        SpanKind.CLIENT,
        None,
        1_000,
        3_000,
    )
    assert span.attributes == {
        "messaging.system": "qmq",
        "messaging.operation.name": "ack",
        "messaging.operation.type": "settle",
        "messaging.destination.name": "s",
        "messaging.consumer.group.name": "billing",
        "messaging.batch.message_count": 3,
        "messaging.qmq.broker_group": "g1",
        "server.address": "host",
        "server.port": 7,
    }


def test_verdicts_of_several_kinds_are_one_span_and_a_refusal_is_its_error(spans: Spans) -> None:
    spans.chain.settled(settled(NotConnected("gone"), ack=3, nack=1))
    span = spans.one("settle s")
    assert span.attributes
    assert span.attributes["messaging.batch.message_count"] == 4
    assert (span.status.status_code, span.attributes["error.type"]) == (
        StatusCode.ERROR,
        "NotConnected",
    )


def test_messages_sent_together_are_one_span_that_says_how_many(spans: Spans) -> None:
    told = outgoing({}, {}, is_batch=True)
    spans.chain.sending(told)
    spans.chain.sent(told, [receipt(), receipt()])
    attributes = spans.one("send s").attributes or {}
    assert attributes["messaging.batch.message_count"] == 2
    assert "messaging.message.id" not in attributes
    assert told.headers[0] == told.headers[1] != {}


def test_a_failure_is_an_error_of_its_span(spans: Spans) -> None:
    told = outgoing({})
    spans.chain.sending(told)
    spans.chain.failed(told, InvalidArgument("no"))
    with pytest.raises(KeyError), spans.chain.handling(handled(), "g"):
        raise KeyError("handler")
    for name, kind in (("send s", "InvalidArgument"), ("process s", "KeyError")):
        span = spans.one(name)
        assert span.status.status_code is StatusCode.ERROR
        assert (span.attributes or {})["error.type"] == kind
        assert [event.name for event in span.events] == ["exception"]


def test_handling_is_a_consumer_span_in_the_senders_trace_and_linked_to_it(spans: Spans) -> None:
    with spans.chain.handling(handled(traceparent=PARENT), "billing"):
        pass
    span = spans.one("process s")
    assert span.kind is SpanKind.CONSUMER
    assert span.parent is not None
    assert (f"{span.parent.trace_id:032x}", f"{span.parent.span_id:016x}") == (
        PARENT[3:35].decode(),
        PARENT[36:52].decode(),
    )
    assert [link.context.span_id for link in span.links] == [span.parent.span_id]
    assert span.attributes == {
        "messaging.system": "qmq",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": "s",
        "messaging.message.id": str(ID),
        "messaging.message.body.size": 4,
        "messaging.qmq.message.attempt": 2,
        "messaging.qmq.broker_group": "g1",
        "messaging.consumer.group.name": "billing",
        "server.address": "host",
        "server.port": 7,
    }


def test_handling_can_begin_a_trace_of_its_own_that_leads_back_by_a_link(spans: Spans) -> None:
    tracer = spans.provider.get_tracer("test")
    chain = Chain([OpenTelemetryInterceptor(spans.provider, new_traces=True)])
    with tracer.start_as_current_span("around"), chain.handling(handled(traceparent=PARENT), "g"):
        pass
    span = spans.one("process s")
    assert span.parent is None
    assert [f"{link.context.trace_id:032x}" for link in span.links] == [PARENT[3:35].decode()]


def test_sends_of_a_handler_are_inside_its_span(spans: Spans) -> None:
    before = trace.get_current_span()
    told = outgoing({})
    with spans.chain.handling(handled(), "g"):
        spans.chain.sending(told)
        spans.chain.sent(told, [receipt()])
    sent, process = spans.one("send s"), spans.one("process s")
    assert sent.parent is not None
    assert sent.parent.span_id == process.get_span_context().span_id
    assert process.parent is None
    assert trace.get_current_span() is before


def test_a_message_that_the_application_gave_a_context_keeps_it_and_is_linked(spans: Spans) -> None:
    told = outgoing({"traceparent": PARENT}, {}, is_batch=True)
    spans.chain.sending(told)
    spans.chain.sent(told, [])
    (link,) = spans.one("send s").links
    assert f"{link.context.span_id:016x}".encode() == PARENT[36:52]
    assert told.headers[0] == {"traceparent": PARENT}
    assert told.headers[1]["traceparent"][3:35] != PARENT[3:35]


def test_headers_that_are_not_text_do_no_harm(spans: Spans) -> None:
    with spans.chain.handling(handled(traceparent=b"\xff", blob=b"\xff\x00"), ""):
        pass
    assert spans.one("process s").parent is None


def test_leaving_a_loop_without_asyncio_is_not_an_error(spans: Spans) -> None:
    with pytest.raises(GeneratorExit), spans.chain.handling(handled(), "g"):
        raise GeneratorExit
    assert spans.one("process s").status.status_code is StatusCode.UNSET


async def test_a_span_that_another_task_ends_leaves_that_tasks_context_alone(
    spans: Spans, caplog: pytest.LogCaptureFixture
) -> None:
    handling = spans.chain.handling(handled(), "g")
    await asyncio.create_task(asyncio.to_thread(handling.__enter__))
    tracer = spans.provider.get_tracer("test")
    with tracer.start_as_current_span("mine") as mine:
        handling.__exit__(None, None, None)
        assert trace.get_current_span() is mine
    assert spans.one("process s").end_time
    assert not caplog.records


def test_without_the_library_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(InvalidArgument, match=r"pip install 'qmq\[otel\]'"):
        OpenTelemetryInterceptor()


@pytest.mark.parametrize("verdict", ["ack_later", "nack", "reject", "release", "fail"])
async def test_what_follows_a_verdict_is_outside_of_the_messages_span(
    node: Node, spans: Spans, verdict: str
) -> None:
    is_ordered = verdict == "fail"
    async with asyncio.timeout(30), qmq.connect(node.address, interceptors=spans.chain) as mq:
        if is_ordered:
            await mq.metadata.create_subject(
                SubjectConfig("s", order=Order.STRICT, logical_partitions=16)
            )
        await mq.send("s", b"x", key="k")
        before = trace.get_current_span()
        async with (mq.ordered_consumer if is_ordered else mq.consumer)(
            "s", "g", ack="explicit"
        ) as consumer:
            async for message in consumer:
                assert trace.get_current_span() is not before
                getattr(message, verdict)()
                assert trace.get_current_span() is before
                break
            await mq.send("other", b"y")
    (sent,) = spans.named("send other")
    assert sent.parent is None
    assert len(spans.named("process s")) == 1


async def test_one_trace_leads_from_the_sender_through_a_handler_to_what_that_sends(
    node: Node, spans: Spans
) -> None:
    async with qmq.connect(node.address, interceptors=spans.chain) as mq:
        await mq.send("one", b"x")
        async with (
            asyncio.timeout(30),
            mq.consumer("one", "g") as first,
            mq.consumer("two", "g") as second,
        ):
            async for message in first:
                await mq.send("two", b"y")
                message.ack_later()
                break
            await first.close()
            async for message in second:
                message.ack_later()
                break
    one, two = spans.one("process one"), spans.one("process two")
    sent, later = spans.one("send one"), spans.one("send two")
    parents = [each.parent and each.parent.span_id for each in (one, later, two)]
    assert parents == [each.get_span_context().span_id for each in (sent, one, later)]
    assert len({each.get_span_context().trace_id for each in (one, two, sent, later)}) == 1
    acks = [*spans.named("ack one"), *spans.named("ack two")]
    assert [(each.attributes or {})["messaging.batch.message_count"] for each in acks] == [1, 1]
    servers = {
        ((each.attributes or {})["server.address"], (each.attributes or {})["server.port"])
        for each in (sent, later, one, two, *acks)
    }
    assert len(servers) == 1
