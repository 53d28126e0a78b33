"""Runs a program with uvloop's event loop, if it is installed, and with process settings for streams of messages (`process_tuning.py`).
uvloop needs about two thirds of the time of asyncio's event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from qmq.process_tuning import calm_collector, keep_freed_memory

_R = TypeVar("_R")


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's factory if uvloop is installed, otherwise None (asyncio's event loop)."""
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def run(main: Coroutine[Any, Any, _R]) -> _R:
    """Run a program's coroutine to its end, as `asyncio.run` does; with uvloop where it is installed (`pip install 'qmq[fast]'`).

        qmq.run(main())

    It also changes two settings of the process, which stay: malloc keeps large freed blocks for the next batch (glibc), and the cyclic
    garbage collector runs rarely, and never over what was imported before. A program that makes many reference cycles sets its own
    thresholds in `main`, with `gc.set_threshold`.

    Raises what `main` raises, and RuntimeError inside a running event loop.
    """
    keep_freed_memory()
    calm_collector()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(main)
