"""A program on the public client that runs under this release and under the previous one. Usage:
release_program SERVER NAME.

It prints its release and the metaserver's, sends an ordinary, an ordered and a delayed message,
consumes all messages that the subjects have, and prints a line for each. If they do not arrive
within a minute, it exits with an error.
"""

from __future__ import annotations

import asyncio
import sys
from datetime import timedelta

import qmq
from qmq import Order, SubjectConfig

WITHIN_S = 60.0


async def main(server: str, name: str) -> None:
    async with qmq.connect(server) as mq:
        # the second time it is there with these settings, which is no error
        await mq.metadata.create_subject(
            SubjectConfig("accounts", order=Order.STRICT, logical_partitions=64), partitions=2
        )
        await mq.send("orders", f"{name} now".encode())
        await mq.send("orders", f"{name} later".encode(), delay=timedelta(milliseconds=300))
        await mq.send("accounts", f"{name} ordered".encode(), key="k")
        node = (await mq.metadata.cluster()).process.version
        print(f"{qmq.__version__} says {name} to {node}")
        async with mq.consumer("orders", "billing", ack="explicit") as orders:
            await _read(orders, {f"{name} now", f"{name} later"})
        async with mq.ordered_consumer("accounts", "billing", name=name) as accounts:
            await _read(accounts, {f"{name} ordered"})


async def _read(consumer: qmq.Consumer | qmq.OrderedConsumer, wanted: set[str]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while wanted:
            message = await anext(consumer)
            print(message.body.decode())
            wanted.discard(message.body.decode())
            await message.ack_sync()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
