"""OpenTelemetry: the four client metrics of the conventions for messaging."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from qmq.client.connection.pool import SettleReport
from qmq.client.interceptors import Chain, Outgoing
from qmq.otel_metrics import BOUNDARIES_S, OpenTelemetryMetrics
from qmq.testing import TestCluster

SEND = {
    "messaging.system": "qmq",
    "messaging.operation.name": "send",
    "messaging.operation.type": "send",
    "messaging.destination.name": "orders",
}


class Figures:
    """Recorded metrics, with a clock that advances by one second at each reading."""

    def __init__(self) -> None:
        self.reader = InMemoryMetricReader()
        seconds = count()
        self.interceptor = OpenTelemetryMetrics(
            MeterProvider([self.reader]), clock=lambda: float(next(seconds))
        )

    def points(self) -> dict[str, list[Any]]:
        data = self.reader.get_metrics_data()
        assert data is not None
        return {
            each.name: list(each.data.data_points)
            for each in data.resource_metrics[0].scope_metrics[0].metrics
        }


async def test_messages_sent_and_handled_are_counted_and_timed() -> None:
    figures = Figures()
    async with TestCluster() as cluster:
        mq = cluster.client(interceptors=[figures.interceptor])
        await mq.send_many("orders", [b"1", b"2", b"3"])
        async with mq.consumer("orders", "shop") as consumer:
            for message in await consumer.pull(1):
                with pytest.raises(LookupError), mq.interceptors.handling(message, consumer.group):
                    raise LookupError
    points = figures.points()
    (sent,), (consumed,) = (
        points["messaging.client.sent.messages"],
        points["messaging.client.consumed.messages"],
    )
    operations = {
        each.attributes["messaging.operation.name"]: each
        for each in points["messaging.client.operation.duration"]
    }
    sending, (process,) = operations.pop("send"), points["messaging.process.duration"]
    server = {
        name: value for name, value in consumed.attributes.items() if name.startswith("server.")
    }
    assert "server.address" in server
    assert (sent.value, dict(sent.attributes)) == (3, SEND | server)
    assert (sending.count, sending.sum, dict(sending.attributes)) == (1, 1.0, SEND | server)
    assert sending.explicit_bounds == BOUNDARIES_S
    assert consumed.value == 1
    assert dict(process.attributes) == dict(consumed.attributes) | {"error.type": "LookupError"}
    assert consumed.attributes["messaging.consumer.group.name"] == "shop"
    assert process.sum == 1.0
    assert {each.attributes["messaging.operation.type"] for each in operations.values()} == {
        "settle"
    }


def test_a_request_with_verdicts_is_timed_with_the_server_that_answered() -> None:
    figures = Figures()
    Chain([figures.interceptor]).settled(
        SettleReport("orders", "shop", "g", "host:7", {"ack": 3}, 0, 2_000_000_000, None)
    )
    ((point,),) = figures.points().values()
    assert (
        point.sum,
        point.attributes["messaging.operation.type"],
        point.attributes["server.port"],
    ) == (2.0, "settle", 7)
    assert "messaging.batch.message_count" not in point.attributes


def test_a_send_that_fails_is_recorded_with_its_error() -> None:
    figures = Figures()
    chain, told = (
        Chain([figures.interceptor]),
        Outgoing("orders", 2, [None] * 2, [()] * 2, [{}, {}], is_batch=True),
    )
    chain.sending(told)
    chain.failed(told, TimeoutError())
    points = figures.points()
    (sent,), (sending,) = (
        points["messaging.client.sent.messages"],
        points["messaging.client.operation.duration"],
    )
    assert (sent.value, sending.count) == (2, 1)
    assert (
        dict(sent.attributes) == dict(sending.attributes) == SEND | {"error.type": "TimeoutError"}
    )
