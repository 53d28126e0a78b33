"""Requests and their answers. All brokers that send requests read one subject of answers. Each of them reads every answer, and takes those
whose correlation id belongs to one of its requests:

    request ──▶ subject, with `reply_to` and a correlation id ──▶ handler ──▶ subject of answers ──▶ the broker that asked

The first request joins the subject of answers; from then on no answer is missed. QMQ stores requests like any message: a request that timed
out is still handled, but its answer is dropped.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

import qmq
from qmq.client.consuming.message import Message
from qmq.client.consuming.ordered.consumer import joined_unordered
from qmq.errors import ClientClosed, InvalidArgument, QmqError
from qmq.integrations.faststream.messages import CORRELATION_ID

log = logging.getLogger("qmq.integrations")

GROUP: Final = "faststream-requests"


class RequestAnswers:
    """Waits for the answers to one broker's requests on `subject`."""

    def __init__(self, subject: str) -> None:
        self.subject = subject
        self._waiting: dict[str, asyncio.Future[Message]] = {}
        self._joining = asyncio.Lock()
        self._joined: tuple[qmq.Consumer, asyncio.Task[None]] | None = None

    async def ask(self, mq: qmq.Client, correlation_id: str, send: Callable[[], Awaitable[object]], timeout_s: float) -> Message:
        """Send a request by `send`, and return its answer. Raises TimeoutError if none came in time after it was stored, InvalidArgument
        if another request waits with the same correlation id, and what `send` raises.
        """
        await self._join(mq)
        if correlation_id in self._waiting:
            raise InvalidArgument(f"a request with the correlation id {correlation_id!r} waits already: give each its own id")
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._waiting[correlation_id] = answer
        try:
            await send()
            async with asyncio.timeout(timeout_s):
                return await answer
        finally:
            del self._waiting[correlation_id]

    async def _join(self, mq: qmq.Client) -> None:
        async with self._joining:
            if self._joined is None:
                await mq.metadata.locate(self.subject, create=True)
                consumer = mq.consumer(self.subject, GROUP, broadcast=True, ack="explicit", expired="skip")
                if not await joined_unordered(consumer):
                    raise InvalidArgument(f"answers cannot come over the ordered subject {self.subject}: give another as `answers=`")
                self._joined = consumer, asyncio.create_task(self._read(consumer))

    async def _read(self, consumer: qmq.Consumer) -> None:
        while True:
            try:
                found = await consumer.pull()
            except ClientClosed:
                return
            except QmqError:
                log.exception("answers on %s could not be read", self.subject)
                await asyncio.sleep(1)
                continue
            for each in found:
                waiting = self._waiting.get(each.headers.get(CORRELATION_ID, b"").decode("utf-8", "replace"))
                if waiting is not None and not waiting.done():
                    waiting.set_result(each)
            found.ack_later()

    async def close(self) -> None:
        """Read no more answers; requests that wait fail with ClientClosed."""
        joined, self._joined = self._joined, None
        if joined is not None:
            consumer, reader = joined
            await consumer.close()
            await reader
        for each in self._waiting.values():
            if not each.done():
                each.set_exception(ClientClosed("the broker stopped before the answer came"))
