"""A replica's schedule, for another replica that has none: what the newest checkpoint on disk says of it, and its files' bytes.

Nothing is locked meanwhile: files grow, which does no harm, and vanish when their bucket is closed; then the taker begins again.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from qmq.errors import NotConnected
from qmq.log import checkpoint as checkpoints

SCHEDULE: Final = "schedule"
"""The folder, in the store's."""


class ReplicaScheduleFiles:
    """See `qmq.delay.interfaces.ScheduleFiles`. `store` is the folder of the replica's store."""

    def __init__(self, store: Path, is_ready: Callable[[], bool]) -> None:
        self._store = store
        self._is_ready = is_ready

    def describe(self) -> tuple[bytes, int]:
        """(the projection's state as MessagePack, the index it is of). Raises NotConnected."""
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
        """Bytes of a file; safe in a thread. Raises FileNotFoundError, OSError."""
        with (self._store / SCHEDULE / file).open("rb") as content:
            content.seek(offset)
            return content.read(bytes_max)
