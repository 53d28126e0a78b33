"""What one client may ask of a broker at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from support import ManualClock, intake

from qmq import limits
from qmq.broker.broker import Broker
from qmq.broker.config import BrokerConfig
from qmq.broker.server import DataServer
from qmq.broker.upkeep import Upkeep
from qmq.client.connection import Connection, connect
from qmq.errors import InvalidArgument
from qmq.log.config import LogConfig
from qmq.log.recovery import open_store
from qmq.model import SubjectConfig
from qmq.wire import messages as wire
from qmq.wire.frame import FrameKind
from qmq.wire.messages import Settlement, Verdict

MESSAGES = 20


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[tuple[Broker, Connection]]:
    store = open_store(folder, LogConfig(), ManualClock())
    broker = Broker(store, SubjectConfig, ManualClock(), BrokerConfig(), asyncio.get_running_loop())
    upkeep, server = Upkeep(broker, broker.fatal, tick_s=0.0005), DataServer(broker)
    store.append([intake(store.open_queue("s", 0), [b"x"] * MESSAGES)])
    store.begin_flush().run()
    await server.start("127.0.0.1", 0)
    upkeep.start()
    connection = await connect(f"127.0.0.1:{server.port}", "test")
    try:
        yield broker, connection
    finally:
        connection.close()
        await connection.wait_closed()
        await server.stop()
        await upkeep.stop()
        store.close()


async def attach(connection: Connection) -> int:
    request = wire.Attach("s", 0, "g", "c", "i", -1, "earliest", 60_000, [], [])
    answer = await connection.call(FrameKind.ATTACH, request.pack(), timeout_s=10)
    return wire.Attached.unpack(answer.payload).session


@pytest.mark.parametrize(
    ("tags", "lps", "says"),
    [(["t"] * 21, [], "tags"), ([], ["0-1"] * (limits.FETCH_RANGES_MAX + 1), "at most 64 ranges")],
)
async def test_a_fetch_names_few_tags_and_ranges(tmp_path: Path, tags: list[str], lps: list[str], says: str) -> None:
    async with served(tmp_path) as (_, connection):
        fetch = wire.Fetch("s", 0, 0, 1 << 40, 0, 1000, tags, [], lps, 0)
        with pytest.raises(InvalidArgument, match=says):
            await connection.call(FrameKind.FETCH, fetch.pack(), timeout_s=10)


async def test_a_value_that_is_wrong_is_repeated_in_part_only(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, connection):
        fetch = wire.Fetch("s", 0, 0, 1 << 40, 0, 1000, [], [], ["x" * 50_000], 0)
        with pytest.raises(InvalidArgument) as refused:
            await connection.call(FrameKind.FETCH, fetch.pack(), timeout_s=10)
        assert len(refused.value.message) < 300


async def test_a_settle_has_so_many_ranges_and_no_more(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, connection):
        session = await attach(connection)
        many = [Settlement(0, 0, Verdict.ACK, 0)] * (limits.SETTLE_RANGES_MAX + 1)
        with pytest.raises(InvalidArgument, match="at most 10000 ranges"):
            await connection.call(FrameKind.SETTLE, wire.pack_settle(session, many), timeout_s=10)


async def test_a_settle_of_what_was_never_handed_out_changes_no_counter(tmp_path: Path) -> None:
    async with served(tmp_path) as (broker, connection):
        session = await attach(connection)
        await connection.call(FrameKind.PULL, wire.pack_pull(wire.Pull(session, MESSAGES, 1 << 20, 1000)), timeout_s=10)
        far = wire.pack_settle(session, [Settlement(0, 1 << 62, Verdict.ACK, 0)])
        with pytest.raises(InvalidArgument, match=f"before {MESSAGES} were handed out"):
            await connection.call(FrameKind.SETTLE, far, timeout_s=10)
        (state,) = broker.dispatch.groups
        assert (state.share.unacked(), state.tally.acked) == (MESSAGES, 0)
        whole = wire.pack_settle(session, [Settlement(0, MESSAGES - 1, Verdict.ACK, 0)])
        answer = await connection.call(FrameKind.SETTLE, whole, timeout_s=10)
        assert wire.unpack_settled(answer.payload) == (MESSAGES, 0)
