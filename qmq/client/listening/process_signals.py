"""SIGINT and SIGTERM while listeners run: the first signal asks them to stop, the second to stop immediately. Previous handlers are
restored afterwards.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def asked_by_signals(ask: Callable[[], None]) -> Iterator[None]:
    """For code inside the event loop. Where a loop cannot handle signals (outside the main thread, on Windows), signals keep their usual
    effect.
    """
    loop = asyncio.get_running_loop()
    before: dict[signal.Signals, Any] = {}
    try:
        if threading.current_thread() is threading.main_thread():
            for each in _SIGNALS:
                found = signal.getsignal(each)
                try:
                    loop.add_signal_handler(each, ask)
                except NotImplementedError:
                    break
                before[each] = found
        yield
    finally:
        for each, found in before.items():
            loop.remove_signal_handler(each)
            signal.signal(each, found if found is not None else signal.SIG_DFL)


@contextmanager
def asked_in_main_thread(ask: Callable[[], None]) -> Iterator[None]:
    """For a thread that waits for an event loop in another thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = [(each, signal.signal(each, lambda *_: ask())) for each in _SIGNALS]
    try:
        yield
    finally:
        for each, found in before:
            signal.signal(each, found if found is not None else signal.SIG_DFL)
