"""What a consumer does for each message: compiled (`_ready.c`) where that was built, else in Python (`ready_messages.py`).

With the environment variable QMQ_PURE the Python form is used in any case.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from qmq.client import ready_messages

if TYPE_CHECKING:
    from qmq.client.ready_messages import GatheredAcks, MessageFields, ReadyMessages, cut_bodies

    IS_COMPILED: bool
else:
    try:
        form = ready_messages if os.environ.get("QMQ_PURE") else importlib.import_module("qmq.client._ready")
    except ImportError:
        form = ready_messages
    GatheredAcks, MessageFields, ReadyMessages = form.GatheredAcks, form.MessageFields, form.ReadyMessages
    cut_bodies = form.cut_bodies
    IS_COMPILED = form is not ready_messages

__all__ = ["IS_COMPILED", "GatheredAcks", "MessageFields", "ReadyMessages", "clock_of", "cut_bodies"]


def clock_of(loop: asyncio.AbstractEventLoop) -> Callable[[], float]:
    """The event loop's clock: what `time` of asyncio's own event loops calls, and `time` of others."""
    return time.monotonic if type(loop).time is asyncio.BaseEventLoop.time else loop.time
