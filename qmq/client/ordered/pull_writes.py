"""When the pulls of a consumer's lanes are written: those of several lanes together, so that the broker answers them in one turn and by
one write.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Writes(Protocol):
    """A connection's bytes that are not written yet."""

    def flush(self) -> None: ...


class PullWrites:
    """Shared by all lanes of a consumer; `lanes` says how many there are. What is left is written at the end of the round."""

    def __init__(self, lanes: Callable[[], int]) -> None:
        self._lanes = lanes
        self._pulls = 0
        self._streams: dict[Writes, None] = {}

    def add(self, stream: Writes) -> None:
        """A lane pulls because its messages were handled. When half of the lanes do, write.

        Not at the end of this round of the event loop: a loop that finds messages ready does not let it go round, and the broker is to work
        meanwhile. While the other half is here, there is no hurry.
        """
        self._pulls += 1
        self._streams[stream] = None
        if self._pulls * 2 >= self._lanes():
            streams, self._streams, self._pulls = self._streams, {}, 0
            for each in streams:
                each.flush()
