"""Consumers of a shared backlog: attachment, messages, verdicts.

What a consumer does for each message is taken from here: compiled (`_ready.c`) where that was
built, else in Python (`iterator.py`). With the environment variable QMQ_PURE the Python form is
used in any case.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING

from qmq.client.consuming import iterator

if TYPE_CHECKING:
    from qmq.client.consuming.iterator import (
        GatheredAcks,
        MessageFields,
        ReadyMessages,
        TaskHolding,
        cut_bodies,
    )

    IS_COMPILED: bool
else:
    try:
        form = (
            iterator if os.environ.get("QMQ_PURE") else importlib.import_module("qmq.client._ready")
        )
    except ImportError:
        form = iterator
    GatheredAcks, MessageFields, ReadyMessages = (
        form.GatheredAcks,
        form.MessageFields,
        form.ReadyMessages,
    )
    TaskHolding, cut_bodies = form.TaskHolding, form.cut_bodies
    IS_COMPILED = form is not iterator

__all__ = [
    "IS_COMPILED",
    "GatheredAcks",
    "MessageFields",
    "ReadyMessages",
    "TaskHolding",
    "cut_bodies",
]
