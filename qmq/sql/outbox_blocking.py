"""The outbox of the blocking client: the application's thread works on the sync connection, and the client's event loop sends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any

from qmq.sql.connection import finish
from qmq.sql.outbox import Outbox
from qmq.sql.outbox_message import OutboxMessage
from qmq.sql.outbox_row_sender import Sends


class BlockingOutbox:
    """An outbox for the blocking client, on sync connections, sessions and engines. `Outbox` describes the methods."""

    def __init__(self, box: Outbox, run: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
        self._box, self._run = box, run
        self._sender = _InLoop(box.sender, run)
        self.send = box.send

    @property
    def connection(self) -> Any:
        return self._box.connection

    def __enter__(self) -> BlockingOutbox:
        finish(self._box.__aenter__())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        finish(self._box.__aexit__(kind, error, trace))

    def committed(self) -> bool:
        outcome = finish(self._box.outcome(self._sender))

        async def wait() -> bool:
            return await asyncio.wrap_future(outcome)

        return bool(self._run(wait()))


class _InLoop:
    """Sends in the client's event loop, while the calling thread waits."""

    def __init__(self, sender: Sends, run: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
        self._sender, self._run = sender, run

    async def is_ordered(self, subject: str) -> bool:
        async def ask() -> bool:
            return await self._sender.is_ordered(subject)

        return bool(self._run(ask()))

    async def send(self, subject: str, messages: Sequence[OutboxMessage]) -> Any:
        async def say() -> Any:
            return await self._sender.send(subject, messages)

        return self._run(say())
