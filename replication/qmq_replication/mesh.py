"""Connections between the replicas of a group: one outgoing connection to each peer, for what we say; what it says comes over its own.

Thin, and forgetful on purpose: a message to a peer that cannot be reached is dropped, since the core minds no loss. What leaves during one
round of the event loop leaves in one write.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from qmq.errors import InvalidArgument, ProtocolViolation
from qmq.network import NETWORK, Network
from qmq.wire import frame as frames
from qmq.wire.frame import Frame, FrameKind
from qmq.wire.stream import FrameStream
from qmq_replication.wire import PeerHello

log = logging.getLogger("qmq.replication")

RETRY_S: Final = 0.1
CONNECT_S: Final = 2.0


class Link:
    """The way to one peer."""

    def __init__(self, name: str, address: str, hello: PeerHello, on_lost: Callable[[str], None], network: Network = NETWORK) -> None:
        self.name = name
        self.address = address
        self._network = network
        self._hello = hello
        self._on_lost = on_lost
        self._stream: FrameStream | None = None
        self._is_closed = False
        self._task = asyncio.get_running_loop().create_task(self._stay_connected())
        self._ended = asyncio.Event()

    @property
    def is_open(self) -> bool:
        """Whether what is sent has a way."""
        return self._stream is not None and self._stream.is_open

    async def _stay_connected(self) -> None:
        while not self._is_closed:
            with suppress(OSError, TimeoutError, InvalidArgument):
                await self._connect()
                await self._ended.wait()
                self._on_lost(self.name)
            await asyncio.sleep(RETRY_S)

    async def _connect(self) -> None:
        self._ended.clear()
        stream = FrameStream(
            on_frames=self._on_frames, on_closed=self._closed, on_writable=lambda: None, on_violation=self._violated
        )
        async with asyncio.timeout(CONNECT_S):
            await self._network.connect(self.address, lambda: stream)
        stream.put(frames.frame(FrameKind.REPLICA_HELLO, 0, self._hello.pack()))
        stream.flush()
        self._stream = stream

    def _on_frames(self, received: list[Frame]) -> None:
        log.warning("replica %s at %s answers where it should listen: %d frames", self.name, self.address, len(received))

    def _violated(self, violation: ProtocolViolation) -> None:
        log.warning("replica %s at %s: %s", self.name, self.address, violation)

    def _closed(self, _: Exception | None) -> None:
        self._stream = None
        self._ended.set()

    def put(self, pieces: list[bytes]) -> bool:
        """Queue a frame; False if there is no way."""
        if self._stream is None or not self._stream.is_open:
            return False
        self._stream.put(frames.header(FrameKind.REPLICA, 0, sum(map(len, pieces))), *pieces)
        return True

    def flush(self) -> None:
        """Write what was queued."""
        if self._stream is not None:
            self._stream.flush()

    async def close(self) -> None:
        """End it."""
        self._is_closed = True
        self._task.cancel()
        if self._stream is not None:
            self._stream.close()
        with suppress(asyncio.CancelledError):
            await self._task


class Mesh:
    """All links of this replica."""

    def __init__(self, hello: PeerHello, on_lost: Callable[[str], None], network: Network = NETWORK) -> None:
        self._hello = hello
        self._on_lost = on_lost
        self._network = network
        self._links: dict[str, Link] = {}
        self._full: dict[str, Link] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()

    def update(self, addresses: dict[str, str]) -> None:
        """These are the peers, by data address."""
        for name in [each for each, link in self._links.items() if addresses.get(each) != link.address]:
            task = self._loop.create_task(self._links.pop(name).close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        for name, address in addresses.items():
            if name not in self._links:
                self._links[name] = Link(name, address, self._hello, self._on_lost, self._network)

    def send(self, to: str, pieces: list[bytes]) -> None:
        """Send, or drop if there is no way."""
        link = self._links.get(to)
        if link is not None and link.put(pieces):
            if not self._full:
                self._loop.call_soon(self.flush)
            self._full[to] = link

    def flush(self) -> None:
        """Let everything queued go."""
        full, self._full = self._full, {}
        for link in full.values():
            link.flush()

    async def close(self) -> None:
        """End all links."""
        links, self._links = self._links, {}
        for link in links.values():
            await link.close()
        for task in list(self._closing):
            await task
