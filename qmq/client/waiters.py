"""Futures of those who wait for a change."""

from __future__ import annotations

import asyncio


def set_result(waiting: asyncio.Future[bool], is_changed: bool) -> bool:
    """Wake who waits; False if nobody waits there any more."""
    if waiting.done():
        return False
    waiting.set_result(is_changed)
    return True
