"""A client that sends and consumes while its servers get each other's addresses. Usage:
permuted_client SERVER, until a line on stdin.

It sends to an unordered subject, to an ordered one, and delayed messages, until the test says that
it is enough. When all that was acknowledged has arrived, it prints a line of JSON: the number of
acknowledged messages, and the ordered ones that came too early.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from typing import Any

import qmq
from qmq import Order, SubjectConfig
from qmq.errors import QmqError

FOR_EVER_S = 600.0
PAUSE_S = 0.02
WITHIN_S = 180.0


class Work:
    def __init__(self) -> None:
        self.acked: set[str] = set()
        self.received: dict[str, None] = {}
        self.is_over = False

    async def send(self, send: Callable[[bytes], Any], kind: str) -> None:
        number = 0
        while not self.is_over:
            name = f"{kind} {number}"
            try:
                await send(name.encode())
            except QmqError as failure:
                print(f"{name}: {failure}", file=sys.stderr)
            else:
                self.acked.add(name)
                number += 1
            await asyncio.sleep(PAUSE_S)

    async def receive(self, consumer: Any) -> None:
        async for message in consumer:
            self.received.setdefault(message.body.decode())
            await message.ack()


async def main(server: str) -> None:
    work = Work()
    async with qmq.connect(server) as mq:
        await mq.metadata.create_subject(
            SubjectConfig("accounts", order=Order.STRICT, logical_partitions=64), partitions=2
        )
        plain, ordered = (
            mq.producer("orders", delivery_timeout_s=FOR_EVER_S),
            mq.producer("accounts", delivery_timeout_s=FOR_EVER_S),
        )
        sending = [
            asyncio.ensure_future(work.send(plain.send, "plain")),
            asyncio.ensure_future(work.send(lambda body: ordered.send(body, key="k"), "ordered")),
            asyncio.ensure_future(
                work.send(
                    lambda body: mq.send("orders", body, delay=timedelta(milliseconds=100)),
                    "delayed",
                )
            ),
        ]
        consumers = (
            mq.consumer("orders", "billing", ack="explicit"),
            mq.ordered_consumer("accounts", "billing"),
        )
        receiving = [asyncio.ensure_future(work.receive(each)) for each in consumers]
        print("begun", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        work.is_over = True
        await asyncio.gather(*sending)
        async with asyncio.timeout(WITHIN_S):
            while not work.acked <= work.received.keys():
                await asyncio.sleep(PAUSE_S)
                for each in receiving:
                    if each.done():
                        each.result()
        in_order = [int(each.split()[1]) for each in work.received if each.startswith("ordered")]
        print(
            json.dumps(
                {
                    "acked": len(work.acked),
                    "disordered": [a for a, b in pairwise(in_order) if a > b],
                }
            )
        )
        for each in receiving:
            each.cancel()
        await asyncio.gather(*receiving, return_exceptions=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
