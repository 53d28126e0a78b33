"""Clients that want to hear at once when what Locate answers has changed.

Each watcher has one set of subjects and one of broker groups that it was not told yet: what changes twice before it reads is told once, so
a slow reader costs no more than the names. At `NAMES_MAX` names its stream ends with Overloaded: it locates all anew, and comes back.

The first answer is empty and comes at once: what changes from then on is told. After ten quiet seconds an empty one follows, so that a
client whose metaserver died without a word finds out, and so does a metaserver whose client did.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Final

from qmq_coordination.view import ClusterView, ViewChange

from qmq.errors import Overloaded
from qmq.proto.v1 import meta_pb2 as pb

NAMES_MAX: Final = 10_000
WATCHERS_MAX: Final = 20_000
QUIET_S: Final = 10.0


class _Watcher:
    """The pending updates of one client."""

    def __init__(self) -> None:
        self.subjects: set[str] = set()
        self.groups: set[str] = set()
        self.changed = asyncio.Event()

    def push(self, change: ViewChange) -> None:
        if len(self.subjects) + len(self.groups) <= NAMES_MAX:
            self.subjects |= change.subjects
            self.groups |= change.groups
        self.changed.set()

    def take(self) -> pb.WatchResponse:
        if len(self.subjects) + len(self.groups) > NAMES_MAX:
            raise Overloaded(f"more than {NAMES_MAX} changes wait for this watcher: locate everything again, then watch anew")
        told = pb.WatchResponse(subjects=sorted(self.subjects), broker_groups=sorted(self.groups))
        self.subjects.clear()
        self.groups.clear()
        self.changed.clear()
        return told


class Watchers:
    """All clients that watch this metaserver."""

    def __init__(self, view: ClusterView) -> None:
        self._watchers: set[_Watcher] = set()
        self._leave = view.on_change(self._push)
        self._is_closed = False

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self._watchers)

    def _push(self, change: ViewChange) -> None:
        if change.subjects or change.groups:
            for watcher in self._watchers:
                watcher.push(change)

    async def watch(self, quiet_s: float = QUIET_S) -> AsyncGenerator[pb.WatchResponse, None]:
        """Changes, until the metaserver stops. Raises Overloaded."""
        if len(self._watchers) >= WATCHERS_MAX:
            raise Overloaded(f"{WATCHERS_MAX} clients watch this metaserver already: try another one")
        watcher = _Watcher()
        self._watchers.add(watcher)
        try:
            while not self._is_closed:
                yield watcher.take()
                await _wait(watcher.changed, quiet_s)
        finally:
            self._watchers.discard(watcher)

    def close(self) -> None:
        """Hear no more; every watch ends, so that clients go to another metaserver at once."""
        self._leave()
        self._is_closed = True
        for watcher in self._watchers:
            watcher.changed.set()


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return
