"""A stream that is closed before its connection is made does not outlive its server."""

from __future__ import annotations

import asyncio

from qmq.wire.frame_stream import FrameStream


async def test_a_connection_that_is_made_after_its_end_is_closed_at_once() -> None:
    ended = asyncio.Event()
    streams: list[FrameStream] = []

    def accept() -> FrameStream:
        stream = FrameStream(
            on_frames=lambda _: None,
            on_closed=lambda _: ended.set(),
            on_writable=lambda: None,
            on_violation=lambda _: None,
        )
        streams.append(stream)
        stream.close()  # the server stops while the connection is on its way
        return stream

    server = await asyncio.get_running_loop().create_server(accept, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.sockets[0].getsockname()[1])
    assert await reader.read() == b""
    await ended.wait()
    assert not streams[0].is_open
    writer.close()
    server.close()
