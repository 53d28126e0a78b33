"""A watch that survives the failure of its endpoint. It gives every event from a revision on, once,
in order, by whole revisions.

    open -> created -> events ... silence 2 s -> ask for progress -> silence 1 s -> leave the
    endpoint -> open from the last event + 1

* The watch resumes from the last event's mod_revision + 1, never from a header's revision: etcd
  sends a backlog in batches of 1000 revisions, and each batch has the *store's* revision in its
  header (measured: resuming from there loses the rest).
* etcd fills a batch with whole revisions (server/mvcc/watcher_group.go, eventBatch.add). With
  `fragment`, which keeps messages below the request limit, it may then cut the answer anywhere. The
  events of the last revision are therefore held back until the last fragment came.
* A stopped member sends nothing and closes nothing. The answer to a progress request counts as a
  sign of life only: its revision was wrong before etcd 3.4.25 and 3.5.8 (etcd #15220).
* The watch continues through any outage, until the store is closed. It ends with an error only if
  it cannot continue: Compacted, or a refusal. A watch of keys that seldom change resumes from their
  last event, however old, and may find it compacted: list, then watch again.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Sequence
from typing import Final

import grpc

from qmq.errors import Compacted, CoordinationError
from qmq.proto.etcd import etcd_pb2 as pb
from qmq_coordination.coordination_store import Revision, WatchedChanges, WatchEvent
from qmq_coordination.etcd.calls import TryAgain, error_after, is_cancelling, refusal
from qmq_coordination.etcd.channel import WATCH, Channels, EtcdConnection, Metadata, NotReady
from qmq_coordination.etcd.values import Converter

log = logging.getLogger("qmq.coordination")

SILENCE_S: Final = 2.0
ANSWER_S: Final = 1.0
_PAUSE_S_MAX: Final = 1.0
_DENIED: Final = "permission denied"


class WholeRevisions:
    """Groups events into whole revisions. Pure. `next_revision` is where to resume: after the last
    revision that was returned.
    """

    def __init__(self, start_revision: int) -> None:
        self.next_revision = start_revision
        self._held: list[WatchEvent] = []

    def feed(self, events: Sequence[WatchEvent], *, has_more: bool) -> list[WatchedChanges]:
        """The revisions that are complete now. With `has_more` a fragment follows, which may
        continue the last revision.
        """
        grouped: dict[int, list[WatchEvent]] = {}
        for event in (*self._held, *events):
            if event.mod_revision >= self.next_revision:
                grouped.setdefault(event.mod_revision, []).append(event)
        self._held = grouped.pop(max(grouped)) if has_more and grouped else []
        if grouped:
            self.next_revision = max(grouped) + 1
        return [
            WatchedChanges(Revision(revision), tuple(group)) for revision, group in grouped.items()
        ]

    def restart(self) -> None:
        """Drop the incomplete revision after the stream broke: the next stream repeats it."""
        self._held = []


class _Stream:
    """One stream to one member. A read under way is kept over several waits, because cancelling it
    would cancel the stream (grpc.aio).
    """

    def __init__(
        self, connection: EtcdConnection, metadata: Metadata, closed: asyncio.Task[bool]
    ) -> None:
        self.connection = connection
        self.metadata = metadata
        self._closed = closed
        self._call = connection.stream(WATCH, metadata)
        self._reading: asyncio.Task[object] | None = None

    async def send(self, request: pb.WatchRequest) -> None:
        """Write a request. If the stream has ended, the next read says so."""
        try:
            async with asyncio.timeout(ANSWER_S):
                await self._call.write(request)
        except (asyncio.InvalidStateError, grpc.aio.UsageError, grpc.aio.AioRpcError):
            return
        except TimeoutError:
            raise TryAgain(f"{self.connection.endpoint.address} accepts no request") from None

    async def next(self) -> pb.WatchResponse | None:
        """The next message; None when the store is closed.
        Raises TryAgain, grpc.aio.AioRpcError.
        """
        if self._reading is None:
            self._reading = asyncio.create_task(self._read())
            self._reading.add_done_callback(lambda task: task.cancelled() or task.exception())
        if not await self._is_heard(self._reading, SILENCE_S):
            await self.send(pb.WatchRequest(progress_request=pb.WatchProgressRequest()))
            if not await self._is_heard(self._reading, ANSWER_S):
                raise TryAgain(f"{self.connection.endpoint.address} does not answer")
        if self._closed.done():
            return None
        done, self._reading = self._reading, None
        if done.cancelled():
            raise TryAgain(f"{self.connection.endpoint.address}: the stream was cancelled")
        answer = done.result()
        if not isinstance(answer, pb.WatchResponse):
            raise TryAgain(f"{self.connection.endpoint.address} ended the stream")
        return answer

    async def _read(self) -> object:
        return await self._call.read()

    async def _is_heard(self, reading: asyncio.Task[object], timeout_s: float) -> bool:
        done, _ = await asyncio.wait(
            {reading, self._closed}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        return bool(done)

    def cancel(self) -> None:
        self._call.cancel()
        if self._reading is not None:
            self._reading.cancel()


class Watcher:
    """A watch of one prefix."""

    def __init__(
        self,
        channels: Channels,
        converter: Converter,
        call_s: float,
        prefix: str,
        start_revision: int,
    ) -> None:
        self._channels = channels
        self._converter = converter
        self._call_s = call_s
        self._span = converter.span(prefix, is_prefix=True)
        self._name = prefix
        # To etcd 0 means "from now"; the interface counts from the first revision.
        self._revisions = WholeRevisions(max(start_revision, 1))
        self._failures = 0
        self._is_denied = False

    async def changes(self) -> AsyncIterator[WatchedChanges]:
        closed = asyncio.create_task(self._channels.closed.wait())
        stream: _Stream | None = None
        try:
            while not closed.done():
                try:
                    stream = stream or await self._open(closed)
                    answer = await self._next(stream)
                    if answer is not None:
                        self._check(stream, answer)
                except TryAgain as failure:
                    ended, stream = stream, None
                    await self._end(ended)
                    await self._pause(closed, failure)
                    continue
                if answer is None:
                    return
                events = [self._converter.event(event) for event in answer.events]
                for changes in self._revisions.feed(events, has_more=answer.fragment):
                    yield changes
        except (CoordinationError, grpc.aio.UsageError, asyncio.CancelledError):
            # close() cancels the reads under way, which must end the watch, not its reader.
            if not self._channels.closed.is_set() or is_cancelling():
                raise
        finally:
            closed.cancel()
            await self._end(stream)

    async def _open(self, closed: asyncio.Task[bool]) -> _Stream:
        try:
            connection = await self._channels.take(self._call_s)
        except NotReady as failure:
            raise TryAgain(str(failure)) from None
        metadata: Metadata = ()
        try:
            metadata = await self._channels.metadata(connection, self._call_s)
            await self._channels.verify(connection, metadata, self._call_s)
            stream = _Stream(connection, metadata, closed)
        except BaseException as failure:
            await self._channels.release(connection)
            if isinstance(failure, grpc.aio.AioRpcError):
                raise error_after(
                    self._channels, connection, metadata, failure, is_change=False
                ) from None
            if isinstance(failure, NotReady):
                raise TryAgain(str(failure)) from None
            raise
        self._revisions.restart()
        key, end = self._span
        create = pb.WatchCreateRequest(
            key=key, range_end=end, start_revision=self._revisions.next_revision, fragment=True
        )
        try:
            await stream.send(pb.WatchRequest(create_request=create))
        except BaseException:
            await self._end(stream)
            raise
        return stream

    async def _end(self, stream: _Stream | None) -> None:
        if stream is not None:
            stream.cancel()
            await self._channels.release(stream.connection)

    async def _next(self, stream: _Stream) -> pb.WatchResponse | None:
        try:
            return await stream.next()
        except grpc.aio.AioRpcError as failure:
            raise error_after(
                self._channels, stream.connection, stream.metadata, failure, is_change=False
            ) from None
        except TryAgain:
            self._channels.rotation.leave(stream.connection.endpoint)
            raise

    def _check(self, stream: _Stream, answer: pb.WatchResponse) -> None:
        """Returns if the watch continues. Raises TryAgain, Compacted, CoordinationError."""
        try:
            self._channels.check(stream.connection, answer.header)
        except NotReady as failure:
            raise TryAgain(str(failure)) from None
        if not answer.canceled:
            self._is_denied = False
            self._failures = self._failures if answer.created else 0
            return
        if answer.compact_revision:
            raise Compacted(
                f"revision {self._revisions.next_revision} is compacted away; "
                f"the oldest is {answer.compact_revision}: list again and continue from there"
            )
        if _DENIED in answer.cancel_reason:
            # etcd reports an invalid token in the same way, so try a new token the first time.
            if self._is_denied or self._channels.user is None:
                raise refusal(answer.cancel_reason)
            self._is_denied = True
            self._channels.forget_token(stream.metadata)
        else:
            self._channels.rotation.leave(stream.connection.endpoint)
        raise TryAgain(
            f"{stream.connection.endpoint.address} cancelled the watch: {answer.cancel_reason}"
        )

    async def _pause(self, closed: asyncio.Task[bool], failure: TryAgain) -> None:
        log.info(
            "watch of %r broke (%s); continuing from revision %d",
            self._name,
            failure,
            self._revisions.next_revision,
        )
        pause_s = random.uniform(0, min(_PAUSE_S_MAX, 0.02 * 2 ** min(self._failures, 10)))  # noqa: S311 - jitter
        self._failures += 1
        await asyncio.wait({closed}, timeout=pause_s)
