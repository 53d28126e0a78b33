"""Messages that requests received and did not settle yet. Each has a receipt, which is valid for a limited time."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from datetime import timedelta
from typing import Final

import qmq
from qmq.client.any_message import AnyMessage, fail
from qmq.client.group_reading import GroupReading, reading_of
from qmq.errors import QuotaExceeded
from qmq.integrations.http.http_requests import Receive, Settle
from qmq.model import check_name

HELD_MAX: Final = 10_000
IDLE_S: Final = 10.0
"""After this time without a request and without unsettled messages, other processes get the lanes of an ordered subject."""
_LATE: Final = Settle((), "nack", timedelta(0), "no verdict came over HTTP in time")
_BACK: Final = Settle((), "release", None, "")


class GroupReceipts:
    """The messages of one group and subject that HTTP clients hold. The first request finds out whether the subject is ordered.

    A crash of this process, or its end, gives the messages back: the consumer's lease ends, or it leaves. Raises InvalidName.
    """

    def __init__(self, mq: qmq.Client, subject: str, group: str) -> None:
        self._mq = mq
        self._subject, self._group = check_name("subject", subject), check_name("group", group)
        self._reading: GroupReading | None = None
        self._finding = asyncio.Lock()
        self._held: dict[str, tuple[AnyMessage, asyncio.TimerHandle]] = {}
        self._asking = 0

    @property
    def held(self) -> int:
        """Messages without a verdict."""
        return len(self._held)

    async def receive(self, ask: Receive) -> dict[str, AnyMessage]:
        """Messages by receipt. Raises as `Consumer.pull`, QuotaExceeded."""
        if len(self._held) + ask.messages_max > HELD_MAX:
            raise QuotaExceeded(f"the group holds {len(self._held)} messages here without a verdict: settle some first")
        reading = await self._found()
        self._asking += 1
        try:
            found = await reading.receive(ask.messages_max, max(ask.wait_s, 0.05))
        finally:
            self._asking -= 1
            if not self._asking:
                reading.rest()
        return {self._hold(each, ask.invisible_s): each for each in found}

    async def _found(self) -> GroupReading:
        async with self._finding:
            if self._reading is None:
                self._reading = await reading_of(self._mq, self._subject, self._group, idle_s=IDLE_S)
            return self._reading

    def _hold(self, message: AnyMessage, invisible_s: float) -> str:
        receipt = secrets.token_urlsafe(16)
        timer = asyncio.get_running_loop().call_later(invisible_s, self._over, receipt)
        self._held[receipt] = (message, timer)
        return receipt

    def _over(self, receipt: str) -> None:
        message, _ = self._held.pop(receipt)
        self._settle(message, _LATE)

    def _settle(self, message: AnyMessage, ask: Settle) -> None:
        assert self._reading is not None, "a held message came from it"
        settle(message, ask)
        self._reading.settled()

    def settle(self, ask: Settle) -> tuple[Sequence[str], Sequence[str]]:
        """Returns (settled, over): the settled receipts, and those whose messages are not held any more."""
        settled = [each for each in dict.fromkeys(ask.receipts) if each in self._held]
        for each in settled:
            message, timer = self._held.pop(each)
            timer.cancel()
            self._settle(message, ask)
        return settled, [each for each in dict.fromkeys(ask.receipts) if each not in settled]

    async def close(self) -> None:
        """Give back what is held, and leave the group."""
        while self._held:
            _, (message, timer) = self._held.popitem()
            timer.cancel()
            self._settle(message, _BACK)
        if self._reading is not None:
            await self._reading.close()


def settle(message: AnyMessage, ask: Settle) -> None:
    """Pass a verdict on, the same for both kinds of subjects."""
    if ask.verdict == "ack":
        message.ack_later()
    elif ask.verdict == "nack":
        fail(message, ask.delay, ask.error)
    elif ask.verdict == "reject":
        message.reject(ask.error)
    else:
        message.release()
