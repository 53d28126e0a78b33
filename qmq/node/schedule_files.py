"""A replica's schedule, for another replica that has none: the state in the newest checkpoint, and the files.

There are no locks. Files may grow, which is harmless. When a bucket is closed, its files are deleted, and the other replica begins again.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from qmq.errors import NotConnected
from qmq.log import checkpoint as checkpoints

SCHEDULE: Final = "schedule"
"""The folder's name within the store's."""


class ReplicaScheduleFiles:
    """See `qmq.delay.interfaces.ScheduleFiles`. `store` is the folder of the replica's store."""

    def __init__(self, store: Path, is_ready: Callable[[], bool]) -> None:
        self._store = store
        self._is_ready = is_ready

    def describe(self) -> tuple[bytes, int]:
        """The projection's state as MessagePack, and the index of that state. Raises NotConnected."""
        if not self._is_ready():
            raise NotConnected("this replica has no schedule yet: ask another one")
        try:
            found = checkpoints.load(self._store / "checkpoint")
        except OSError as cause:
            raise NotConnected(f"the checkpoint could not be read ({cause}): ask again") from cause
        if found is None or found.projection is None:
            raise NotConnected("this replica has written no checkpoint yet: ask again in a minute")
        return msgspec.msgpack.encode(found.projection), found.index

    def read(self, file: str, offset: int, bytes_max: int) -> bytes:
        """Read bytes of a file; none behind its end. Safe in a thread. Raises FileNotFoundError, OSError."""
        with (self._store / SCHEDULE / file).open("rb") as content:
            if offset >= os.fstat(content.fileno()).st_size:
                return b""  # the system refuses places that no file can have
            content.seek(offset)
            return content.read(bytes_max)
