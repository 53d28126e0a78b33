"""Bounds the memory of partial frames over all connections of a server. Pure.

One frame is bounded by its kind, and its buffer grows as its bytes arrive. Still, a thousand
connections that each send a large frame without its end would hold 16 GiB. There is therefore one
budget for all connections: when it is exceeded, the server closes the connection whose partial
frame got no new byte for the longest time. A slow but steady upload continues while others are
idle.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable


class PartialFrames:
    """`on_exceeded` is called with the reader whose connection must end; its memory counts as free
    from then on.
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
