"""Pushes changes of Locate's answers to clients.

Each watcher has a set of subjects and a set of broker groups whose changes were not sent yet. A
name that changes twice before the client reads is sent once, so a slow client costs no more memory
than the names. At `NAMES_MAX` names its stream ends with Overloaded: the client locates everything
again, and comes back.

A new subject is not named: who has located it did so after its creation. A client that sends to
10,000 new subjects otherwise located each of them twice.

The first answer is empty and comes immediately: every later change is sent. After ten seconds
without a change an empty answer follows, so that a client notices a dead metaserver, and a
metaserver a dead client.
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
    """The changes that were not sent to one client yet."""

    def __init__(self) -> None:
        self.subjects: set[str] = set()
        self.groups: set[str] = set()
        self.changed = asyncio.Event()

    def push(self, subjects: frozenset[str], groups: frozenset[str]) -> None:
        if len(self.subjects) + len(self.groups) <= NAMES_MAX:
            self.subjects |= subjects
            self.groups |= groups
        self.changed.set()

    def take(self) -> pb.WatchResponse:
        if len(self.subjects) + len(self.groups) > NAMES_MAX:
            raise Overloaded(
                f"more than {NAMES_MAX} changes wait for this watcher: locate everything "
                "again, then watch again"
            )
        changes = pb.WatchResponse(
            subjects=sorted(self.subjects), broker_groups=sorted(self.groups)
        )
        self.subjects.clear()
        self.groups.clear()
        self.changed.clear()
        return changes


class Watchers:
    """All clients that watch this metaserver."""

    def __init__(self, view: ClusterView) -> None:
        self._watchers: set[_Watcher] = set()
        self._leave = view.on_change(self._push)
        self._is_closed = False

    @property
    def count(self) -> int:
        """The number of watching clients."""
        return len(self._watchers)

    def _push(self, change: ViewChange) -> None:
        subjects = change.subjects - change.created
        if subjects or change.groups:
            for watcher in self._watchers:
                watcher.push(subjects, change.groups)

    async def watch(self, quiet_s: float = QUIET_S) -> AsyncGenerator[pb.WatchResponse, None]:
        """Iterate over the changes, until the metaserver stops. Raises Overloaded."""
        if len(self._watchers) >= WATCHERS_MAX:
            raise Overloaded(
                f"{WATCHERS_MAX} clients watch this metaserver already: try another one"
            )
        watcher = _Watcher()
        self._watchers.add(watcher)
        try:
            while not self._is_closed:
                yield watcher.take()
                await _wait(watcher.changed, quiet_s)
        finally:
            self._watchers.discard(watcher)

    def close(self) -> None:
        """End every watch, so that clients switch to another metaserver immediately."""
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
