"""The example programs that RocketMQ's own packages bring, as they are, against a gateway: a
newcomer runs these first.

Java's are in the client's jar. They go to foobar.com:8080, with TLS, an access key and a secret
key: the test gives its gateway that name. Rust's are in the crate, Node's in the README of its
package. There the address is replaced, as a newcomer does, and nothing else. Go's are in its
module, and have placeholders for address, topic and keys; they expect TLS, as Java's do, except for
one. Python's package brings none. Those of lite and priority messages are left out, since a gateway
refuses these, and Java's AsyncSimpleConsumerExample, which begins receive calls in an endless loop
without waiting for an answer: thousands of threads in seconds.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final

import pytest
from gateway_stub import MODULES, QUICK_START, GatewayStub, gateway_on, needs_java, needs_node
from support import eventually
from system.gateway_processes import CACHE, java

import qmq
from qmq.cli.gateway import GatewayOptions
from qmq.gateway.clients import ClientKeys, GatewayCredentials
from qmq.gateway.config import GatewayConfig
from qmq.security.certificates import create_authority, issue
from qmq.testing import TestCluster

pytestmark = pytest.mark.long  # programs in JVMs and in Node

PATIENCE_S: Final = 300
RUST_EXAMPLES: Final = CACHE / "rust" / "debug"
GO_EXAMPLES: Final = CACHE / "go" / "examples"
GO_PRODUCERS: Final = ("normal", "async", "fifo", "transaction", "delay")
GO_BODY: Final = b"this is a message : 0"
NODE_ADDRESS: Final = "127.0.0.1:8081"
EXAMPLES_PORT: Final = 8080
EXAMPLES_KEYS: Final = (
    ClientKeys("yourAccessKey", "yourSecretKey", "a token"),
    ClientKeys("xxxxxx", "xxxxxx", "a token"),
)
TAG: Final = "yourMessageTagA"
JAVA_PRODUCERS: Final = {
    "ProducerNormalMessageExample": (
        "yourNormalTopic",
        b"This is a normal message for Apache RocketMQ",
    ),
    "AsyncProducerExample": ("yourTopic", b"This is a normal message for Apache RocketMQ"),
    "ProducerFifoMessageExample": ("yourFifoTopic", b"This is a FIFO message for Apache RocketMQ"),
    "ProducerDelayMessageExample": (
        "yourDelayTopic",
        b"This is a delay message for Apache RocketMQ",
    ),
    "ProducerTransactionMessageExample": (
        "yourTransactionTopic",
        b"This is a transaction message for Apache RocketMQ",
    ),
}
JAVA_CONSUMERS: Final = {
    "PushConsumerExample": "Consume message=",
    "SimpleConsumerExample": "Message is acknowledged successfully",
}


@asynccontextmanager
async def started(*command: str, home: Path) -> AsyncIterator[Path]:
    """A program that may run on, and the file with its output."""
    out = home / "out"
    with out.open("wb") as pipe:
        process = await asyncio.create_subprocess_exec(
            *command,
            cwd=home,
            env={**os.environ, "HOME": str(home)},
            stdout=pipe,
            stderr=asyncio.subprocess.STDOUT,
        )
    try:
        yield out
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def as_go_prints(body: bytes) -> str:
    return f"[{' '.join(map(str, body))}]"


async def first_of(
    mq: qmq.Client, topic: str, *, is_ordered: bool = False
) -> tuple[bytes, tuple[str, ...]]:
    """Body and tags of a topic's first message."""
    consumer = mq.ordered_consumer(topic, "test") if is_ordered else mq.consumer(topic, "test")
    async with asyncio.timeout(PATIENCE_S), consumer:
        found = await anext(consumer)
        return found.body, found.tags


async def until_said(out: Path, *words: str) -> None:
    await eventually(lambda: all(each in out.read_text() for each in words), within_s=PATIENCE_S)


@asynccontextmanager
async def gateway_of_the_examples(
    tmp_path: Path, host: str, port: int
) -> AsyncIterator[GatewayStub]:
    create_authority(tmp_path / "certs")
    made = issue(tmp_path / "certs", "gateway", "node", [host])
    network = GatewayOptions(tls_cert=made.cert, tls_key=made.key).network()
    keys = GatewayCredentials({each.access_key: each for each in EXAMPLES_KEYS})
    config = GatewayConfig(host, port, sweep_ms=10, takes_plaintext=True)
    async with (
        TestCluster() as cluster,
        gateway_on(cluster, config, network=network, credentials=keys) as gateway,
    ):
        yield gateway


@needs_java
async def test_javas_examples_of_producers_and_consumers_work_as_they_are(tmp_path: Path) -> None:
    # their port is fixed, so the address is this test's own
    host = f"127.{os.getpid() // 250 % 250}.{os.getpid() % 250}.2"
    (tmp_path / "hosts").write_text(
        f"{host} foobar.com\n127.0.0.1 localhost {socket.gethostname()}\n"
    )
    options = (f"-Djdk.net.hosts.file={tmp_path / 'hosts'}", f"-Duser.home={tmp_path}", QUICK_START)
    names = [word for each in (*JAVA_PRODUCERS, *JAVA_CONSUMERS) for word in ("example", each)]
    program = java("RocketmqPrograms", *options)
    async with (
        gateway_of_the_examples(tmp_path, host, EXAMPLES_PORT) as gateway,
        started(*program, "-", *names, home=tmp_path),
    ):
        for topic, body in JAVA_PRODUCERS.values():
            assert await first_of(gateway.mq, topic, is_ordered=topic == "yourFifoTopic") == (
                body,
                (TAG,),
            )
        log = tmp_path / "logs" / "rocketmq" / "rocketmq-client.log"
        async with asyncio.timeout(PATIENCE_S):
            while not all(
                _has_said(log.read_text(), name, what) for name, what in JAVA_CONSUMERS.items()
            ):
                await gateway.mq.send("yourTopic", b"one more", tags=[TAG])  # both are of one group
                # without a pause the messages keep the consumers from what is asserted
                await asyncio.sleep(0.1)


def _has_said(log: str, name: str, what: str) -> bool:
    return any(name in line and what in line for line in log.splitlines())


@pytest.mark.skipif(
    not (RUST_EXAMPLES / "simple_consumer").is_file(),
    reason="needs Rust, and scripts/rocketmq_clients",
)
async def test_rusts_examples_work_as_they_are(tmp_path: Path) -> None:
    async with (
        TestCluster() as cluster,
        gateway_on(cluster, GatewayConfig(port=0, sweep_ms=10)) as gateway,
    ):
        address = f"127.0.0.1:{gateway.gateway.port}"
        for name, topic in (
            ("producer", "test_topic"),
            ("fifo_producer", "fifo_test"),
            ("delay_producer", "delay_test"),
        ):
            async with started(str(RUST_EXAMPLES / name), address, home=tmp_path) as out:
                await until_said(out, "send message success")
            tags = ("test_tag",) if name == "producer" else ()
            assert await first_of(gateway.mq, topic, is_ordered=name == "fifo_producer") == (
                b"hello world",
                tags,
            )
        async with started(
            str(RUST_EXAMPLES / "transaction_producer"), address, home=tmp_path
        ) as out:
            await until_said(out, "send message success")
            assert await first_of(gateway.mq, "transaction_test") == (b"hello world", ())
        async with started(str(RUST_EXAMPLES / "simple_consumer"), address, home=tmp_path) as out:
            await until_said(out, "receive message")


@pytest.mark.longest
@pytest.mark.skipif(
    not (GO_EXAMPLES / "push_consumer").is_file(), reason="needs Go, and scripts/rocketmq_clients"
)
async def test_gos_examples_work_as_they_are(tmp_path: Path) -> None:
    async with (
        gateway_of_the_examples(tmp_path, "127.0.0.1", 0) as gateway,
        AsyncExitStack() as ending,
    ):

        async def program(name: str, topic: str) -> Path:
            (tmp_path / name).mkdir()
            command = (str(GO_EXAMPLES / name), gateway.gateway.address, topic)
            return await ending.enter_async_context(started(*command, home=tmp_path / name))

        for name in GO_PRODUCERS:
            await program(name, name)
        recalled = await program("delay_recall", "recall")
        for name in GO_PRODUCERS:
            assert await first_of(gateway.mq, name, is_ordered=name == "fifo") == (GO_BODY, ("ab",))
        pushed, received = (
            await program("push_consumer", "pushed"),
            await program("simple_consumer", "normal"),
        )
        await gateway.mq.send("xxxxxx.pushed", b"to a namespace")
        await until_said(received, as_go_prints(GO_BODY))
        await until_said(pushed, as_go_prints(b"to a namespace"))
        await until_said(recalled, "Message recalled successfully")


@needs_node
async def test_nodes_examples_work_as_they_are(tmp_path: Path) -> None:
    examples = node_examples()
    (tmp_path / "node_modules").symlink_to(MODULES)
    async with (
        TestCluster() as cluster,
        gateway_on(cluster, GatewayConfig(port=0, sweep_ms=10)) as gateway,
    ):

        def program(name: str) -> AbstractAsyncContextManager[Path]:
            (tmp_path / "example.mjs").write_text(
                examples[name].replace(NODE_ADDRESS, f"127.0.0.1:{gateway.gateway.port}")
            )
            return started("node", "example.mjs", home=tmp_path)

        async with program("Normal Message"):
            body, tags = await first_of(gateway.mq, "TopicTest")
            assert (b"hello" in body, tags) == (True, ("nodejs-demo",))
        async with program("SimpleConsumer") as out:
            await until_said(out, "got 1 messages", "body=")
        async with program("Delay Message with Recall") as out:
            await until_said(out, "Message recalled successfully")
        async with program("Push Consumer") as out:
            await gateway.mq.send("yourTopic", b"pushed")
            await until_said(out, "Received message: pushed")


def node_examples() -> dict[str, str]:
    """The programs of the package's README, by the heading above each. Their types are removed,
    because Node does not know them.
    """
    page = (MODULES / "rocketmq-client-nodejs" / "README.md").read_text()
    found = re.findall(
        r"^(?:#+ )?([A-Z][\w ]+)\n\n(?:[A-Z].*\n\n)?```ts\n((?:.*\n)*?)```", page, re.MULTILINE
    )
    return {
        name: re.sub(r", type \w+|: MessageView|: Promise<\w+>", "", text) for name, text in found
    }
