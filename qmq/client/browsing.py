"""Reading stored messages without a group: `Client.browse` (docs/BROWSE.md).

queues of the subject ──▶ a page of each, by FETCH ──▶ the message that was stored first ──▶ the application
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Final

from qmq.client.browse_selection import BrowsedMessage, BrowsedQueue, BrowseSelection
from qmq.client.links import Links
from qmq.client.queue_reader import FOLLOW_S, QueueReader
from qmq.errors import LogDamaged, NotConnected

log = logging.getLogger("qmq.client")

QUEUES_S: Final = 10.0

ListQueues = Callable[[], Awaitable[Sequence[BrowsedQueue]]]


@dataclass(slots=True)
class BrowseProgress:
    """How far a browse is: messages that were looked at, and the time of storing up to which nothing is left to look at in any queue."""

    looked: int = 0
    time_ms: int = 0

    def tell(self, readers: Collection[QueueReader]) -> None:
        """Update the progress from the readers of all queues."""
        self.looked = sum(each.looked for each in readers)
        self.time_ms = min((each.looked_ms for each in readers if not each.is_over), default=self.time_ms)


async def browse(
    links: Links,
    list_queues: ListQueues,
    selection: BrowseSelection,
    *,
    follow: bool,
    partial: bool,
    progress: BrowseProgress | None = None,
) -> AsyncIterator[BrowsedMessage]:
    """Messages in the order in which they were stored. Raises as `QueueReader.read`."""
    loop = asyncio.get_running_loop()
    readers: dict[tuple[str, int], QueueReader] = {}

    def tell() -> None:
        if progress is not None:
            progress.tell(readers.values())

    readers |= _readers(links, await list_queues(), selection, follow=follow, progress=tell)
    # all messages of a queue that appears later are wanted: they were stored since
    later = replace(selection, start_ms=0, last=None, positions={})
    look_s = loop.time() + QUEUES_S
    try:
        while True:
            if follow and loop.time() >= look_s:
                look_s = loop.time() + QUEUES_S
                new = [each for each in await list_queues() if each.key not in readers]
                readers |= _readers(links, new, later, follow=True)
            if any(each.wants_page(loop.time()) for each in readers.values()):
                await _fill(readers, loop.time(), partial=partial)
                tell()
            first = min((each for each in readers.values() if each.messages), key=_stored_first, default=None)
            if first is not None:
                yield first.messages.popleft()
            elif all(each.is_over for each in readers.values()):
                return
            elif follow:
                await asyncio.sleep(FOLLOW_S / 4)
    finally:
        for each in readers.values():
            each.close()


def _stored_first(reader: QueueReader) -> tuple[int, tuple[str, int]]:
    return reader.messages[0].append_time_ms, reader.queue.key


def _readers(
    links: Links,
    queues: Sequence[BrowsedQueue],
    selection: BrowseSelection,
    *,
    follow: bool,
    progress: Callable[[], None] | None = None,
) -> dict[tuple[str, int], QueueReader]:
    return {each.key: QueueReader(links, each, selection, follow=follow, progress=progress) for each in queues}


async def _fill(readers: dict[tuple[str, int], QueueReader], now_s: float, *, partial: bool) -> None:
    """Fetch a page for each queue that wants one."""
    empty = [each for each in readers.values() if each.wants_page(now_s)]
    found = await asyncio.gather(*[each.read() for each in empty], return_exceptions=True)
    for reader, failure in zip(empty, found, strict=True):
        if isinstance(failure, NotConnected | LogDamaged) and partial:
            log.warning("%s is left out: %s", reader.queue, failure)
            reader.is_over = True
        elif isinstance(failure, BaseException):
            raise failure
