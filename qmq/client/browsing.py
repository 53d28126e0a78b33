"""Reading stored messages without a group: `Client.browse` (docs/BROWSE.md).

queues of the subject ──▶ a page of each, by FETCH
──▶ the message that was stored first ──▶ the application

Which messages are read, and from which queues, is decided without I/O.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from qmq import limits
from qmq.client.connection.connection import ClientTiming, pause_s
from qmq.client.connection.pool import ConnectionPool
from qmq.client.consuming.message import CONTENT, DecodedBatch, StoredMessage
from qmq.client.consuming.session import ANSWER_S
from qmq.errors import LogDamaged, NotConnected, NotMaster, Unavailable
from qmq.wire import frame_payloads as wire
from qmq.wire.batch import BatchView
from qmq.wire.frame import FrameKind

_END: Final = (1 << 63) - 1


class BrowsedMessage(StoredMessage):
    """A stored message, and where it is stored."""

    __slots__ = (*CONTENT, "broker_group", "partition", "subject")

    def __init__(self, batch: DecodedBatch, index: int, queue: BrowsedQueue) -> None:
        self.body, self.attempt, self.is_settled = batch.bodies[index], 1, False
        self._batch, self._index = batch, index
        self.subject, self.broker_group, self.partition = (
            queue.subject,
            queue.broker_group,
            queue.partition,
        )


@dataclass(frozen=True, slots=True)
class BrowsedQueue:
    """One queue of the subject: the messages of a broker group, or of a partition. `next_sequence`
    is the sequence to read next.
    """

    subject: str
    broker_group: str
    partition: int
    next_sequence: int

    @property
    def key(self) -> tuple[str, int]:
        """Identifies the queue among those of the subject."""
        return self.broker_group, self.partition


@dataclass(frozen=True, slots=True)
class BrowseSelection:
    """Selects messages. Times of storing are milliseconds since 1970, 0 for no limit. `last` is a
    number of the newest messages of each queue. `is_directed`: only messages that were sent to one
    consumer group; without it, only those for all. `content` must be in the body.
    """

    start_ms: int = 0
    end_ms: int = 0
    last: int | None = None
    key: bytes | None = None
    tags_any: tuple[str, ...] = ()
    tags_all: tuple[str, ...] = ()
    first_sequence: int = 0
    end_sequence: int | None = None
    positions: Mapping[tuple[str, int], int] = field(default_factory=dict)
    is_directed: bool = False
    content: bytes = b""

    def first_of(self, queue: BrowsedQueue) -> int:
        """The sequence with which to begin in a queue."""
        if self.last is not None:
            return max(queue.next_sequence - self.last, 0)
        return max(self.first_sequence, self.positions.get(queue.key, 0))

    def end_of(self, queue: BrowsedQueue, *, follow: bool) -> int:
        """The sequence before which to end."""
        end = _END if follow else queue.next_sequence
        return end if self.end_sequence is None else min(end, self.end_sequence)

    def wants(self, message: StoredMessage) -> bool:
        """Whether the selection has this message, apart from `last`. Pure."""
        if message.append_time_ms < self.start_ms or (
            self.end_ms and message.append_time_ms >= self.end_ms
        ):
            return False
        if self.key is not None and message.key_bytes != self.key:
            return False
        if self.content not in message.body:
            return False
        tags = message.tags if self.tags_any or self.tags_all else ()
        return (not self.tags_any or any(tag in tags for tag in self.tags_any)) and all(
            tag in tags for tag in self.tags_all
        )


log = logging.getLogger("qmq.client")

PAGE_BYTES: Final = limits.MIB
FOLLOW_S: Final = 0.5

Page = tuple[wire.Fetched, deque[DecodedBatch]]


class QueueReader:
    """Reads one queue, page by page. `messages` is an unread part of the page. A small page may
    decompress to many bytes, so its batches are decoded as their messages are read, and forgotten
    with them.
    """

    def __init__(
        self,
        links: ConnectionPool,
        queue: BrowsedQueue,
        selection: BrowseSelection,
        *,
        follow: bool,
        progress: Callable[[], None] | None = None,
    ) -> None:
        self.messages: deque[BrowsedMessage] = deque()
        self.queue = queue
        self.is_over = False
        """Whether no more messages will come."""
        self._links, self._selection, self._follow, self._progress = (
            links,
            selection,
            follow,
            progress,
        )
        self._until = selection.end_of(queue, follow=follow)
        self._sequence = selection.first_of(queue)
        self._ask_again_s = -math.inf
        self._ahead: asyncio.Task[Page] | None = None
        self._fetched: wire.Fetched | None = None
        self._batches: deque[DecodedBatch] = deque()
        """The batches of the page that are not decoded yet."""
        self.looked = 0
        self.looked_ms = 0
        """How many messages were looked at, and when the last of them was stored."""

    def wants_page(self, now_s: float) -> bool:
        """Whether to fetch a page. A queue that is followed is asked now and then."""
        return not self.messages and not self.is_over and now_s >= self._ask_again_s

    async def read(self) -> None:
        """Fetch a page if the queue has messages. Raises NotConnected, UnknownSubject,
        AccessDenied, LogDamaged.
        """
        while not self.messages and not self.is_over:
            fetched = self._fetched
            if fetched is None:
                fetched, self._batches = await self._page()
                self._fetched = fetched
                if self._selection.content and fetched.next_sequence < min(
                    self._until, fetched.end_sequence
                ):
                    self._ahead = asyncio.create_task(self._fetch(fetched.next_sequence))
                    await asyncio.sleep(
                        0
                    )  # the request leaves, and the broker reads while this page is searched
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
        """Decode batches until their messages have `PAGE_BYTES`:
        all batches of a page that is not compressed.
        """
        size = 0
        while self._batches and size < PAGE_BYTES:
            batch = self._batches.popleft()
            size += self._take(batch)
            batch.decoded = None  # each message has its own body

    def _take(self, batch: DecodedBatch) -> int:
        """Add the messages of a batch. Returns the bytes of their bodies."""
        if batch.view.header.is_directed is not self._selection.is_directed:
            return 0  # an older broker does not know how to leave out the others
        if batch.unreadable is not None:
            log.error(
                "messages at %d of %s cannot be read: %s",
                batch.view.base_sequence,
                self.queue,
                batch.unreadable,
            )
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
    """How long a read waits for a broker group that has no master: `delivery_timeout_s`, with
    pauses between its tries.
    """

    def __init__(self, timing: ClientTiming) -> None:
        self._loop, self._timing, self._tries = asyncio.get_running_loop(), timing, 0
        self._until_s = self._loop.time() + timing.delivery_timeout_s

    @property
    def is_over(self) -> bool:
        """Whether the read must give up."""
        return self._loop.time() > self._until_s

    async def pause(self) -> None:
        """Pause before the next try."""
        await asyncio.sleep(pause_s(self._timing.session_retry_s, self._tries))
        self._tries += 1


async def ask_master(
    links: ConnectionPool, queue: BrowsedQueue, kind: FrameKind, request: bytes
) -> memoryview:
    """Ask the current master of a queue, and wait while it cannot be reached.
    Raises NotConnected.
    """
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
                raise NotConnected(
                    f"broker group {queue.broker_group!r} cannot be read: {failure.message}"
                ) from failure
            log.debug("%s: %s", queue, failure)
        await patience.pause()


async def end_of(links: ConnectionPool, queue: BrowsedQueue) -> int:
    """The end of a queue, after everything sent to its broker group before this call is committed.
    Raises NotConnected, AccessDenied.

    FIND waits for that, for any producer id.
    """
    await ask_master(
        links,
        queue,
        FrameKind.FIND,
        wire.Find(queue.subject, queue.partition, "0" * 16, 1, 1).pack(),
    )
    request = wire.Fetch(queue.subject, queue.partition, 0, 0, 0, 0, [], [], [], 0)
    return _unpack(await ask_master(links, queue, FrameKind.FETCH, request.pack()))[0].end_sequence


def _forget(task: asyncio.Task[Page]) -> None:
    if not task.cancelled():
        task.exception()  # the page is not needed any more, so its error is not logged


def _unpack(payload: memoryview) -> Page:
    fetched, at = wire.unpack_fetched(payload)
    batches: deque[DecodedBatch] = deque()
    for _ in range(fetched.batches):
        view = BatchView.parse(payload, at)
        at += view.envelope.total_bytes
        batches.append(DecodedBatch(view))
    return fetched, batches


def _may_hold(batch: DecodedBatch, content: bytes) -> bool:
    """Whether a body of the batch may hold the content: without taking the bodies apart, unless
    they are compressed.
    """
    if not batch.view.header.compression:
        return content in batch.view.region
    return any(content in body for body in batch.bodies)


QUEUES_S: Final = 10.0

ListQueues = Callable[[], Awaitable[Sequence[BrowsedQueue]]]


@dataclass(slots=True)
class BrowseProgress:
    """How far a browse is: messages that were looked at, and the time of storing up to which
    nothing is left to look at in any queue.
    """

    looked: int = 0
    time_ms: int = 0

    def tell(self, readers: Collection[QueueReader]) -> None:
        """Update the progress from the readers of all queues."""
        self.looked = sum(each.looked for each in readers)
        self.time_ms = min(
            (each.looked_ms for each in readers if not each.is_over), default=self.time_ms
        )


async def browse(
    links: ConnectionPool,
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
            first = min(
                (each for each in readers.values() if each.messages),
                key=_stored_first,
                default=None,
            )
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
    links: ConnectionPool,
    queues: Sequence[BrowsedQueue],
    selection: BrowseSelection,
    *,
    follow: bool,
    progress: Callable[[], None] | None = None,
) -> dict[tuple[str, int], QueueReader]:
    return {
        each.key: QueueReader(links, each, selection, follow=follow, progress=progress)
        for each in queues
    }


async def _fill(
    readers: dict[tuple[str, int], QueueReader], now_s: float, *, partial: bool
) -> None:
    """Fetch a page for each queue that wants one."""
    empty = [each for each in readers.values() if each.wants_page(now_s)]
    found = await asyncio.gather(*[each.read() for each in empty], return_exceptions=True)
    for reader, failure in zip(empty, found, strict=True):
        if isinstance(failure, NotConnected | LogDamaged) and partial:
            log.warning("%s is left out: %s", reader.queue, failure)
            reader.is_over = True
        elif isinstance(failure, BaseException):
            raise failure
