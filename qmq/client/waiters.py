"""Futures of waiters for a change."""

from __future__ import annotations

import asyncio


def set_result(waiting: asyncio.Future[bool], is_changed: bool) -> bool:
    """Wake the waiter; False if it has stopped waiting."""
    if waiting.done():
        return False
    waiting.set_result(is_changed)
    return True
