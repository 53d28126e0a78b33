"""The asyncio protocol around the frame codec, for both ends of a connection.

Frames go to `on_frames` as they arrive, with borrowed payloads. Bytes that are put are kept until
`flush`, so that those of one round of the event loop are sent in one write, or in a few if they are
many.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Final, cast

from qmq import limits
from qmq.errors import ProtocolViolation
from qmq.wire import reachable
from qmq.wire.frame import Frame, FrameReader, PartialFrames, SharedBuffer

SOCKET_BYTES: Final = 2 * limits.MIB
WRITE_HIGH_BYTES: Final = 4 * limits.MIB
JOINED_BYTES_MAX: Final = 16 * limits.KIB
"""So few bytes are copied into one piece: the event loop then needs less time for them than for a
list of pieces.
"""


class FrameStream(asyncio.BufferedProtocol):
    """Frames over one TCP connection.

    `on_frames(frames)` is called with the frames that arrived. If it, or the codec, raises
    ProtocolViolation, `on_violation` gets the error and the connection is closed. `on_closed` is
    called once. `on_writable` is called when a full write buffer has drained.
    """

    def __init__(
        self,
        *,
        on_frames: Callable[[list[Frame]], None],
        on_closed: Callable[[Exception | None], None],
        on_writable: Callable[[], None],
        on_violation: Callable[[ProtocolViolation], None],
        frame_bytes_max: int = limits.FRAME_BYTES_MAX,
        shared: SharedBuffer | None = None,
        partial: PartialFrames | None = None,
        on_made: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_made = on_made
        self.reader = FrameReader(frame_bytes_max, shared=shared, partial=partial)
        # asyncio calls the reader itself: one call fewer for each read.
        self.get_buffer = self.reader.get_buffer  # type: ignore[assignment, method-assign]
        self.is_writable = True
        self.is_held = False
        """Whether our side has stopped reading."""
        self.refusal = b""
        """If set before the connection is made, the stream sends only these bytes, and closes."""
        self.transport: asyncio.Transport | None = None
        self.received_bytes = 0
        self._sent_bytes = 0
        self._is_unwanted = False
        self._on_frames = on_frames
        self._on_closed = on_closed
        self._on_writable = on_writable
        self._on_violation = on_violation
        self._outbox: list[bytes] = []

    # --- asyncio's side ---------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        tune_socket(transport.get_extra_info("socket"))
        self.transport.set_write_buffer_limits(WRITE_HIGH_BYTES, WRITE_HIGH_BYTES // 4)
        if self.refusal:
            self.put(self.refusal)
            self.close()
        elif self._is_unwanted:
            self.close()
        else:
            self._on_made()

    def buffer_updated(self, nbytes: int) -> None:
        self.received_bytes += nbytes
        try:
            frames = self.reader.received(nbytes)
            if frames:
                self._on_frames(frames)
        except ProtocolViolation as violation:
            self._on_violation(violation)
            self.close()

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        self.is_writable = False

    def resume_writing(self) -> None:
        self.is_writable = True
        self._on_writable()

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self.is_writable = False
        self._outbox.clear()
        self.reader.release()
        self._on_closed(exc)

    # --- our side ---------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """True while the connection is open."""
        return self.transport is not None and not self.transport.is_closing()

    @property
    def socket(self) -> socket.socket | None:
        """The connection's socket, while it is open."""
        return None if self.transport is None else self.transport.get_extra_info("socket")

    @property
    def silent_ms(self) -> int:
        return reachable.silent_ms(self.socket)

    @property
    def is_reading(self) -> bool:
        """True while the stream reads what the peer sends."""
        return self.is_open and self.transport is not None and self.transport.is_reading()

    @property
    def unsent_bytes(self) -> int:
        """Bytes that the operating system has not taken yet, because the peer does not read."""
        return self.transport.get_write_buffer_size() if self.transport is not None else 0

    @property
    def taken_bytes(self) -> int:
        """Bytes that the operating system has taken."""
        return self._sent_bytes - self.unsent_bytes

    @property
    def acknowledged_bytes(self) -> int:
        """Bytes that the peer's operating system has acknowledged; 0 if that is unknown."""
        return reachable.acknowledged_bytes(self.socket)

    def put(self, *buffers: bytes) -> bool:
        """Keep bytes for the next `flush`. Returns True if they are the first: the caller then
        schedules a flush.
        """
        is_first = not self._outbox
        self._outbox += buffers
        return is_first

    def flush(self) -> None:
        """Write all kept bytes immediately."""
        outbox, self._outbox = self._outbox, []
        transport = self.transport
        if outbox and transport is not None and not transport.is_closing():
            if len(outbox) == 1:
                size = len(outbox[0])
                transport.write(outbox[0])
            elif (size := sum(map(len, outbox))) <= JOINED_BYTES_MAX:
                transport.write(b"".join(outbox))
            else:
                transport.writelines(outbox)
            self._sent_bytes += size

    def close(self) -> None:
        """Write the kept bytes, then close. A connection that is still being made is closed as soon
        as it is open.
        """
        self.flush()
        self._is_unwanted = True
        if self.transport is not None:
            self.transport.close()

    def abort(self) -> None:
        """Close immediately, and drop bytes that the peer has not read."""
        self._is_unwanted = True
        if self.transport is not None:
            self.transport.abort()

    def shut_down(self) -> None:
        """Tell the peer that the connection ends, without the event loop, which has ended."""
        # uvloop closes its connections when it ends; its sockets refuse this call
        with suppress(OSError, TypeError):
            if (found := self.socket) is not None:
                found.shutdown(socket.SHUT_RDWR)

    def pause_reading(self) -> None:
        """Stop reading: the peer's bytes wait in the kernel, and then at the peer."""
        if self.is_open and self.transport is not None and self.transport.is_reading():
            self.transport.pause_reading()
            self.is_held = True

    def resume_reading(self) -> None:
        self.is_held = False
        if self.is_open and self.transport is not None and not self.transport.is_reading():
            self.transport.resume_reading()


def tune_socket(found: socket.socket | None) -> None:
    """Set TCP_NODELAY for small frames, and large buffers for large ones."""
    if found is None or found.family not in (socket.AF_INET, socket.AF_INET6):
        return
    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        found.setsockopt(socket.SOL_SOCKET, option, SOCKET_BYTES)
