"""What a broker takes for a partition of an ordered subject, and when: the rules that hold order while writing. No I/O.

    sealed                       a batch that is here is answered again; any other is refused for good: RouteChanged
    number n of a producer       taken if n - 1 was its last one here, or n is 0 and it never sent here (or was forgotten, and does not say
                                 AGAIN); a batch that is here is answered again; anything else is refused: OutOfSequence
    lease lapsed                 where the subject's fencing is by lease: RightLapsed

So whatever is refused takes along everything that the producer sent behind it, and "where does its stream stand" has one answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from qmq_ordering.route import LpRange, PhysicalPartition

from qmq.errors import OutOfSequence, QmqError, RightLapsed, RouteChanged
from qmq.log.queue import Queue
from qmq.log.store import Intake, Store
from qmq.region import BatchFlag, RegionHeader
from qmq.wire.frame import HEADER, HEADER_BYTES, FrameKind
from qmq.wire.messages import unpack_error


class Routing(Protocol):
    """What the broker knows of ordered subjects, from the coordination store."""

    def partition(self, subject: str, number: int) -> PhysicalPartition | None:
        """The partition, if any version of the route has it on this broker group."""
        ...

    def is_open(self, subject: str, group: str, number: int, lps: LpRange, version: int) -> bool:
        """Whether the group reads `version` in the range, and that version has the partition there."""
        ...

    async def closes(self, subject: str, number: int, change_id: str, to_version: int) -> bool:
        """Whether the store has that change of the route, and it closes the partition. Raises CoordinationError."""
        ...

    async def group_revision(self, subject: str, group: str) -> int:
        """The revision of the group's record in the store now, 0 if there is none; from here on `is_open` goes by nothing older."""
        ...


class NoRouting:
    """A broker that hosts no ordered subject."""

    def partition(self, _subject: str, _number: int) -> PhysicalPartition | None:
        """None is here."""
        return None

    def is_open(self, _subject: str, _group: str, _number: int, _lps: LpRange, _version: int) -> bool:
        """Nothing is."""
        return False

    async def closes(self, _subject: str, _number: int, _change_id: str, _to_version: int) -> bool:
        """None does."""
        return False

    async def group_revision(self, _subject: str, _group: str) -> int:
        """There is none."""
        return 0


class Admission:
    """Says of the batches of one write, in their order, whether they may be appended."""

    def __init__(self, store: Store, has_right: Callable[[Queue], bool]) -> None:
        self._store = store
        self._has_right = has_right
        self._newest: dict[tuple[int, int], int] = {}
        """What was admitted in this write: the last number of each producer, by queue."""

    def admit(self, batches: list[Intake]) -> None:
        """All of a request, or nothing of it. Raises RouteChanged, OutOfSequence, RightLapsed."""
        newest = dict(self._newest)
        for batch in batches:
            if batch.queue.is_ordered and not self._is_stored(batch, newest):
                self._require(batch, newest)
                newest[id(batch.queue), batch.header.producer_id] = batch.header.batch_sequence
        self._newest = newest

    def _is_stored(self, batch: Intake, newest: dict[tuple[int, int], int]) -> bool:
        header = batch.header
        if header.batch_sequence <= newest.get((id(batch.queue), header.producer_id), -1):
            return True
        return self._store.find_duplicate(batch.queue, header) is not None

    def _require(self, batch: Intake, newest: dict[tuple[int, int], int]) -> None:
        queue, header = batch.queue, batch.header
        if queue.sealed is not None:
            raise RouteChanged(f"{queue.id} is sealed: route version {queue.sealed.to_version} says where its keys go now")
        last = newest.get((id(queue), header.producer_id))
        if last is None:
            window = queue.producers.window(header.producer_id)
            last = window.newest if window is not None else self._last_before_silence(queue, header)
        if header.batch_sequence != last + 1:
            raise OutOfSequence(f"batch {header.batch_sequence} of producer {header.producer_id:016x} to {queue.id}: {last + 1} comes next")
        if not self._has_right(queue):
            raise RightLapsed(f"{queue.id} takes no messages: this master has lost touch with the coordination store")

    @staticmethod
    def _last_before_silence(queue: Queue, header: RegionHeader) -> int:
        """Whoever says AGAIN may have been silent for so long that its window is gone; the log knows how far it had come."""
        return queue.index.newest_of(header.producer_id) if header.flags & BatchFlag.AGAIN else -1


class Barrier:
    """Stands in for a connection where a coroutine waits for a commit."""

    is_writable = True
    client = ""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.done: asyncio.Future[None] = loop.create_future()

    def send(self, *buffers: bytes) -> None:
        """The answer: nothing, or an error."""
        if self.done.done():
            return
        failure = _error_in(b"".join(buffers))
        if failure is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(failure)


def _error_in(frame: bytes) -> QmqError | None:
    if len(frame) < HEADER_BYTES or HEADER.unpack_from(frame)[1] != FrameKind.ERROR:
        return None
    return unpack_error(frame[HEADER_BYTES:])
