"""Reads one queue of a subject without a group, page by page, by FETCH."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable
from typing import Final

from qmq import limits
from qmq.batch import BatchView
from qmq.client.browse_selection import BrowsedMessage, BrowsedQueue, BrowseSelection
from qmq.client.connection import ClientTiming, pause_s
from qmq.client.consumer_session import ANSWER_S
from qmq.client.links import Links
from qmq.client.message import Decoded
from qmq.errors import NotConnected, NotMaster, Unavailable
from qmq.wire import frame_payloads as wire
from qmq.wire.frame import FrameKind

log = logging.getLogger("qmq.client")

PAGE_BYTES: Final = limits.MIB
FOLLOW_S: Final = 0.5

Page = tuple[wire.Fetched, deque[Decoded]]


class QueueReader:
    """Reads one queue, page by page. `messages` is an unread part of the page. A small page may decompress to many bytes, so its batches
    are decoded as their messages are read, and forgotten with them.
    """

    def __init__(
        self, links: Links, queue: BrowsedQueue, selection: BrowseSelection, *, follow: bool, progress: Callable[[], None] | None = None
    ) -> None:
        self.messages: deque[BrowsedMessage] = deque()
        self.queue = queue
        self.is_over = False
        """Whether no more messages will come."""
        self._links, self._selection, self._follow, self._progress = links, selection, follow, progress
        self._until = selection.end_of(queue, follow=follow)
        self._sequence = selection.first_of(queue)
        self._ask_again_s = -math.inf
        self._ahead: asyncio.Task[Page] | None = None
        self._fetched: wire.Fetched | None = None
        self._batches: deque[Decoded] = deque()
        """The batches of the page that are not decoded yet."""
        self.looked = 0
        self.looked_ms = 0
        """How many messages were looked at, and when the last of them was stored."""

    def wants_page(self, now_s: float) -> bool:
        """Whether to fetch a page. A queue that is followed is asked now and then."""
        return not self.messages and not self.is_over and now_s >= self._ask_again_s

    async def read(self) -> None:
        """Fetch a page if the queue has messages. Raises NotConnected, UnknownSubject, AccessDenied, LogDamaged."""
        while not self.messages and not self.is_over:
            fetched = self._fetched
            if fetched is None:
                fetched, self._batches = await self._page()
                self._fetched = fetched
                if self._selection.content and fetched.next_sequence < min(self._until, fetched.end_sequence):
                    self._ahead = asyncio.create_task(self._fetch(fetched.next_sequence))
                    await asyncio.sleep(0)  # the request leaves, and the broker reads while this page is searched
            self._take_some()
            if self._batches:
                return
            self._fetched = None
            self._sequence = max(self._sequence, fetched.next_sequence)
            if self._sequence >= min(self._until, fetched.end_sequence):
                self.is_over |= not self._follow or self._sequence >= self._until
                self._ask_again_s = asyncio.get_running_loop().time() + FOLLOW_S
                return
            if self._progress is not None:
                self._progress()

    def close(self) -> None:
        """Give up the page that was asked for ahead."""
        if self._ahead is not None:
            self._ahead.cancel()
            self._ahead.add_done_callback(_forget)

    async def _page(self) -> Page:
        """The next page: a search for content has asked for it ahead."""
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return await self._fetch(self._sequence)
        try:
            return await ahead
        except asyncio.CancelledError:
            ahead.cancel()
            raise

    def _take_some(self) -> None:
        """Decode batches until their messages have `PAGE_BYTES`: all batches of a page that is not compressed."""
        size = 0
        while self._batches and size < PAGE_BYTES:
            batch = self._batches.popleft()
            size += self._take(batch)
            batch.decoded = None  # each message has its own body

    def _take(self, batch: Decoded) -> int:
        """Add the messages of a batch. Returns the bytes of their bodies."""
        if batch.view.header.is_directed is not self._selection.is_directed:
            return 0  # an older broker does not know how to leave out the others
        if batch.unreadable is not None:
            log.error("messages at %d of %s cannot be read: %s", batch.view.base_sequence, self.queue, batch.unreadable)
            return 0
        if self._selection.end_ms and batch.view.envelope.append_time_ms >= self._selection.end_ms:
            self.is_over = True  # times of storing never decrease within a queue
            self._batches.clear()
            return 0
        self.looked += batch.view.count
        self.looked_ms = batch.view.envelope.append_time_ms
        if self._selection.content and not _may_hold(batch, self._selection.content):
            return 0
        size = 0
        for index in range(batch.view.count):
            message = BrowsedMessage(batch, index, self.queue)
            if self._sequence <= message.sequence < self._until and self._selection.wants(message):
                self.messages.append(message)
                size += len(message.body)
        return size

    async def _fetch(self, first: int) -> Page:
        """The page that begins with a sequence."""
        queue, selection = self.queue, self._selection
        tags = list(selection.tags_any), list(selection.tags_all)
        directed = wire.ONLY_DIRECTED if selection.is_directed else 0
        asked = queue.subject, queue.partition, first, self._until, selection.start_ms, PAGE_BYTES
        request = wire.Fetch(*asked, *tags, [], directed)
        return _unpack(await ask_master(self._links, queue, FrameKind.FETCH, request.pack()))


class ReadPatience:
    """How long a read waits for a broker group that has no master: `delivery_timeout_s`, with pauses between its tries."""

    def __init__(self, timing: ClientTiming) -> None:
        self._loop, self._timing, self._tries = asyncio.get_running_loop(), timing, 0
        self._until_s = self._loop.time() + timing.delivery_timeout_s

    @property
    def is_over(self) -> bool:
        """Whether the read must give up."""
        return self._loop.time() > self._until_s

    async def rest(self) -> None:
        """Pause before the next try."""
        await asyncio.sleep(pause_s(self._timing.session_retry_s, self._tries))
        self._tries += 1


async def ask_master(links: Links, queue: BrowsedQueue, kind: FrameKind, request: bytes) -> memoryview:
    """Ask the current master of a queue, and wait while it cannot be reached. Raises NotConnected."""
    patience = ReadPatience(links.timing)
    while True:
        try:
            master, connection = await links.reach(queue.subject, queue.broker_group)
            try:
                return (await connection.call(kind, request, timeout_s=ANSWER_S)).payload
            except NotMaster:
                links.locator.doubt(queue.broker_group, master)
                raise
        except Unavailable as failure:
            if patience.is_over:
                raise NotConnected(f"broker group {queue.broker_group!r} cannot be read: {failure.message}") from failure
            log.debug("%s: %s", queue, failure)
        await patience.rest()


async def end_of(links: Links, queue: BrowsedQueue) -> int:
    """The end of a queue, after everything sent to its broker group before this call is committed. Raises NotConnected, AccessDenied.

    FIND waits for that, for any producer id.
    """
    await ask_master(links, queue, FrameKind.FIND, wire.Find(queue.subject, queue.partition, "0" * 16, 1, 1).pack())
    request = wire.Fetch(queue.subject, queue.partition, 0, 0, 0, 0, [], [], [], 0)
    return _unpack(await ask_master(links, queue, FrameKind.FETCH, request.pack()))[0].end_sequence


def _forget(task: asyncio.Task[Page]) -> None:
    if not task.cancelled():
        task.exception()  # the page is not needed any more, so its error is not logged


def _unpack(payload: memoryview) -> Page:
    fetched, at = wire.unpack_fetched(payload)
    batches: deque[Decoded] = deque()
    for _ in range(fetched.batches):
        view = BatchView.parse(payload, at)
        at += view.envelope.total_bytes
        batches.append(Decoded(view))
    return fetched, batches


def _may_hold(batch: Decoded, content: bytes) -> bool:
    """Whether a body of the batch may hold the content: without taking the bodies apart, unless they are compressed."""
    if not batch.view.header.compression:
        return content in batch.view.region
    return any(content in body for body in batch.bodies)
