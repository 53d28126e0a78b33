"""Runs a listener of an ordered subject by the ordered consumer's `run`, with up to `concurrency` keys at a time.

After `stop`, a message that comes to a worker is not begun, but held until the others are finished; then the consumer puts it back, and
leaves. The consumer alone would cancel handlers after half a lease.
"""

from __future__ import annotations

import asyncio

from qmq.client.listening.message_handling import MessageHandling
from qmq.client.listening.stop_signal import Stop, cancel, failure_of, finish, wait_for_first
from qmq.client.ordered.ordered_consumer import OrderedConsumer
from qmq.client.ordered.ordered_message import OrderedMessage


class OrderedPool:
    def __init__(self, consumer: OrderedConsumer, handling: MessageHandling, concurrency: int, stop: Stop) -> None:
        self._consumer, self._handling = consumer, handling
        self._concurrency, self._stop = concurrency, stop
        self._unsettled = 0
        self._is_at_rest = asyncio.Event()
        self._is_at_rest.set()

    async def run(self) -> None:
        """Run until it is stopped. Raises the error that stopped the consumer."""
        loop = asyncio.get_running_loop()
        # Not the `run` of an intercepted consumer: here interceptors surround all of the handling, where they see how it ends.
        running = loop.create_task(OrderedConsumer.run(self._consumer, self._handle, concurrency=self._concurrency))
        try:
            await wait_for_first([running], self._stop.wanted)
        finally:
            self._stop.begin()
            at_rest = loop.create_task(self._is_at_rest.wait())
            try:
                await finish([at_rest], self._stop, self._consumer.name)
            finally:
                await cancel([running], self._stop, self._consumer.name)
                await self._consumer.close()
        failure = failure_of([running])
        if failure is not None:
            raise failure

    async def _handle(self, message: OrderedMessage) -> None:
        if self._stop.wanted.is_set():
            await asyncio.get_running_loop().create_future()  # until it is cancelled, which puts the message back
        self._unsettled += 1
        self._is_at_rest.clear()
        try:
            await self._handling.handle(message)
        finally:
            self._unsettled -= 1
            if not self._unsettled:
                self._is_at_rest.set()
