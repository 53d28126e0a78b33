"""Frames of the right shape and with any content: after each client, the next one is served. The
seed is printed.
"""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import suppress
from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from random import Random
from struct import Struct
from typing import Any, Final

from support import node_config, running
from support.forms import SEED

import qmq
from qmq.wire import frame as frames
from qmq.wire import frame_payloads as wire
from qmq.wire.batch import encode, sent_envelope
from qmq.wire.batch_columns import REGION_BYTES, Columns
from qmq.wire.frame import HEADER, FrameKind

SECONDS: Final = 2.0
EDGES: Final = [each for bits in (31, 32, 63, 64) for each in ((1 << bits) - 1, 1 << bits)]
INTS: Final = (-(1 << 63), -1, 0, 1, 2, 3, 255, 65_535, 65_536, 1 << 53, 1 << 62, 1 << 70, *EDGES)
LONGS: Final = tuple(each for each in INTS if -(1 << 63) <= each < 1 << 63)
WORDS: Final = tuple(each for each in INTS if 0 <= each < 1 << 32)
TEXTS: Final = (
    "s",
    "o",
    "g",
    "c",
    "%dlq%g",
    "%dlq%x",
    "",
    "a" * 127,
    "g%c",
    "earliest",
    "latest",
    "resume",
    "0-512",
    "\ud800",
    "x\x00",
)
LISTS: Final = (["t"], ["0-512"], ["0-1", "5-2"], [""], ["\ud800"], [], [7], [["t"]])
GOOD: Final[dict[str, Any]] = {
    "subject": "s",
    "group": "g",
    "consumer": "c",
    "incarnation": "i",
    "received": -1,
    "start": "earliest",
    "lease_ms": 30_000,
    "tags_any": [],
    "tags_all": [],
    "until": 100,
    "bytes_max": 1_000,
    "lps": [],
    "producer_id": "00" * 8,
    "before": 100,
    "most": 10,
    "end": 64,
    "version": 1,
}
JSON: Final = {
    FrameKind.ATTACH: wire.Attach,
    FrameKind.FETCH: wire.Fetch,
    FrameKind.FIND: wire.Find,
    FrameKind.LANE_ATTACH: wire.LaneAttach,
}
_SETTLE: Final = Struct("<II")
_SETTLEMENT: Final = Struct("<qqII")
_BEGUN: Final = Struct("<Iqq")
_LANE_SETTLE: Final = Struct("<IIQ")


class Frames:
    """Makes frames by chance."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._next_id = 1

    def next(self) -> bytes:
        choose = self._random.choice
        kind, payload = choose(
            (self._json, self._binary, self._binary, self._produce, self._produce)
        )()
        self._next_id += 1
        return (
            HEADER.pack(
                frames.HEADER_BYTES + len(payload), kind, 0, 0, self._next_id, choose((0, 10))
            )
            + payload
        )

    def _json(self) -> tuple[FrameKind, bytes]:
        choose, kind = self._random.choice, self._random.choice(list(JSON))
        found = {each.name: GOOD.get(each.name, 0) for each in fields(JSON[kind])}
        found |= {"subject": choose(("s", "s", "o", "%dlq%g")), "partition": choose((0, 0, 1, 2))}
        for name, value in list(found.items()):
            if self._random.random() < 0.2:
                found[name] = choose(
                    INTS if isinstance(value, int) else TEXTS if isinstance(value, str) else LISTS
                )
        return kind, json.dumps(found).encode()

    def _session(self) -> int:
        return int(
            self._random.choice((1, 1, 1, 2, 3, 1 << 31, (1 << 31) + 1, self._random.choice(WORDS)))
        )

    def _span(self) -> tuple[int, int]:
        first = self._random.choice((0, 1, 2, self._random.choice(LONGS)))
        return first, self._random.choice(
            (first, first + (first < 1 << 62), self._random.choice(LONGS))
        )

    def _settlements(self) -> bytes:
        choose, count = self._random.choice, self._random.randint(0, 4)
        return b"".join(
            [_SETTLEMENT.pack(*self._span(), choose(range(5)), choose(WORDS)) for _ in range(count)]
        )

    def _binary(self) -> tuple[FrameKind, bytes]:
        choose, session = self._random.choice, self._session()
        kind = choose(
            (
                FrameKind.PULL,
                FrameKind.SETTLE,
                FrameKind.HEARTBEAT,
                FrameKind.DETACH,
                FrameKind.BEGUN,
                FrameKind.LANE_PULL,
                FrameKind.LANE_SETTLE,
            )
        )
        if kind is FrameKind.PULL:
            return kind, wire.pack_pull(
                wire.Pull(
                    session, choose(WORDS), choose(WORDS), choose((0, 10)), choose((-1, 0, 40))
                )
            )
        if kind is FrameKind.BEGUN:
            return kind, _BEGUN.pack(session, *self._span())
        if kind is FrameKind.LANE_PULL:
            return kind, wire.pack_lane_pull(
                wire.LanePull(
                    session, choose((1, 2, 3)), choose(LONGS), choose(WORDS), choose(WORDS), 0
                )
            )
        settlements = self._settlements()
        if kind is FrameKind.SETTLE:
            return kind, _SETTLE.pack(
                session, len(settlements) // _SETTLEMENT.size
            ) + settlements + choose((b"", b"", b"\0\0\0\0\4\0boom"))
        if kind is FrameKind.LANE_SETTLE:
            return kind, _LANE_SETTLE.pack(
                session, len(settlements) // _SETTLEMENT.size, choose((1, 2, 3))
            ) + settlements
        if kind is FrameKind.DETACH:
            return kind, wire.pack_detach(session, choose((-1, 0, 5, choose(LONGS))))
        return kind, wire.pack_session(session)

    def _produce(self) -> tuple[FrameKind, bytes]:
        choose, chance = self._random.choice, self._random.random
        subject, count = choose(("s", "s", "o", "%dlq%g")), choose((1, 1, 2, 40))
        columns = Columns([b"b" * choose((0, 1, 100))] * count)
        if chance() < 0.5:
            columns.tags = [("a", "t")] * count
        if chance() < 0.5:
            columns.headers = [{"h": b"v", "qmq-group": b"g"}] * count
        if chance() < 0.3:
            columns.create_deltas = [choose((0, 0xFFFF_FFFF))] * count
        if chance() < 0.3:
            columns.message_ids = [self._random.randbytes(16)] * count
        if chance() < 0.2:
            columns.due_times_ms = [choose((0, -1, (1 << 63) - 1))] * count
        if subject == "o" or chance() < 0.1:
            columns.keys, columns.logical_partitions = (
                [b"k"] * count,
                [choose((0, 5, 63, 65_535))] * count,
            )
        _, region = encode(
            subject.encode(),
            columns,
            producer_id=choose((1, 5, (1 << 64) - 1, 1 << 62)),
            partition=int(subject == "o"),
            batch_sequence=choose((0, 1, 2, 3, self._random.getrandbits(20), (1 << 48) - 1)),
            flags=choose((0, 0, 0, 1, 2, 4, 8, 16, 31, 1 << 31)),
            create_time_ms=choose((0, 1, -1, -(1 << 63))),
        )
        damaged = bytearray(region)
        if chance() < 0.6:
            for _ in range(self._random.randint(1, 3)):
                at = self._random.randrange(len(damaged) if chance() < 0.5 else REGION_BYTES)
                damaged[at] = choose((0, 1, 255, 128, damaged[at] ^ 1))
        sent = bytes(damaged)
        return choose(
            (FrameKind.PRODUCE, FrameKind.PRODUCE, FrameKind.PRODUCE_FAST)
        ), sent_envelope(sent) + sent


async def test_whatever_frames_are_sent_the_next_client_is_served(tmp_path: Path) -> None:
    print(f"seed {SEED}")  # shown if it fails
    config = node_config(tmp_path, delay=True)
    async with running(config) as node, qmq.connect(node.address) as mq:
        await mq.metadata.create_subject(qmq.SubjectConfig("s"))
        await mq.metadata.create_subject(
            qmq.SubjectConfig("o", order=qmq.Order.STRICT, logical_partitions=64), partitions=1
        )
        assert node.delay is not None
        delay_address = f"127.0.0.1:{node.delay.data_port}"
        addresses = (node.data_address, node.data_address, delay_address)
        made, ends = Frames(SEED), time.monotonic() + SECONDS
        count = rounds = 0
        while time.monotonic() < ends:
            rounds += 1
            count += await _fire(made, addresses[rounds % 3])
        assert count > 200, count
        await _check_served(mq, "behind")
    # what was stored can be read again
    async with (
        running(config) as node,
        qmq.connect(node.address) as mq,
    ):
        await _check_served(mq, "again")


async def _fire(made: Frames, address: str) -> int:
    """Frames over one connection, until it is closed or has had enough; how many."""
    host, port = address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    hello = wire.Hello(wire.PROTOCOL_VERSION, "anybody").pack()
    attach = wire.Attach(
        **{each.name: GOOD.get(each.name, 0) for each in fields(wire.Attach)}
    ).pack()
    writer.write(
        frames.frame(FrameKind.HELLO, 0, hello) + frames.frame(FrameKind.ATTACH, 1, attach)
    )
    count = 0
    with suppress(OSError):
        while count < 50 and not reader.at_eof():
            for _ in range(5):
                writer.write(made.next())
                count += 1
            await writer.drain()
            with suppress(TimeoutError):
                await asyncio.wait_for(reader.read(1 << 20), 0.005)
    writer.close()
    return count


async def _check_served(mq: qmq.Client, group: str) -> None:
    receipt = await mq.send("s", b"served")
    consumer = mq.consumer("s", group, start="latest")
    with suppress(TimeoutError):
        await consumer.pull(1, timedelta(milliseconds=1))
    receipt = await mq.send("s", b"served")
    async with asyncio.timeout(20):
        while receipt.id not in [
            each.id for each in await consumer.pull(100, timedelta(seconds=1))
        ]:
            pass
    await consumer.close()
