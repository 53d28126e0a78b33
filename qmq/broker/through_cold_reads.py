"""Waits in a coroutine for bytes that are only in the object store (qmq/log/cold_read.py)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from qmq.errors import QmqError
from qmq.log.cold_read import ColdRead

_P = ParamSpec("_P")
_R = TypeVar("_R")


async def through_cold_reads(read: Callable[_P, _R], *args: _P.args, **options: _P.kwargs) -> _R:
    """The result of a repeatable read. Waits while the read needs bytes that must be fetched. Raises Overloaded if a fetch fails."""
    while True:
        try:
            return read(*args, **options)
        except ColdRead as cold:
            await _end_of(cold)


async def _end_of(cold: ColdRead) -> None:
    ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def tell(failure: QmqError | None) -> None:
        if ended.cancelled():
            return
        if failure is not None:
            ended.set_exception(failure)
        else:
            ended.set_result(None)

    cold.then(ended, tell)
    await ended
