"""The name that a client gives itself in HELLO: people and other programs see it, so a broker takes
printable text of a bounded length.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support import hostile, node_config, running

import qmq
from qmq.limits import NAME_CHARS_MAX
from qmq.node.dev_node import Node
from qmq.wire import frame_payloads as wire
from qmq.wire.frame import FrameKind, frame

REFUSED = (
    *hostile.CONTROLS[:4],
    "\x00",
    "a\nb",
    "a\u2028b",
    "\u202e",
    "\x7f",
    "\ud800",
    "x" * (NAME_CHARS_MAX + 1),
)
SHOWN = (*[each for each in hostile.MARKUP if len(each) <= NAME_CHARS_MAX], "é 日本 [red]", "")


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with running(node_config(tmp_path)) as found:
        yield found


async def answer_to(node: Node, name: str) -> bytes:
    """What the broker answers to a HELLO with this name."""
    host, _, port = node.data_address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        async with asyncio.timeout(60):
            writer.write(frame(FrameKind.HELLO, 1, wire.Hello(wire.PROTOCOL_VERSION, name).pack()))
            return await reader.readexactly(
                int.from_bytes(await reader.readexactly(4), "little") - 4
            )
    finally:
        writer.close()


async def test_a_name_with_controls_or_too_long_is_refused_and_reaches_no_log_raw(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        for name in REFUSED:
            assert b"printable" in (said := await answer_to(node, name)) or b"surrogate" in said, (
                ascii(name[:40])
            )
            assert len(said) < 2_000
    for line in caplog.messages:
        assert line.isprintable(), ascii(line)
        assert len(line) < 4_000


async def test_a_printable_name_is_welcome_and_is_shown_as_it_is(node: Node) -> None:
    for name in SHOWN:
        assert b"inflight_bytes_max" in await answer_to(node, name), name


@pytest.mark.parametrize("host", ["büro", "x²", "日本", "-host", "", "a b\x1b[31m", "h" * 300])
async def test_a_client_on_a_host_of_any_name_consumes(
    node: Node, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: host)
    async with qmq.connect(node.address, state_dir=False) as mq, asyncio.timeout(60):
        await mq.send("s", b"1")
        async with mq.consumer("s", "g") as consumer:
            assert (await anext(consumer)).body == b"1"
