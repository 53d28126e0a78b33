"""Calls that name several messages: their entries are served concurrently."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

_Entry = TypeVar("_Entry")
_Answer = TypeVar("_Answer")


async def serve_entries(serve: Callable[[_Entry], Awaitable[_Answer]], entries: Sequence[_Entry]) -> list[_Answer]:
    """The answers, in the order of the entries. Most calls have one entry, which needs no separate task."""
    if len(entries) == 1:
        return [await serve(entries[0])]
    return await asyncio.gather(*[serve(each) for each in entries])
