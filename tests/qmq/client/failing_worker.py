"""A client in a separate process: takes messages, gives the verdicts that the test orders, and
handles the rest.

failing_worker.py ADDRESS COUNT     takes COUNT messages of "s" for group "ops", prints "taken", and
                                    reads commands, one a line:
fail GROUP     settles the messages of that broker group: every fourth is done, failed, rejected,
               unsettled; then prints "failed"
take           takes one more message, acknowledges it, and prints its body
"""

from __future__ import annotations

import asyncio
import sys
from datetime import timedelta

import qmq


async def work(address: str, count: int) -> None:
    async with qmq.connect(address) as mq:
        consumer = mq.consumer("s", "ops", ack="explicit")
        taken: list[qmq.Message] = []
        while len(taken) < count:
            taken += await consumer.pull()
        print("taken", flush=True)
        while command := (await asyncio.to_thread(sys.stdin.readline)).split():
            if command[0] == "take":
                (message,) = await consumer.pull(1)
                await message.ack_sync()
                print(message.body.decode(), flush=True)
            else:
                say([message for message in taken if message.broker_group == command[1]])
                await asyncio.sleep(0)  # verdicts of one round of the loop are written in the next
                print("failed", flush=True)


def say(messages: list[qmq.Message]) -> None:
    for number, message in enumerate(messages):
        if number % 4 == 0:
            message.ack_later()
        elif number % 4 == 1:
            message.nack(timedelta(seconds=0.5), f"engine {message.body.decode()}")
        elif number % 4 == 2:
            message.reject(ValueError(f"no flight {message.body.decode()}"))


if __name__ == "__main__":
    asyncio.run(work(sys.argv[1], int(sys.argv[2])))
