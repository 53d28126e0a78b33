"""A message that a RocketMQ client sent, as the console, `qmq why` and Spark show it."""

from __future__ import annotations

import asyncio
import time

import grpc
import pytest
from gateway_stub import CONFIG, GatewayStub, gateway_on, message
from pyspark.sql import SparkSession
from spark.conftest import spark as spark
from support import NodeProcess
from support.console import PlainBrowser, site_of

import qmq
from qmq.gateway.server import GatewayServer
from qmq.operations.messages import inquire, why
from qmq.proto.rocketmq.service_pb2_grpc import MessagingServiceStub
from qmq.testing import TestCluster


async def test_the_console_and_why_tell_the_life_of_a_rocketmq_message() -> None:
    async with TestCluster() as cluster, gateway_on(cluster) as gateway:
        await gateway.send(message("orders", b'{"total": 5}', tag="red", keys=["k1"]))
        async with gateway.mq.consumer("orders", "native") as consumer:
            message_id = (await anext(consumer)).id
        [got] = await gateway.receive("orders", "billing")
        await gateway.ack(got, group="billing")
        site = site_of(cluster)
        page = await (await PlainBrowser(site).log_in()).get(f"/messages?id={message_id}")
        await site.close()
        for shown in (
            "stored",
            "acknowledged",
            "billing",
            "k1",
            "red",
            "&#34;total&#34;: 5",
            f"qmq why {message_id}",
        ):
            assert shown in page.text, shown
        told = why(
            await inquire(gateway.mq, str(message_id), "orders", "billing"),
            time.time_ns() // 1_000_000,
        )
        assert any("acknowledged" in each["text"] for each in told)


@pytest.mark.longest
@pytest.mark.xdist_group("spark")
def test_spark_reads_what_a_rocketmq_client_sent(
    spark: SparkSession, node_process: NodeProcess
) -> None:
    address = node_process.start()
    asyncio.run(_send_by_a_gateway(address))
    frame = (
        spark.read.format("qmq")
        .option("qmq.servers", address)
        .option("subscribe", "orders")
        .option("includeHeaders", "true")
        .load()
    )
    [row] = frame.collect()
    assert (bytes(row["body"]), bytes(row["key"]), row["tags"]) == (b"from afar", b"k1", ["red"])
    assert bytes(row["headers"]["colour"]) == b"blue"


async def _send_by_a_gateway(address: str) -> None:
    async with qmq.connect(address) as mq:
        gateway = GatewayServer(mq, CONFIG)
        await gateway.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{gateway.port}") as channel:
            stub = GatewayStub(MessagingServiceStub(channel), gateway, mq)
            await stub.send(message("orders", b"from afar", tag="red", keys=["k1"], colour="blue"))
        await gateway.stop()
