"""An ordered subject with a consumer of one group, which fails on chosen keys and parks them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

from qmq.client.client import Client
from qmq.client.consuming.ordered.message import OrderedMessage
from qmq.errors import UnknownGroup
from qmq.model import Order, SubjectConfig

LOGICAL_PARTITIONS = 1024


class ParkingConsumer:
    """Handles a subject's messages. `seen` are the bodies that it handled, `bad` the keys on which it fails."""

    def __init__(self, mq: Client, subject: str, group: str, bad: Sequence[str]) -> None:
        self._mq, self._subject, self._group = mq, subject, group
        self.seen: list[bytes] = []
        self.bad = set(bad)

    async def handle(self, message: OrderedMessage) -> None:
        if message.key in self.bad:
            raise ValueError(f"cannot read {message.key}")
        self.seen.append(message.body)

    async def until_parked(self, keys: int) -> None:
        async with asyncio.timeout(30):
            while True:
                with suppress(UnknownGroup):
                    if len({each.key for each in await self._mq.metadata.parked(self._subject, self._group)}) == keys:
                        return
                await asyncio.sleep(0.01)

    async def until_held(self, lanes: int) -> None:
        """Wait until consumers of the group hold this many lanes."""
        async with asyncio.timeout(30):
            while await self._held() != lanes:
                await asyncio.sleep(0.01)

    async def _held(self) -> int:
        groups = (await self._mq.metadata.describe_route(self._subject)).groups
        return sum(len(each.holders) for group in groups for each in group.partitions)


@asynccontextmanager
async def parked_subject(mq: Client, subject: str, group: str, keys: Sequence[str], partitions: int = 1) -> AsyncIterator[ParkingConsumer]:
    """A subject with a message for each of `keys`, all of them parked, and a running consumer."""
    await mq.metadata.create_subject(
        SubjectConfig(subject, order=Order.STRICT, logical_partitions=LOGICAL_PARTITIONS), partitions=partitions
    )
    made = ParkingConsumer(mq, subject, group, keys)
    consumer = mq.ordered_consumer(subject, group, name=f"{group}-1", on_failure="park", attempts_max=1, retry_delays_s=(0.0,))
    task = asyncio.create_task(consumer.run(made.handle))
    try:
        for key in keys:
            await mq.send(subject, f"to {key}".encode(), key=key)
        if keys:
            await made.until_parked(len(keys))
        yield made
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
