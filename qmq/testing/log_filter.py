"""Silences the log of servers that a test cuts off or kills on purpose."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

SERVERS: Final = ("broker", "coordination", "delay", "meta", "node", "replication", "rpc")
_LEVEL: Final = logging.ERROR - 1
"""An unusual level, by which this module recognises its own setting."""
_users = [0]


@contextmanager
def quiet() -> Iterator[None]:
    """Let servers log errors only, unless the test set a level for their loggers. May be entered several times concurrently."""
    loggers = [logging.getLogger(f"qmq.{each}") for each in SERVERS]
    _users[0] += 1
    for logger in loggers:
        if logger.level == logging.NOTSET:
            logger.setLevel(_LEVEL)
    try:
        yield
    finally:
        _users[0] -= 1
        for logger in loggers:
            if not _users[0] and logger.level == _LEVEL:
                logger.setLevel(logging.NOTSET)
