"""Counts the bytes of gRPC messages that are not whole yet, from the frames of one HTTP/2 connection. Without sockets.

gRPC holds a message until it is whole, up to 16 MiB for each of a connection's calls, and does not tell. Who passes on the bytes of a
connection sees the frames, and so the messages:

    frame     length 3 | kind 1 | flags 1 | call 4 | payload      DATA (kind 0) has bytes of a call's messages
    message   compressed 1 | length 4 | body                      in one frame, or in several beside frames of other calls

    DATA of call 1, 40 bytes: 00 00000064 and 35 of 100 bytes     40 bytes are unfinished
    DATA of call 1, 65 bytes                                      the message is whole: 0 bytes

A message that is not whole when its first bytes arrive is a stranger (`qmq.rpc.strangers`) until it is whole, or until its call or
connection ends. Bytes for a call that the server has ended are of no message: gRPC drops them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from qmq.rpc.strangers import Strangers

PREFACE_BYTES: Final = 24
"""What a client sends before its first frame."""
_FRAME_HEAD_BYTES: Final = 9
_MESSAGE_HEAD_BYTES: Final = 5
_DATA, _HEADERS, _RESET = 0, 1, 3
_END: Final = 0x1
_PADDED: Final = 0x8


class UnfinishedMessages:
    """The unfinished messages of a connection from `address`, in the budget `strangers`. `end` ends the connection if the budget is used
    up, or a message's time is over.
    """

    def __init__(self, strangers: Strangers, address: str, end: Callable[[], None]) -> None:
        self._strangers, self._address, self._end = strangers, address, end
        self._from_client = _Frames(PREFACE_BYTES, self._begin, self._take, self._end_call)
        self._from_server = _Frames(0, lambda _call: None, lambda _call, _data: None, self._end_call)
        self._calls: dict[int, _Message | None] = {}
        """The unfinished message of each call from which more may come."""
        self.is_over = False

    def sent(self, data: bytes) -> None:
        """The client has sent these bytes."""
        self._from_client.feed(data)

    def answered(self, data: bytes) -> None:
        """The server has sent these bytes, which may end calls."""
        self._from_server.feed(data)

    def over(self) -> None:
        """The connection has ended."""
        self.is_over = True
        while self._calls:
            self._end_call(next(iter(self._calls)))

    def _cut(self) -> None:
        self.over()
        self._end()

    def _begin(self, call: int) -> None:
        if not self.is_over:
            self._calls.setdefault(call, None)

    def _take(self, call: int, data: bytes) -> None:
        if call not in self._calls:
            return
        place, message = 0, self._calls[call]
        if message is not None:
            place = message.take(data, 0)
            if not message.is_whole:
                self._strangers.received((self, call), place)
                return
            self._calls[call] = None
            self._strangers.left((self, call))
        place = _after_whole(data, place)
        if place < len(data):
            message = self._calls[call] = _Message()
            message.take(data, place)
            self._strangers.came((self, call), self._address, self._cut)
            self._strangers.received((self, call), len(data) - place)

    def _end_call(self, call: int) -> None:
        if self._calls.pop(call, None) is not None:
            self._strangers.left((self, call))


def _after_whole(data: bytes, place: int) -> int:
    """Where the message begins that is not whole, after the whole ones from `place` on; the end of the data if there is none."""
    while (begun := place + _MESSAGE_HEAD_BYTES) <= len(data):
        end = begun + int.from_bytes(data[place + 1 : begun], "big")
        if end > len(data):
            break
        place = end
    return place


class _Message:
    """How much of a message is there."""

    def __init__(self) -> None:
        self._head = b""
        self._missing = 0

    @property
    def is_whole(self) -> bool:
        return len(self._head) == _MESSAGE_HEAD_BYTES and not self._missing

    def take(self, data: bytes, place: int) -> int:
        """Take this message's bytes, which begin at `place`, and return where they end."""
        if len(self._head) < _MESSAGE_HEAD_BYTES:
            more = data[place : place + _MESSAGE_HEAD_BYTES - len(self._head)]
            self._head += more
            place += len(more)
            if len(self._head) < _MESSAGE_HEAD_BYTES:
                return place
            self._missing = int.from_bytes(self._head[1:], "big")
        taken = min(self._missing, len(data) - place)
        self._missing -= taken
        return place + taken


class _Frames:
    """Finds the frames of one direction, which come in pieces. `begin` gets each call that begins, `take` the bytes of its messages, and
    `end` each call that ends.
    """

    def __init__(self, skipped: int, begin: Callable[[int], None], take: Callable[[int, bytes], None], end: Callable[[int], None]) -> None:
        self._begin, self._take, self._end = begin, take, end
        self._skipped = skipped
        """Bytes to come that are of no message: of another kind of frame, or padding."""
        self._head = b""
        self._pads = self._data = 0
        """Bytes to come: of the length of the padding, 0 or 1; of messages and padding."""
        self._padding = 0
        self._call, self._is_last = 0, False

    def feed(self, data: bytes) -> None:
        place = 0
        while place < len(data):
            place = self._fed(data, place)

    def _fed(self, data: bytes, place: int) -> int:
        if self._skipped:
            end = min(place + self._skipped, len(data))
            self._skipped -= end - place
            return end
        if self._data:
            return self._of_data(data, place)
        more = data[place : place + _FRAME_HEAD_BYTES - len(self._head)]
        self._head += more
        if len(self._head) == _FRAME_HEAD_BYTES:
            head, self._head = self._head, b""
            self._read(head)
        return place + len(more)

    def _read(self, head: bytes) -> None:
        size, kind, flags = int.from_bytes(head[:3], "big"), head[3], head[4]
        self._call = int.from_bytes(head[5:], "big") & 0x7FFFFFFF
        is_last = kind == _RESET or (kind in (_DATA, _HEADERS) and bool(flags & _END))
        if kind == _DATA and size:
            self._data, self._pads, self._is_last = size, int(bool(flags & _PADDED)), is_last
            return
        self._skipped = size
        if is_last:
            self._end(self._call)
        elif kind == _HEADERS:
            self._begin(self._call)

    def _of_data(self, data: bytes, place: int) -> int:
        if self._pads:
            self._pads, self._padding = 0, data[place]
            self._data -= 1
            end = place + 1
        else:
            end = min(place + self._data - self._padding, len(data))
            self._data -= end - place
            self._take(self._call, data[place:end])
        if self._data <= self._padding:
            self._skipped, self._data, self._padding = self._data, 0, 0
            if self._is_last:
                self._end(self._call)
        return end
