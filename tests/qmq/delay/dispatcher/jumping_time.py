"""An event loop whose time jumps to the next timer, so that an hour passes immediately."""

from __future__ import annotations

import asyncio
import gc
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Jumping(selectors.DefaultSelector):  # type: ignore[misc,valid-type]
    """A sleep that does not wait: the clock advances by its length."""

    now_s = 1_000.0

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            raise AssertionError("nothing is under way, and nothing ever will be")
        self.now_s += max(timeout, 0.0)
        return super().select(0)


class JumpingLoop(asyncio.SelectorEventLoop):
    """See the module."""

    def __init__(self) -> None:
        self.jumping = _Jumping()
        super().__init__(self.jumping)

    def time(self) -> float:
        return self.jumping.now_s


def play(scene: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine to its end in time that jumps."""
    loop, wrong = JumpingLoop(), list[dict[str, Any]]()
    loop.set_exception_handler(lambda _, context: wrong.append(context))
    try:
        result = loop.run_until_complete(asyncio.wait_for(scene(), 36_000))
    finally:
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.close()
    gc.collect(1)
    assert not wrong, "in a callback or a task"
    return result


async def until(condition: Callable[[], bool], within_s: float = 600.0) -> None:
    """Wait, in time that jumps."""
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.005)
