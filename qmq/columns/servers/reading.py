"""Reads pieces of queues from the masters of broker groups, and follows their changes.

A piece is read request by request:

* The next request is sent as soon as the head of an answer has arrived, which names the next
  position. While this answer's batches arrive and are processed, the broker prepares the next ones.
* After any failure of a connection, reading continues after the last yielded batch, at the current
  master.
* The retry time counts from the last answer.

The current master of a broker group, and connections to it, by
`qmq.client.metadata.cache.RouteTable`:

* One user at a time has a connection, and returns it if no request is in flight.
* If a master redirects or cannot be reached, metaservers are asked repeatedly for the master until
  one serves the group or `retry_ms` has passed.
* A broker that does not know a subject known to a metaserver is treated as unreachable, because its
  view is behind. If metaservers do not know it either, the subject was deleted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final, TypeVar

import numpy as np
from google_crc32c import value as crc32c

from qmq import limits
from qmq.client.metadata.cache import RouteTable, delayed_target
from qmq.columns.model import QueueKey, QueuePiece, ReaderReport, ReadSelection, SourceBatch
from qmq.columns.servers.connection import ANSWER_S, BlockingConnection
from qmq.columns.servers.metaservers import Located, Metadata, RetryDeadline, patiently
from qmq.errors import (
    CorruptBatch,
    LogDamaged,
    MessagesExpired,
    NotConnected,
    NotMaster,
    Overloaded,
    ProtocolViolation,
    QmqError,
    Unavailable,
    UnknownSubject,
)
from qmq.wire import frame_payloads as wire
from qmq.wire.batch import ENVELOPE_BYTES, Kind, parse_envelope
from qmq.wire.frame import FrameKind

log = logging.getLogger("qmq.columns")

IDLE_MAX: Final = 4
"""Idle connections kept per broker group."""

_R = TypeVar("_R")


class MasterConnections:
    """The masters of the broker groups; with `delayed`, of the delay groups. Not thread-safe."""

    def __init__(
        self, metadata: Metadata, *, delayed: bool = False, answer_s: float = ANSWER_S
    ) -> None:
        self._answer_s = answer_s
        self.retry_ms = metadata.retry_ms
        self._metadata = metadata
        self._is_delayed = delayed
        self._book = RouteTable()
        self._idle: dict[str, list[BlockingConnection]] = {}

    # --- masters ----------------------------------------------------------------------------------

    def locate(self, subject: str, *, create: bool = False, retry_ms: int | None = None) -> Located:
        """Look up a subject at a metaserver and remember the masters. `create` as in
        `Metadata.locate`. Raises UnknownSubject, InvalidName, NotConnected.
        """
        ask = self._book.ask()
        found = self._metadata.locate(
            subject, delayed=self._is_delayed, create=create, retry_ms=retry_ms
        )
        target = delayed_target(subject) if self._is_delayed else subject
        self._book.learn(ask, target, *found.placement)
        return found

    def doubt(self, group: str) -> None:
        """Forget the group's known master, so that the next use asks a metaserver."""
        self._book.doubt(group)
        for each in self._idle.pop(group, []):
            each.close()

    # --- connections ------------------------------------------------------------------------------

    def take(self, subject: str, group: str, *, retry_ms: int | None = None) -> BlockingConnection:
        """Take a connection to the master of a group that has the subject. Return it with `give` or
        `lose`.

        Raises UnknownSubject, and NotConnected after `retry_ms` (default: the metadata's).
        """
        return patiently(
            lambda: self._take(subject, group), self.retry_ms if retry_ms is None else retry_ms
        )

    def _take(self, subject: str, group: str) -> BlockingConnection:
        master = self._book.master(group)
        if master is None:
            self.locate(subject, retry_ms=0)
            master = self._book.master(group)
        if master is None:
            raise NotConnected(f"broker group {group!r} has no master at the moment")
        idle = self._idle.get(group, [])
        while idle:
            channel = idle.pop()
            if channel.is_open and (channel.address, channel.server) == (
                master.address,
                master.server,
            ):
                return channel
            channel.close()
        try:
            return BlockingConnection.connect(master.address, self._answer_s, server=master.server)
        except NotConnected as failure:
            self._book.doubt(group, master)
            raise NotConnected(
                f"the master of broker group {group!r} does not answer: {failure.message}"
            ) from failure

    def give(self, group: str, channel: BlockingConnection) -> None:
        """Return a connection without requests in flight."""
        idle = self._idle.setdefault(group, [])
        if channel.is_open and len(idle) < IDLE_MAX:
            idle.append(channel)
        else:
            channel.close()

    def lose(
        self, group: str, channel: BlockingConnection, failure: QmqError | None = None
    ) -> None:
        """Close a connection that failed or has requests in flight. Depending on the failure, look
        for the master again.
        """
        channel.close()
        if failure is not None and is_about_master(failure):
            self.doubt(group)

    def ask(self, subject: str, group: str, act: Callable[[BlockingConnection], _R]) -> _R:
        """Run an idempotent action on a connection to the group's master until it succeeds.

        Raises what `act` raises, but UnknownSubject only if metaservers do not know the subject
        either; NotConnected after `retry_ms` of retries.
        """
        return patiently(lambda: self._ask_once(subject, group, act), self.retry_ms)

    def _ask_once(self, subject: str, group: str, act: Callable[[BlockingConnection], _R]) -> _R:
        channel = self._take(subject, group)
        try:
            found = act(channel)
        except QmqError as failure:
            self.lose(group, channel, failure)
            if isinstance(failure, UnknownSubject):
                self.locate(subject, retry_ms=0)  # raises it if the subject was deleted
                raise NotConnected(
                    f"broker group {group!r} does not know subject {subject!r} (yet): "
                    f"{failure.message}"
                ) from failure
            raise
        except BaseException:
            channel.close()
            raise
        self.give(group, channel)
        return found

    def call(self, subject: str, group: str, kind: int, *buffers: bytes) -> memoryview:
        """Send an idempotent request and return the answer. Raises what `ask` raises."""
        return self.ask(subject, group, lambda channel: channel.call(kind, *buffers))

    def close(self) -> None:
        """Close idle connections."""
        for group in list(self._idle):
            for each in self._idle.pop(group):
                each.close()


def is_about_master(failure: QmqError) -> bool:
    """Whether the failure suggests that the master has changed."""
    return isinstance(failure, NotMaster | NotConnected) or (
        isinstance(failure, Unavailable) and not isinstance(failure, Overloaded)
    )


def may_pass(failure: QmqError) -> bool:
    """Whether a retry may help."""
    return isinstance(failure, Unavailable | UnknownSubject)


FETCH_BYTES: Final = 2 * limits.MIB
"""The bytes per request: more was not faster, and occupies the broker for longer."""


class ServerPieceReader:
    """Reads one piece. `skips_lost`: skip messages deleted by retention instead
    of raising an error.
    """

    def __init__(
        self,
        masters: MasterConnections,
        piece: QueuePiece,
        selection: ReadSelection,
        *,
        skips_lost: bool,
    ) -> None:
        self._masters = masters
        self._piece = piece
        self._selection = selection
        self._skips_lost = skips_lost
        self._next = piece.first
        """All messages before this sequence were yielded or are not wanted."""
        self._patience = RetryDeadline(masters.retry_ms)

    def read(self) -> Iterator[SourceBatch]:
        """Yields the batches. Raises MessagesExpired, NotConnected, LogDamaged."""
        try:
            yield from self._read()
        except UnknownSubject as failure:
            self._lost(self._next, self._piece.end, "its subject was deleted", failure)

    def _read(self) -> Iterator[SourceBatch]:
        subject, _, group = self._piece.queue
        self._patience.renew()
        while self._next < self._piece.end:
            channel = self._masters.take(subject, group, retry_ms=self._patience.left_ms)
            try:
                yield from self._follow(channel)
            except QmqError as failure:
                self._masters.lose(group, channel, failure)
                if not may_pass(failure):
                    raise
                if isinstance(failure, UnknownSubject):
                    self._masters.locate(subject, retry_ms=self._patience.left_ms)
                self._patience.pause(self._given_up(failure))
            except BaseException:
                channel.close()
                raise
            else:
                self._masters.give(group, channel)

    def _given_up(self, failure: QmqError) -> NotConnected:
        found = NotConnected(
            f"{self._piece.queue} cannot be read from {self._next} on: {failure.message}"
        )
        found.__cause__ = failure
        return found

    def _follow(self, channel: BlockingConnection) -> Iterator[SourceBatch]:
        """Read on one connection until the piece is done; then no request is in flight."""
        end = self._piece.end
        asked, number = self._next, self._ask(channel, self._next)
        while True:
            head = channel.receive_head()
            if head.kind != FrameKind.FETCHED or head.request_id != number:
                raise ProtocolViolation(f"a frame of kind {head.kind} is not an answer to FETCH")
            fetched, start = wire.unpack_fetched(
                channel.receive_payload(min(wire.FETCHED_HEAD_BYTES, head.payload_bytes))
            )
            self._check(fetched, asked)
            following = fetched.next_sequence
            if following < end:
                asked, number = following, self._ask(channel, following)
            payload = channel.receive_payload(head.payload_bytes - start)
            self._patience.renew()
            yield from batches_in(payload, fetched.batches, self._piece.queue)
            self._next = following
            if following >= end:
                return

    def _ask(self, channel: BlockingConnection, sequence: int) -> int:
        return channel.send(
            FrameKind.FETCH, fetch_of(self._piece, self._selection, sequence).pack()
        )

    def _check(self, fetched: wire.Fetched, asked: int) -> None:
        """Check the range of an answer. Raises MessagesExpired, LogDamaged."""
        queue, end = self._piece.queue, self._piece.end
        if fetched.start_sequence > asked:
            self._lost(
                asked,
                min(fetched.start_sequence, end),
                f"the oldest remaining one is {fetched.start_sequence}",
            )
        if fetched.next_sequence <= asked:
            raise LogDamaged(
                f"{queue} ends at {fetched.end_sequence}, though messages up to {end - 1} "
                "were committed there: was its data folder lost?"
            )

    def _lost(self, first: int, end: int, why: str, cause: QmqError | None = None) -> None:
        """Messages were deleted after the task was planned."""
        text = (
            f"messages {first} to {end - 1} of {self._piece.queue} were deleted before they were "
            f"read: {why}"
        )
        if not self._skips_lost:
            raise MessagesExpired(
                f"{text}; keep messages for longer, or continue without these with "
                "failOnDataLoss=false"
            ) from cause
        log.warning("%s; the task continues without them (failOnDataLoss=false)", text)


def fetch_of(piece: QueuePiece, selection: ReadSelection, sequence: int) -> wire.Fetch:
    """The request for a piece from a sequence on. A broker skips by the conditions that fit into
    the request; the reader applies the rest. Pure."""
    queue, lps = piece.queue, [f"{each.first}-{each.end}" for each in piece.lps]
    tags_any, tags_all = list(selection.tags_any), list(selection.tags_all)
    if len(lps) > limits.FETCH_RANGES_MAX:
        lps = []
    if len(tags_any) + len(tags_all) > limits.FETCH_TAGS_MAX:
        tags_any, tags_all = [], []
    return wire.Fetch(
        queue.subject,
        queue.partition,
        sequence,
        piece.end,
        0,
        FETCH_BYTES,
        tags_any,
        tags_all,
        lps,
        int(selection.with_directed),
    )


def numbers_of(
    queue: QueueKey, since_ms: int = 0, report: ReaderReport | None = None
) -> wire.Fetch:
    """The request for a queue's numbers only, from `next_sequence` on; with it, how far a stream is
    on the queue, if it has begun there. Pure.
    """
    asked = wire.Fetch(queue.subject, queue.partition, 0, 0, since_ms, 0, [], [], [], 0)
    if report is None or queue not in report.done:
        return asked
    done, lost = report.done[queue], report.lost.get(queue, 0)
    return replace(asked, reader=report.reader, done=done, lost=lost)


def batches_in(payload: memoryview, count: int, queue: QueueKey) -> Iterator[SourceBatch]:
    """The verified batches of an answer, as views into it. Raises LogDamaged."""
    whole, at = np.frombuffer(payload, np.uint8), 0
    for _ in range(count):
        try:
            envelope = parse_envelope(payload, at)
            begin, end = at + ENVELOPE_BYTES, at + envelope.total_bytes
            # The checksum library accepts an array, but no views of writable memory.
            if (
                end > len(payload)
                or crc32c(whole[begin:end]) != envelope.region_crc
                or envelope.kind != Kind.DATA
            ):
                raise CorruptBatch("its checksum is wrong, or it is not a batch of messages")
        except CorruptBatch as cause:
            raise LogDamaged(f"a batch of {queue} arrived damaged: {cause.message}") from cause
        yield SourceBatch(envelope, payload[begin:end])
        at = end
