"""Frames: 16 bytes of header, then a payload. This file cuts a byte stream into frames.

    length u32 | kind u8 | flags u8 | reserved u16 | request_id u32 | deadline_ms u32 | payload

`length` counts the whole frame. `request_id` pairs an answer with its request; answers may come in
any order. `deadline_ms` is how long the sender will wait for the answer, counted from the frame's
arrival, 0 for no limit.

Rules:
* The length is checked against the limit before anything is allocated for it. An HTTP request ("GET
  " is 542,393,671) and a TLS hello (0x010316..., little endian) are refused by their first four
  bytes.
* Requests without content have a small limit, independent of the connection's limit.
* Bytes are received into one reused buffer, and a frame's payload is *borrowed*: valid until the
  next `get_buffer`. A receiver that keeps a part copies that part, once. Many readers may share the
  buffer: then the payload is valid until the event loop continues. A reader holds only the
  beginning of an incomplete frame: a copy of it if it is short, otherwise the buffer itself, and
  the others get another one.
* While a large part of a frame is missing, only that part is received: what follows would have to
  be moved.
* A frame that does not fit the reused buffer makes an own buffer grow, up to `OWN_BYTES_MAX`.
  Otherwise it is received into a separate buffer, which grows as the bytes arrive: a peer that
  announces much and sends little costs little memory.
* One frame is bounded by its kind. Still, a thousand connections that each send a large frame
  without its end would hold 16 GiB. There is therefore one budget for all connections of a server
  (`PartialFrames`): when it is exceeded, the server closes the connection whose partial frame got
  no new byte for the longest time. A slow but steady upload continues while others are idle.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from enum import IntEnum
from struct import Struct
from typing import Final, NamedTuple

from qmq import limits
from qmq.errors import ProtocolViolation

HEADER: Final = Struct("<IBBHII")
HEADER_BYTES: Final = HEADER.size
BUFFER_BYTES: Final = 320 * limits.KIB
"""A full batch of a producer (256 KiB of bodies) fits, with its columns and headers."""
OWN_BYTES_MAX: Final = 8 * BUFFER_BYTES
"""How far a buffer grows that only one reader uses: a pull of a MiB fits, with the batch that
exceeds it.
"""
_SPARES_MAX: Final = 4


class FrameKind(IntEnum):
    """The kind of a frame."""

    HELLO = 1
    WELCOME = 2
    PRODUCE = 3
    PRODUCED = 4
    ATTACH = 5
    ATTACHED = 6
    PULL = 7
    MESSAGES = 8
    SETTLE = 9
    HEARTBEAT = 10
    DETACH = 11
    FETCH = 12
    FETCHED = 13
    OK = 14
    ERROR = 15
    SETTLED = 16
    PRODUCE_FAST = 17
    """PRODUCE with `acks=master`: answered when the master has written the batch. A failure of the
    master may lose it.
    """
    REPLICA_HELLO = 18
    """First frame between replicas of a group."""
    REPLICA = 19
    """Messages between replicas (qmq_replication/wire.py)."""
    LANE_ATTACH = 20
    LANE_ATTACHED = 21
    LANE_PULL = 22
    LANE_MESSAGES = 23
    LANE_SETTLE = 24
    """Answered by SETTLED. HEARTBEAT and DETACH also keep and end lane sessions."""
    FIND = 25
    FOUND = 26
    BEGUN = 27
    """A consumer begins to process messages that failed before. Not answered."""
    PRODUCE_FLUSHED = 28
    """PRODUCE with `acks=flushed`: answered when a majority has flushed the batch, which then
    survives any power cut.
    """
    REAUTH = 29
    """A newer token for this connection (docs/ACCESS.md). Answered by OK."""


_KIND_MAX: Final = max(FrameKind)
_NOTHING: Final = memoryview(b"")
_LARGE_FIRST_BYTES: Final = 64 * limits.KIB

_ASKING: Final = frozenset(
    {
        FrameKind.HELLO,
        FrameKind.ATTACH,
        FrameKind.PULL,
        FrameKind.HEARTBEAT,
        FrameKind.DETACH,
        FrameKind.FETCH,
        FrameKind.REPLICA_HELLO,
        FrameKind.LANE_ATTACH,
        FrameKind.LANE_PULL,
        FrameKind.FIND,
        FrameKind.BEGUN,
        FrameKind.REAUTH,
    }
)
"""Frames of these kinds have at most `limits.ASKING_BYTES_MAX` bytes."""


class Frame(NamedTuple):
    """One frame. `payload` is borrowed from the reader's buffer until the next `get_buffer`."""

    kind: int
    request_id: int
    deadline_ms: int
    payload: memoryview


def header(kind: int, request_id: int, payload_bytes: int, deadline_ms: int = 0) -> bytes:
    """The 16 bytes before a payload."""
    return HEADER.pack(HEADER_BYTES + payload_bytes, kind, 0, 0, request_id, deadline_ms)


def frame(kind: int, request_id: int, payload: bytes = b"", deadline_ms: int = 0) -> bytes:
    """A whole frame as one piece."""
    return HEADER.pack(HEADER_BYTES + len(payload), kind, 0, 0, request_id, deadline_ms) + payload


class SharedBuffer:
    """The buffer into which the readers of many connections receive, one after another."""

    __slots__ = ("_spares", "view")

    def __init__(self, buffer_bytes: int = BUFFER_BYTES) -> None:
        self.view = memoryview(bytearray(buffer_bytes))
        self._spares: list[memoryview] = []

    def take(self) -> None:
        """The reader that received last keeps the buffer; the others get another one."""
        self.view = self._spares.pop() if self._spares else memoryview(bytearray(len(self.view)))

    def put_back(self, view: memoryview) -> None:
        """Return a buffer that was taken."""
        if len(self._spares) < _SPARES_MAX:
            self._spares.append(view)


class PartialFrames:
    """Bounds the memory of partial frames over all connections of a server. `on_exceeded` is called
    with the reader whose connection must end; its memory counts as free from then on.
    """

    def __init__(self, bytes_max: int, on_exceeded: Callable[[Hashable], None]) -> None:
        self._bytes_max = bytes_max
        self._on_exceeded = on_exceeded
        self._held: dict[Hashable, int] = {}
        """The bytes of each reader's partial frame. The reader that received last comes last."""
        self.bytes = 0

    def received(self, reader: Hashable, held_bytes: int) -> None:
        """Record the memory that a reader's partial frame takes now."""
        self.bytes += held_bytes - self._held.pop(reader, 0)
        self._held[reader] = held_bytes
        while self.bytes > self._bytes_max:
            stalled = next(iter(self._held))
            self.ended(stalled)
            self._on_exceeded(stalled)

    def ended(self, reader: Hashable) -> None:
        """Forget the reader's frame: it is complete, or the connection has ended."""
        self.bytes -= self._held.pop(reader, 0)


class FrameReader:
    """Cuts a byte stream into frames: fill `get_buffer()`, then call `received(n)`.

    `frame_bytes_max` may be raised once the peer is identified. `shared` is a buffer that other
    readers receive into as well, each between its `get_buffer` and its `received`. `partial` counts
    the memory of large frames before they are complete.
    """

    __slots__ = (
        "_end",
        "_grown_bytes",
        "_has_taken",
        "_incomplete_bytes",
        "_large",
        "_large_bytes",
        "_large_end",
        "_partial",
        "_rest",
        "_shared",
        "_start",
        "_view",
        "frame_bytes_max",
    )

    def __init__(
        self,
        frame_bytes_max: int = limits.FRAME_BYTES_MAX,
        buffer_bytes: int = BUFFER_BYTES,
        shared: SharedBuffer | None = None,
        partial: PartialFrames | None = None,
    ) -> None:
        self._partial = partial
        self.frame_bytes_max = frame_bytes_max
        self._shared = shared
        self._has_taken = False
        """True while the shared buffer is kept, with the beginning of a frame."""
        self._rest = b""
        self._view = memoryview(bytearray(buffer_bytes)) if shared is None else _NOTHING
        self._start = 0
        self._end = 0
        self._incomplete_bytes = 0
        """The length of the incomplete frame, if only the rest of it is to be received now;
        otherwise 0.
        """
        self._grown_bytes = 0
        self._large: bytearray | None = None
        self._large_bytes = 0
        self._large_end = 0

    def get_buffer(self, _sizehint: int = -1) -> memoryview:
        """The place for the next bytes; never empty.
        Payloads that were returned before become invalid.
        """
        if self._large is not None:
            return self._rest_of_large(self._large)
        if self._grown_bytes:
            self._grow()
        elif self._shared is not None and not self._has_taken:
            self._view = self._shared.view
            self._end = len(self._rest)
            self._view[: self._end] = self._rest
        length = self._incomplete_bytes
        if self._start and (not length or self._start + length > len(self._view)):
            rest = self._end - self._start
            self._view[:rest] = self._view[self._start : self._end]
            self._start, self._end = 0, rest
        return self._view[self._end : self._start + length if length else None]

    def received(self, count: int) -> list[Frame]:
        """The frames that are complete after `count` more bytes in the buffer.
        Raises ProtocolViolation.
        """
        if self._large is not None:
            return self._received_large(count)
        self._end += count
        self._rest = b""
        frames: list[Frame] = []
        start, end, view = self._start, self._end, self._view
        length = self._incomplete_bytes = 0
        while end - start >= HEADER_BYTES:
            length, kind, flags, _, request_id, deadline_ms = HEADER.unpack_from(view, start)
            if (
                not HEADER_BYTES <= length <= self.frame_bytes_max
                or flags
                or not 0 < kind <= _KIND_MAX
            ):
                self._refuse(length, kind, flags)
            if length > limits.ASKING_BYTES_MAX and kind in _ASKING:
                raise ProtocolViolation(
                    f"a frame of kind {kind} has at most {limits.ASKING_BYTES_MAX} bytes, "
                    f"not {length}"
                )
            if start + length > end:
                break
            payload = view[start + HEADER_BYTES : start + length]
            # a named tuple's own `__new__` is one more call
            frames.append(tuple.__new__(Frame, (kind, request_id, deadline_ms, payload)))
            start += length
            length = 0
        if start == end and not self._has_taken:
            self._start = self._end = 0
            if self._shared is not None:
                self._view = _NOTHING
        else:
            self._start = start
            self._keep_rest(length)
        return frames

    def _keep_rest(self, length: int) -> None:
        """Keep the beginning of a frame, which has `length` bytes (0: unknown), if there is one."""
        rest, size = self._end - self._start, len(self._view)
        few = size // 5
        if length > size:
            if self._shared is None and length <= OWN_BYTES_MAX:
                self._grown_bytes = size
                while self._grown_bytes < length:
                    self._grown_bytes *= 2
                return
            self._large = bytearray(self._view[self._start : self._end])
            self._large_bytes, self._large_end = length, rest
            rest = 0
        elif max(rest, length - rest) >= few:
            self._incomplete_bytes = length
        if rest >= few and self._shared is not None:
            if not self._has_taken:
                self._has_taken = True
                self._shared.take()
            if self._partial is not None:
                self._partial.received(self, size)
        elif not rest or self._shared is not None:
            self._rest = bytes(self._view[self._start : self._end]) if rest else b""
            self._start = self._end = 0
            self._leave_shared()

    def _leave_shared(self) -> None:
        """The reader needs no buffer until it receives again."""
        if self._shared is None:
            return
        if self._has_taken:
            self._has_taken = False
            self._shared.put_back(self._view)
            if self._partial is not None:
                self._partial.ended(self)
        self._view = _NOTHING

    @property
    def awaits_rest(self) -> bool:
        """True if a part of a frame has arrived."""
        return self._large is not None or bool(self._rest) or self._end > self._start

    def grow(self, buffer_bytes: int) -> None:
        """Use a larger buffer from the next `get_buffer` on, and stop counting partial frames: for
        a trusted peer with large frames.
        """
        self._grown_bytes = max(buffer_bytes, len(self._view))

    def _grow(self) -> None:
        rest = self._rest or self._view[self._start : self._end]
        view = memoryview(bytearray(self._grown_bytes))
        view[: len(rest)] = rest
        self._start, self._end, self._incomplete_bytes, self._grown_bytes = 0, len(rest), 0, 0
        self._leave_shared()
        self._shared, self._rest, self._partial = None, b"", None
        self._view = view

    def release(self) -> None:
        """Free the buffers at the end of the stream, before the connection is garbage-collected."""
        self._leave_shared()
        self._view, self._large, self._rest = _NOTHING, None, b""
        self._start = self._end = self._incomplete_bytes = 0
        if self._partial is not None:
            self._partial.ended(self)

    def _refuse(self, length: int, kind: int, flags: int) -> None:
        raise ProtocolViolation(
            f"not a frame: length {length} (16 to {self.frame_bytes_max}), kind {kind}, "
            f"flags {flags}; is this the data port of a QMQ broker, and the peer a QMQ client?"
        )

    def _rest_of_large(self, large: bytearray) -> memoryview:
        """Room for at least one byte. The buffer doubles,
        so that growth copies each byte about once.
        """
        if self._large_end == len(large):
            room = min(
                max(self._large_end, _LARGE_FIRST_BYTES), self._large_bytes - self._large_end
            )
            large = self._large = bytearray().join(
                (large, bytes(room))
            )  # not in place: the event loop may hold the former view
        return memoryview(large)[self._large_end :]

    def _received_large(self, count: int) -> list[Frame]:
        assert self._large is not None
        self._large_end += count
        if self._large_end < self._large_bytes:
            if self._partial is not None:
                self._partial.received(self, len(self._large))
            return []
        if self._partial is not None:
            self._partial.ended(self)
        whole, self._large = memoryview(self._large), None
        _, kind, _, _, request_id, deadline_ms = HEADER.unpack_from(whole)
        return [Frame(kind, request_id, deadline_ms, whole[HEADER_BYTES:])]
