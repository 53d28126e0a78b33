"""Tasks that several callers wait for, such as one look-up or one connection attempt for all who need it."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from qmq.errors import ClientClosed

T = TypeVar("T")


async def shared(task: asyncio.Task[T]) -> T:
    """Wait for the task; cancelling this caller does not cancel the task. Raises ClientClosed if the client was closed, which cancels such
    tasks: a caller that was not cancelled itself must not get CancelledError.
    """
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if task.cancelled() and not is_cancelled_from_outside():
            raise ClientClosed("the client was closed meanwhile: make a new one with qmq.connect()") from None
        raise


def is_cancelled_from_outside() -> bool:
    """Whether the running task is cancelled; False if only something that it waits for is."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
