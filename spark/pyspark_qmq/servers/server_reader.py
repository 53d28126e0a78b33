"""Reads a piece of a queue request by request, and follows changes of the broker group's master.

Rules:
* The next request is sent as soon as the head of an answer has arrived, which names the next position. While this answer's batches arrive
  and are processed, the broker prepares the next ones.
* After any failure of a connection, reading continues after the last yielded batch, at the current master.
* The retry time counts from the last answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
from google_crc32c import value as crc32c

from pyspark_qmq.servers.blocking_connection import BlockingConnection
from pyspark_qmq.servers.masters import MasterConnections, may_pass
from pyspark_qmq.servers.retry_deadline import RetryDeadline
from pyspark_qmq.source_model import QueueKey, QueuePiece, ReadSelection, SourceBatch
from qmq import limits
from qmq.batch import ENVELOPE_BYTES, Kind, parse_envelope
from qmq.errors import CorruptBatch, LogDamaged, MessagesExpired, NotConnected, ProtocolViolation, QmqError
from qmq.wire import frame_payloads as wire
from qmq.wire.frame import FrameKind

FETCH_BYTES: Final = 2 * limits.MIB
"""The bytes per request: more was not faster, and occupies the broker for longer."""


class ServerPieceReader:
    """Reads one piece. `skips_lost`: skip messages deleted by retention instead of raising an error."""

    def __init__(self, masters: MasterConnections, piece: QueuePiece, selection: ReadSelection, *, skips_lost: bool) -> None:
        self._masters = masters
        self._piece = piece
        self._selection = selection
        self._skips_lost = skips_lost
        self._next = piece.first
        """All messages before this sequence were yielded or are not wanted."""
        self._patience = RetryDeadline(masters.retry_ms)

    def read(self) -> Iterator[SourceBatch]:
        """Yields the batches. Raises MessagesExpired, NotConnected, LogDamaged."""
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
                self._patience.pause(self._given_up(failure))
            except BaseException:
                channel.close()
                raise
            else:
                self._masters.give(group, channel)

    def _given_up(self, failure: QmqError) -> NotConnected:
        found = NotConnected(f"{self._piece.queue} cannot be read from {self._next} on: {failure.message}")
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
            fetched, start = wire.unpack_fetched(channel.receive_payload(min(wire.FETCHED_HEAD_BYTES, head.payload_bytes)))
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
        return channel.send(FrameKind.FETCH, fetch_of(self._piece, self._selection, sequence).pack())

    def _check(self, fetched: wire.Fetched, asked: int) -> None:
        """Check the range of an answer. Raises MessagesExpired, LogDamaged."""
        queue, end = self._piece.queue, self._piece.end
        if fetched.start_sequence > asked and not self._skips_lost:
            raise MessagesExpired(
                f"messages {asked} to {min(fetched.start_sequence, end) - 1} of {queue} were deleted by retention or a purge: the oldest "
                f"remaining one is {fetched.start_sequence}; keep messages for longer, or continue without these with failOnDataLoss=false"
            )
        if fetched.next_sequence <= asked:
            raise LogDamaged(
                f"{queue} ends at {fetched.end_sequence}, though messages up to {end - 1} were committed there: was its data folder lost?"
            )


def fetch_of(piece: QueuePiece, selection: ReadSelection, sequence: int) -> wire.Fetch:
    """The request for a piece from a sequence on. A broker skips by the conditions that fit into the request; the reader applies the rest.
    Pure."""
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


def numbers_of(queue: QueueKey, since_ms: int = 0) -> wire.Fetch:
    """The request for a queue's numbers only, from `next_sequence` on. Pure."""
    return wire.Fetch(queue.subject, queue.partition, 0, 0, since_ms, 0, [], [], [], 0)


def batches_in(payload: memoryview, count: int, queue: QueueKey) -> Iterator[SourceBatch]:
    """The verified batches of an answer, as views into it. Raises LogDamaged."""
    whole, at = np.frombuffer(payload, np.uint8), 0
    for _ in range(count):
        try:
            envelope = parse_envelope(payload, at)
            begin, end = at + ENVELOPE_BYTES, at + envelope.total_bytes
            # The checksum library accepts an array, but no views of writable memory.
            if end > len(payload) or crc32c(whole[begin:end]) != envelope.region_crc or envelope.kind != Kind.DATA:
                raise CorruptBatch("its checksum is wrong, or it is not a batch of messages")
        except CorruptBatch as cause:
            raise LogDamaged(f"a batch of {queue} arrived damaged: {cause.message}") from cause
        yield SourceBatch(envelope, payload[begin:end])
        at = end
