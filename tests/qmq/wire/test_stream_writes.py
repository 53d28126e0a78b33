"""A stream writes everything that was put in one piece if that is small, and large pieces as they
are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from qmq.wire.frame_stream import JOINED_BYTES_MAX, FrameStream


class Writes(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[object] = []
        self.lists: list[list[object]] = []

    def write(self, data: object) -> None:
        self.pieces.append(data)

    def writelines(self, list_of_data: Iterable[object]) -> None:
        self.lists.append(list(list_of_data))

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return False


def opened() -> tuple[FrameStream, Writes]:
    stream = FrameStream(
        on_frames=lambda _: None,
        on_closed=lambda _: None,
        on_writable=lambda: None,
        on_violation=lambda _: None,
    )
    transport = Writes()
    stream.connection_made(transport)
    return stream, transport


def test_small_pieces_leave_as_one() -> None:
    stream, transport = opened()
    assert stream.put(b"head", b"body")
    assert not stream.put(b"next")
    stream.flush()
    stream.flush()
    assert (transport.pieces, transport.lists, stream.taken_bytes) == ([b"headbodynext"], [], 12)


def test_large_pieces_are_not_copied() -> None:
    stream, transport = opened()
    large = bytes(JOINED_BYTES_MAX)
    stream.put(b"head", large)
    stream.flush()
    stream.put(large)
    stream.flush()
    assert transport.lists == [[b"head", large]]
    assert [each is large for each in transport.pieces] == [True]
