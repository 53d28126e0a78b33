"""The event loop of a program: uvloop's, if it is installed. It takes about two thirds of the time of asyncio's own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

_R = TypeVar("_R")


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's factory if uvloop is installed, else None (asyncio's own)."""
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def run(main: Coroutine[Any, Any, _R]) -> _R:
    """Run a program's coroutine to its end, as `asyncio.run` does; with uvloop where it is installed (`pip install 'qmq[fast]'`).

        qmq.run(main())

    Raises what `main` raises, and RuntimeError inside a running event loop.
    """
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(main)
