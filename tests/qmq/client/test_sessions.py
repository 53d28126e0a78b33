"""A producer's connection stalls with messages on it, and continues after the producer has a newer
one: a real node, real sockets.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from support import eventually, node_config, running

import qmq
from qmq.client.client import Client
from qmq.errors import DeadlineExceeded, Outcome
from qmq.rpc.network import Factory, Network


class Relay(asyncio.BufferedProtocol):
    """The client's end of one connection. While it is stalled, what the client writes is kept."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.is_still = self.is_left = False
        self.kept: list[bytes] = []
        self.heard = 0
        """Bytes that came when the client had left."""
        self.sink = bytearray(65_536)
        self.real: Any

    # --- the socket's side ---

    def connection_made(self, transport: Any) -> None:
        self.real = transport
        self.inner.connection_made(self)

    def get_buffer(self, hint: int) -> Any:
        return self.sink if self.is_left else self.inner.get_buffer(hint)

    def buffer_updated(self, size: int) -> None:
        if self.is_left:
            self.heard += size
        else:
            self.inner.buffer_updated(size)

    def connection_lost(self, cause: Exception | None) -> None:
        if not self.is_left:
            self.inner.connection_lost(cause)

    # --- the client's side ---

    def write(self, data: Any) -> None:
        if self.is_still:
            self.kept.append(bytes(data))
        else:
            self.real.write(data)

    def writelines(self, parts: Any) -> None:
        self.write(b"".join(parts))

    def close(self) -> None:
        if not self.is_still:
            self.real.close()
        elif not self.is_left:
            self.leave()

    abort = close

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    # --- the test's side ---

    def leave(self) -> None:
        """The client takes the broker for dead; the bytes that it wrote are still in flight."""
        self.is_left = True
        asyncio.get_running_loop().call_soon(
            self.inner.connection_lost, ConnectionResetError("of the test")
        )

    def go_on(self) -> None:
        """Let what was written arrive."""
        self.is_still = False
        self.real.write(b"".join(self.kept))


class Held(Network):
    """A network whose connections can be stalled."""

    def __init__(self) -> None:
        self.relays: list[Relay] = []

    async def connect(self, address: str, factory: Factory) -> None:
        def made() -> Relay:
            self.relays.append(Relay(factory()))
            return self.relays[-1]

        await super().connect(address, made)

    def stand_still(self) -> list[Relay]:
        """Stall the existing connections."""
        held = [each for each in self.relays if not each.is_left]
        for each in held:
            each.is_still = True
        return held


@asynccontextmanager
async def ordered(tmp_path: Path) -> AsyncIterator[tuple[Client, Held]]:
    network = Held()
    async with running(node_config(tmp_path)) as node, Client(node.address, network=network) as mq:
        await mq.metadata.create_subject(
            qmq.SubjectConfig("s", order=qmq.Order.STRICT, logical_partitions=16), partitions=1
        )
        yield mq, network


async def stored(mq: Client, count: int) -> list[bytes]:
    """The messages that a new group receives, up to number `count`."""
    seen: list[bytes] = []

    async def handle(message: Any) -> None:
        seen.append(message.body)

    consumer = mq.ordered_consumer("s", "g")
    task = asyncio.create_task(consumer.run(handle))
    await eventually(lambda: len(seen) >= count)
    await consumer.close()
    await task
    return seen


async def given_up(producer: Any, network: Held) -> list[Relay]:
    """Messages 3 and 4 are on a stalled connection, and have not reached the broker."""
    assert [(await producer.send(body, "k")).base_sequence for body in (b"1", b"2")] == [0, 1]
    held = network.stand_still()
    for ticket in [producer.send(b"3", "k"), producer.send(b"4", "k")]:
        with pytest.raises(DeadlineExceeded) as failed:
            await ticket
        assert failed.value.outcome is Outcome.UNKNOWN
    for each in held:
        if not each.is_left:
            each.leave()
    assert any(each.kept for each in held)
    return held


@pytest.mark.parametrize("unknown", ["fail", "resend"])
async def test_a_batch_with_unknown_outcome_is_not_stored_behind_later_ones(
    unknown: str, tmp_path: Path
) -> None:
    async with ordered(tmp_path) as (mq, network):
        producer = mq.ordered_producer(
            "s", batch_messages=1, delivery_timeout_s=1.5, unknown=unknown
        )
        held = await given_up(producer, network)
        assert [(await producer.send(body, "k")).base_sequence for body in (b"5", b"6")] == [2, 3]
        for each in held:
            each.go_on()
        await eventually(lambda: any(each.heard for each in held))
        assert (await producer.send(b"7", "k")).base_sequence == 4
        assert await stored(mq, 5) == [b"1", b"2", b"5", b"6", b"7"]


async def test_a_batch_with_unknown_outcome_may_be_stored_before_later_ones(tmp_path: Path) -> None:
    async with ordered(tmp_path) as (mq, network):
        producer = mq.ordered_producer(
            "s", batch_messages=1, delivery_timeout_s=1.5, unknown="fail"
        )
        held = await given_up(producer, network)
        for each in held:
            each.go_on()
        await eventually(lambda: any(each.heard for each in held))
        assert (await producer.send(b"5", "k")).base_sequence == 4
        assert await stored(mq, 5) == [b"1", b"2", b"3", b"4", b"5"]
