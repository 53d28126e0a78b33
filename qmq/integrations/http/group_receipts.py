"""Messages that requests received and did not settle yet. Each has a receipt, which is valid for a limited time."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from datetime import timedelta
from typing import Final

import qmq
from qmq.errors import QuotaExceeded
from qmq.integrations.http.http_requests import Receive, Settle

HELD_MAX: Final = 10_000


class GroupReceipts:
    """One group's reading of a subject. Between requests the consumer returns unseen messages, so that others of the group get them.

    A crash of this process, or its end, gives the messages back: the consumer's lease ends, or it leaves.
    """

    def __init__(self, consumer: qmq.Consumer) -> None:
        self._consumer = consumer
        self._held: dict[str, tuple[qmq.Message, asyncio.TimerHandle]] = {}
        self._asking = 0

    @property
    def held(self) -> int:
        """Messages without a verdict."""
        return len(self._held)

    async def receive(self, ask: Receive) -> dict[str, qmq.Message]:
        """Messages by receipt. Raises as `Consumer.pull`, QuotaExceeded."""
        if len(self._held) + ask.messages_max > HELD_MAX:
            raise QuotaExceeded(f"the group holds {len(self._held)} messages here without a verdict: settle some first")
        self._asking += 1
        try:
            await self._consumer.join()
            self._consumer.resume()
            found = await self._consumer.pull(ask.messages_max, timedelta(seconds=max(ask.wait_s, 0.05)))
        finally:
            self._asking -= 1
            if not self._asking:
                self._consumer.rest()
        return {self._hold(each, ask.invisible_s): each for each in found}

    def _hold(self, message: qmq.Message, invisible_s: float) -> str:
        receipt = secrets.token_urlsafe(16)
        timer = asyncio.get_running_loop().call_later(invisible_s, self._over, receipt)
        self._held[receipt] = (message, timer)
        return receipt

    def _over(self, receipt: str) -> None:
        message, _ = self._held.pop(receipt)
        message.nack(timedelta(0), "no verdict came over HTTP in time")

    def settle(self, ask: Settle) -> tuple[Sequence[str], Sequence[str]]:
        """Returns (settled, over): the settled receipts, and those whose messages are not held any more."""
        settled = [each for each in dict.fromkeys(ask.receipts) if each in self._held]
        for each in settled:
            message, timer = self._held.pop(each)
            timer.cancel()
            if ask.verdict == "ack":
                message.ack_later()
            elif ask.verdict == "nack":
                message.nack(ask.delay, ask.error)
            elif ask.verdict == "reject":
                message.reject(ask.error)
            else:
                message.release()
        return settled, [each for each in dict.fromkeys(ask.receipts) if each not in settled]

    async def close(self) -> None:
        """Give back what is held, and leave the group."""
        while self._held:
            _, (message, timer) = self._held.popitem()
            timer.cancel()
            message.release()
        await self._consumer.close()
