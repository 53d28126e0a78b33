"""Malformed handshakes authenticate no client and store nothing, and the broker continues.

Frames are fed to connections of a running broker that have no socket, so that a million of them
take a minute or two. `scripts/test --all` sends a million; any other number:

    QMQ_FUZZ=50000 scripts/test tests/qmq/security/test_handshake_fuzz.py
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import ssl
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from access_support import Papers, guarded, secured
from qmq_replication.links import PeerHello
from support import forms

import qmq
from qmq.broker.connection.access import Throttle
from qmq.broker.connection.server import DataConnection, SharedByConnections
from qmq.security.principal import ANONYMOUS
from qmq.wire import frame_payloads as wire
from qmq.wire.frame import HEADER, FrameKind, frame

COUNT = int(os.environ.get("QMQ_FUZZ", {"gate": 3_000, "all": 1_000_000}.get(forms.FORM, 20_000)))
TOKEN = "qmq_" + "0" * 12 + "_" + "A" * 43
TEXTS: tuple[Any, ...] = (
    "",
    "a",
    TOKEN,
    TOKEN[:-1],
    "qmqs_" + "A" * 43,
    "a.b.c",
    "\0",
    "é",
    "\ud800",
    "x" * 9_000,
    None,
    7,
    [],
    {},
    True,
)


class Absent(asyncio.Transport):
    """A transport without a peer."""

    def __init__(self) -> None:
        super().__init__({"peername": ("192.0.2.7", 7)})
        self.is_over = False
        self.sent = bytearray()

    def is_closing(self) -> bool:
        return self.is_over

    def is_reading(self) -> bool:
        return True

    def pause_reading(self) -> None:
        return

    def resume_reading(self) -> None:
        return

    def close(self) -> None:
        self.is_over = True

    abort = close

    def write(self, data: Any) -> None:
        self.sent += data

    def writelines(self, list_of_data: Any) -> None:
        for each in list_of_data:
            self.write(each)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        return

    def get_write_buffer_size(self) -> int:
        return 0


def opening(chance: random.Random) -> bytes:
    """The first bytes that a peer might send."""
    choose = chance.choice
    hello = {
        "version": choose((1, 1, 1, 0, 2, -1, "1", None)),
        "client": choose(("c", "c", *TEXTS)),
        "token": choose(TEXTS),
    }
    kind = choose(
        (FrameKind.HELLO,) * 4
        + (
            FrameKind.REPLICA_HELLO,
            FrameKind.REAUTH,
            FrameKind.PRODUCE,
            FrameKind.ATTACH,
            FrameKind.REPLICA,
        )
    )
    if kind is FrameKind.REPLICA_HELLO and chance.random() < 0.5:
        payload = PeerHello(
            choose(("broker-0", "g")), choose(("a", "broker-0")), "broker-0", "n"
        ).pack()
    else:
        payload = json.dumps(hello).encode()
    made = bytearray(frame(kind, chance.getrandbits(8), payload))
    if chance.random() < 0.5:
        for _ in range(chance.randint(1, 4)):
            made[chance.randrange(len(made))] = choose((0, 1, 255, 128, chance.getrandbits(8)))
    if chance.random() < 0.2:
        del made[chance.randrange(len(made)) :]
    if chance.random() < 0.2:
        made += frame(choose(list(FrameKind)), 1, chance.randbytes(chance.randint(0, 40)))
    if chance.random() < 0.05:
        made = bytearray(HEADER.pack(chance.getrandbits(32), chance.getrandbits(8), 0, 0, 0, 0))
    return bytes(made)


def feed(connection: DataConnection, data: bytes) -> None:
    """Feed the bytes as the event loop would, until the connection ends."""
    stream, at = connection.stream, 0
    while at < len(data) and stream.is_open:
        view = stream.get_buffer(-1)
        taken = min(len(view), len(data) - at)
        view[:taken] = data[at : at + taken]
        stream.buffer_updated(taken)
        at += taken


async def test_no_malformed_handshake_yields_a_principal(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)  # what pytest keeps of a million refusals are 100 GB
    print(f"seed {forms.SEED}")
    chance = random.Random(forms.SEED)
    async with guarded(tmp_path) as cluster:
        broker = cluster.node.broker
        throttle = Throttle(broker.access, broker.loop.time)
        before = broker.store.index
        for number in range(COUNT):
            connection = DataConnection(
                broker, lambda _: None, SharedByConnections(throttle=throttle)
            )
            connection.stream.connection_made(Absent())
            feed(connection, opening(chance))
            assert connection.access.caller.principal == ANONYMOUS, number
            connection.stream.connection_lost(None)
            if number % 1000 == 0:
                await asyncio.sleep(0)
        assert not throttle.connections
        assert broker.store.index == before
        assert (await cluster.admin.send("orders", b"behind")).sequence == 0


async def test_malformed_tls_handshakes_end_alone(tmp_path: Path, papers: Papers) -> None:
    print(f"seed {forms.SEED}")
    chance = random.Random(forms.SEED)
    hello = client_hello()
    async with secured(tmp_path, papers.server) as node:
        host, port = node.data_address.rsplit(":", 1)
        for _ in range(min(COUNT // 20, 2_000)):
            damaged = bytearray(hello)
            for _ in range(chance.randint(1, 6)):
                damaged[chance.randrange(len(damaged))] = chance.getrandbits(8)
            reader, writer = await asyncio.open_connection(host, int(port))
            with suppress(OSError):
                writer.write(bytes(damaged[: chance.randint(1, len(damaged))]))
                writer.write_eof()
                while await reader.read(4096):
                    pass
            writer.close()
        async with qmq.connect(node.address, tls=papers.client) as mq:
            assert (await mq.send("orders", b"behind")).sequence == 0


def client_hello() -> bytes:
    """The first bytes of a real handshake."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    made = ssl.create_default_context().wrap_bio(incoming, outgoing, server_hostname="localhost")
    with suppress(ssl.SSLWantReadError):
        made.do_handshake()
    return outgoing.read()


def test_a_token_in_a_hello_is_not_shown() -> None:
    assert TOKEN not in repr(wire.Hello(1, "c", TOKEN))
    assert TOKEN not in repr(wire.Reauth(TOKEN))
