"""The two places where FastStream's base cases for brokers run: in memory under `TestQmqBroker`,
and on a real node.

FastStream keeps these cases in tests/brokers/base of its repository. Its source distribution has no
tests: they cannot be run as they are.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from qmq.integrations.faststream import QmqBroker, TestQmqBroker

SOON_S = 60


class Place:
    """In memory, or on the node at an address."""

    def __init__(self, address: str | None) -> None:
        self.address = address

    def broker(self, **options: Any) -> QmqBroker:
        """A broker for this place."""
        return QmqBroker(self.address or "127.0.0.1:1", state_dir=False, **options)

    @asynccontextmanager
    async def started(self, *brokers: QmqBroker) -> AsyncIterator[None]:
        """The brokers, started, until the end."""
        if self.address is None:
            async with TestQmqBroker(*brokers, connect_only=False):
                yield
            return
        async with AsyncExitStack() as stack:
            for each in brokers:
                await stack.enter_async_context(each)
                await each.start()
            yield


class Seen:
    """What handlers report, in the order of their reports."""

    def __init__(self) -> None:
        self._reports: asyncio.Queue[Any] = asyncio.Queue()

    def __call__(self, report: Any = None) -> None:
        self._reports.put_nowait(report)

    async def next(self, count: int = 1) -> list[Any]:
        """The next reports. Raises TimeoutError."""
        async with asyncio.timeout(SOON_S):
            return [await self._reports.get() for _ in range(count)]

    @property
    def is_empty(self) -> bool:
        return self._reports.empty()
