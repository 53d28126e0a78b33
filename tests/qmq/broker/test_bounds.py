"""The limits of one client's requests to a broker."""

from __future__ import annotations

import asyncio
import errno
import json
import resource
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from support import ManualClock, SmallDisk, alone, eventually, intake

from qmq import limits
from qmq.broker.broker import Broker
from qmq.broker.config import BrokerConfig
from qmq.broker.connection.server import DataServer
from qmq.client.connection.connection import Connection, connect
from qmq.errors import DiskFull, InvalidArgument, Overloaded, QmqError
from qmq.log.actions import SettleAction
from qmq.log.disk import Disk
from qmq.log.log_config import LogConfig
from qmq.log.recovery import open_store
from qmq.model import SubjectConfig
from qmq.process.files import connections_max
from qmq.rpc.network import Factory, Network, Refused, ServerListener, ignored
from qmq.wire import frame_payloads as wire
from qmq.wire.frame import FrameKind
from qmq.wire.frame_payloads import Settlement, Verdict

MESSAGES = 20


def _raise(cause: BaseException) -> None:
    raise cause


@asynccontextmanager
async def served(
    folder: Path, fatal: Callable[[BaseException], None] = _raise, disk: Disk | None = None
) -> AsyncIterator[tuple[Broker, Connection]]:
    store = open_store(folder, LogConfig(), ManualClock(), disk=disk)
    running = alone(store, ManualClock(), fatal=fatal)
    broker, maintenance, server = running.broker, running.maintenance, running.data
    store.append([intake(store.open_queue("s", 0), [b"x"] * MESSAGES)])
    store.begin_flush().run()
    await server.start("127.0.0.1", 0)
    maintenance.start()
    connection = await connect(f"127.0.0.1:{server.port}", "test")
    try:
        yield broker, connection
    finally:
        connection.close()
        await connection.wait_closed()
        await server.stop()
        await maintenance.stop()
        store.close()


async def attach(connection: Connection, consumer: str = "c") -> int:
    request = wire.Attach("s", 0, "g", consumer, "i", -1, "earliest", 60_000, [], [])
    answer = await connection.call(FrameKind.ATTACH, request.pack(), timeout_s=10)
    return wire.Attached.unpack(answer.payload).session


async def test_a_full_disk_is_logged_once_until_there_is_room_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries = [0]

    def full() -> None:
        tries[0] += 1
        raise DiskFull("no space left (in this test)")

    async with served(tmp_path) as (broker, connection):
        for number in (1, 2):
            with monkeypatch.context() as patch:
                patch.setattr(broker.store, "write_actions", full)
                tries[0] = 0
                attaching = asyncio.ensure_future(attach(connection, f"c{number}"))
                await eventually(lambda: tries[0] >= 10)
            await attaching
            await eventually(lambda: not broker.store.unwritten.waits)
            assert caplog.text.count("acknowledgements stay in memory") == number


async def test_requests_of_consumers_are_refused_when_too_many_actions_wait_for_disk_space(
    tmp_path: Path,
) -> None:
    disk = SmallDisk(1 << 30)
    late = SettleAction(
        "s", 0, "g", "c", 0, ((0, 0, int(Verdict.NACK), 0),), ((0, "x" * limits.MIB),)
    )
    async with served(tmp_path, disk=disk) as (broker, connection):
        session = await attach(connection)
        disk.left = 0
        for _ in range(limits.UNWRITTEN_BYTES_MAX // limits.MIB):
            broker.store.act(late)
        with pytest.raises(DiskFull):
            broker.store.write_actions()
        pull = wire.pack_pull(wire.Pull(session, 5, 1 << 20, 0))
        for kind, payload in (
            (FrameKind.PULL, pull),
            (FrameKind.SETTLE, wire.pack_settle(session, [Settlement(0, 0, Verdict.ACK, 0)])),
        ):
            with pytest.raises(DiskFull, match="wait for room"):
                await connection.call(kind, payload, timeout_s=10)
        await connection.call(FrameKind.HEARTBEAT, wire.pack_session(session), timeout_s=10)
        disk.left = 1 << 30
        await eventually(lambda: not broker.store.unwritten.waits)
        await connection.call(FrameKind.PULL, pull, timeout_s=10)


async def test_a_settle_that_would_not_fit_into_an_entry_is_refused(tmp_path: Path) -> None:
    async with served(tmp_path) as (broker, connection):
        session = await attach(connection)
        many = [Settlement(at, at, Verdict.NACK, 0, "x" * 1_000) for at in range(9_000)]
        with pytest.raises(InvalidArgument, match="send several"):
            await connection.call(FrameKind.SETTLE, wire.pack_settle(session, many), timeout_s=10)
        assert not broker.store.unwritten.waits


async def test_a_settle_has_so_many_ranges_and_no_more(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, connection):
        session = await attach(connection)
        many = [Settlement(0, 0, Verdict.ACK, 0)] * (limits.SETTLE_RANGES_MAX + 1)
        with pytest.raises(InvalidArgument, match="at most 20000 ranges"):
            await connection.call(FrameKind.SETTLE, wire.pack_settle(session, many), timeout_s=10)


async def test_a_settle_as_large_as_older_clients_send_is_taken(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, connection):
        session = await attach(connection)
        await connection.call(
            FrameKind.PULL,
            wire.pack_pull(wire.Pull(session, MESSAGES, 1 << 20, 1000)),
            timeout_s=10,
        )
        many = [Settlement(0, 0, Verdict.ACK, 0)] * 20_000
        answer = await connection.call(
            FrameKind.SETTLE, wire.pack_settle(session, many), timeout_s=10
        )
        assert wire.unpack_settled(answer.payload) == (1, 19_999)


async def test_settling_undelivered_messages_changes_no_counter(tmp_path: Path) -> None:
    async with served(tmp_path) as (broker, connection):
        session = await attach(connection)
        await connection.call(
            FrameKind.PULL,
            wire.pack_pull(wire.Pull(session, MESSAGES, 1 << 20, 1000)),
            timeout_s=10,
        )
        far = wire.pack_settle(session, [Settlement(0, 1 << 62, Verdict.ACK, 0)])
        with pytest.raises(InvalidArgument, match=f"before {MESSAGES} were handed out"):
            await connection.call(FrameKind.SETTLE, far, timeout_s=10)
        (state,) = broker.dispatch.groups
        assert (state.share.unacked(), state.counters.acked) == (MESSAGES, 0)
        whole = wire.pack_settle(session, [Settlement(0, MESSAGES - 1, Verdict.ACK, 0)])
        answer = await connection.call(FrameKind.SETTLE, whole, timeout_s=10)
        assert wire.unpack_settled(answer.payload) == (MESSAGES, 0)


async def test_being_short_of_descriptors_is_overload_and_not_the_end(tmp_path: Path) -> None:
    fatal: list[BaseException] = []
    async with served(tmp_path, fatal.append) as (broker, connection):

        def short(_: wire.Fetch) -> tuple[wire.Fetched, list[bytes]]:
            raise OSError(errno.EMFILE, "Too many open files")

        broker.fetching.fetch = short  # type: ignore[method-assign]
        with pytest.raises(Overloaded, match="too few descriptors"):
            fetch = wire.Fetch("s", 0, 0, 1 << 40, 0, 1000, [], [], [], 0)
            await connection.call(FrameKind.FETCH, fetch.pack(), timeout_s=10)
        assert fatal == []


async def test_connections_leave_descriptors_for_files(tmp_path: Path) -> None:
    assert connections_max(10_000, 1024) == 512
    assert connections_max(10_000, 300) == 150
    assert connections_max(10_000, 1 << 20) == 10_000
    async with served(tmp_path) as (broker, _):
        server = DataServer(broker, descriptors=2)
        await server.start("127.0.0.1", 0)
        first = await connect(f"127.0.0.1:{server.port}", "first")
        with pytest.raises(QmqError):
            await connect(f"127.0.0.1:{server.port}", "second")
        first.close()
        await first.wait_closed()
        await server.stop()


async def test_peers_that_say_no_hello_leave_room_for_those_that_do(tmp_path: Path) -> None:
    config = BrokerConfig(connections_max=40, hello_timeout_ms=3_600_000)
    store = open_store(tmp_path, LogConfig(), ManualClock())
    server = DataServer(
        Broker(store, SubjectConfig, ManualClock(), config, asyncio.get_running_loop())
    )
    await server.start("127.0.0.1", 0)
    address = f"127.0.0.1:{server.port}"
    first = await connect(address, "first")
    silent = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(60)]
    second = await connect(address, "second")
    assert first.is_open
    assert await silent[0][0].read() == b"", "the oldest ends"
    for connection in (first, second):
        connection.close()
        await connection.wait_closed()
    for _, writer in silent:
        writer.close()
    await server.stop()
    store.close()


async def test_a_connection_that_was_accepted_before_a_stop_is_closed_after_it(
    tmp_path: Path,
) -> None:
    """asyncio takes a connection in one round of the loop, and makes its protocol in the next."""

    class Taken(Network):
        async def listen(
            self, host: str, port: int, factory: Factory, refused: Refused = ignored
        ) -> ServerListener:
            self.factory = factory
            return await super().listen(host, port, factory, refused)

    async with served(tmp_path) as (broker, _):
        network = Taken()
        server = DataServer(broker, network)
        await server.start("127.0.0.1", 0)
        await server.stop()
        ours, its = socket.socketpair()
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        _, taken = await asyncio.get_running_loop().connect_accepted_socket(network.factory, its)
        assert not taken.is_open, "closed at once, not when nobody said hello"
        assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()


def test_a_file_that_cannot_be_opened_for_now_is_refused_as_a_full_disk_is(tmp_path: Path) -> None:
    disk, opened = Disk(), list[int]()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        with pytest.raises(DiskFull, match="no more open files"):
            opened.append(disk.open_append(tmp_path / "file"))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert opened == []


async def test_a_session_has_few_pulls_waiting(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, connection):
        session = await attach(connection)
        await connection.call(
            FrameKind.PULL,
            wire.pack_pull(wire.Pull(session, MESSAGES, 1 << 20, 1000)),
            timeout_s=10,
        )
        pull = wire.pack_pull(wire.Pull(session, 1, 1, 60_000))
        for _ in range(limits.SESSION_PULLS_MAX):
            connection.request(FrameKind.PULL, lambda _: None, pull, timeout_s=60)
        with pytest.raises(Overloaded, match="pulls of this session are already waiting"):
            await connection.call(FrameKind.PULL, pull, timeout_s=10)


async def test_a_consumer_that_comes_back_ends_its_older_session_only(tmp_path: Path) -> None:
    async with served(tmp_path) as (broker, connection):
        first = await attach(connection)
        second = await attach(connection)
        groups = broker.dispatch.groups
        (state,) = groups
        (found,) = groups.clients()
        assert (first != second, found) == (True, (id(state), "c"))
    assert groups.clients() == {}


HALF = json.loads('"\\ud800"')
"""Text that JSON can escape but that cannot be encoded as UTF-8."""


async def test_half_a_character_is_refused_and_the_connection_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    frames = [
        (FrameKind.FETCH, wire.Fetch("s", 0, 0, 1, 0, 1000, [HALF], [], [], 0).pack()),
        (FrameKind.FETCH, wire.Fetch(HALF, 0, 0, 1, 0, 1000, [], [], [], 0).pack()),
    ]
    for subject, group, life in ((HALF, "g", "i"), ("s", HALF, "i"), ("s", "g", HALF)):
        attach_ = wire.Attach(subject, 0, group, "c", life, -1, "earliest", 60_000, [], [])
        frames.append((FrameKind.ATTACH, attach_.pack()))
    async with served(tmp_path) as (_, connection):
        for kind, payload in frames:
            with pytest.raises(InvalidArgument, match="surrogate"):
                await connection.call(kind, payload, timeout_s=10)
        await attach(connection)
    assert "Traceback" not in caplog.text
