"""Passes the verdicts of a plain handler from its thread to the event loop's thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from qmq.client.any_message import AnyMessage
from qmq.client.message import Settler, Slice, retry_ms
from qmq.client.ordered.ordered_message import LaneSettler as OrderedSettler
from qmq.client.ordered.ordered_message import OrderedMessage


def say_from_threads(message: AnyMessage, loop: asyncio.AbstractEventLoop) -> None:
    """Let the message take verdicts from any thread. Called in the event loop's thread."""
    home = threading.get_ident()

    def call(function: Callable[..., None], *arguments: Any) -> None:
        if threading.get_ident() == home:
            function(*arguments)
        else:
            loop.call_soon_threadsafe(function, *arguments)

    if isinstance(message, OrderedMessage):
        # a message that is tried again has it from the last try
        message.settle_through(lambda settler: settler if isinstance(settler, _ThreadLaneSettler) else _ThreadLaneSettler(settler, call))
    else:
        message.settle_through(lambda settler: _ThreadSettler(settler, call))


class _ThreadSettler:
    def __init__(self, settler: Settler, call: Callable[..., None]) -> None:
        self._settler, self._call = settler, call
        self.subject = settler.subject
        self.broker_group = settler.broker_group

    def ack(self, pull: int) -> None:
        self._call(self._settler.ack, pull)

    def settle(self, first: int, last: int, verdict: int, delay: int = 0, error: str = "") -> None:
        self._call(self._settler.settle, first, last, verdict, delay, error)

    def nack(self, part: Slice, delay: timedelta | None, error: str = "") -> None:
        if delay is not None:
            retry_ms(delay)  # an invalid delay raises here, not in the loop
        self._call(self._settler.nack, part, delay, error)

    async def settle_now(self, first: int, last: int, verdict: int) -> None:
        await self._settler.settle_now(first, last, verdict)


class _ThreadLaneSettler:
    def __init__(self, settler: OrderedSettler, call: Callable[..., None]) -> None:
        self._settler, self._call = settler, call

    def finish(self, message: OrderedMessage) -> None:
        self._call(self._settler.finish, message)

    def fail(self, message: OrderedMessage, pause_ms: int | None) -> None:
        self._call(self._settler.fail, message, pause_ms)

    def reject(self, message: OrderedMessage) -> None:
        self._call(self._settler.reject, message)

    def release(self, message: OrderedMessage) -> None:
        self._call(self._settler.release, message)
