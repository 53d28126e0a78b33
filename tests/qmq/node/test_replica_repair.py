"""Mending: a replica's damage is filled with what was there, taken from another one, or not at
all.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import pytest
from support import ManualClock, intake

from qmq.errors import InvalidArgument, LogDamaged
from qmq.limits import MIB
from qmq.log import follower
from qmq.log.actions import Begin, Join, PullAction, Pulled
from qmq.log.checkpoint import close_store
from qmq.log.envelopes import Entry, walk
from qmq.log.log_config import LogConfig
from qmq.log.recent_writes import WriteRun
from qmq.log.recovery import open_store
from qmq.log.segments import Segments
from qmq.log.store import Store
from qmq.node.replica import context
from qmq.proto.v1 import control_pb2 as pb
from qmq.proto.v1 import control_pb2_grpc
from qmq.rpc.channel import answering
from qmq.rpc.server import RpcBounds, RpcListener, rpc_server
from qmq.rpc.server_name import ServerName
from qmq.wire.batch import ENVELOPE_BYTES, Kind, place

CONFIG = LogConfig()
object.__setattr__(CONFIG, "segment_bytes", 4_000)
object.__setattr__(CONFIG, "action_segment_bytes", 1_500)


def opened(folder: Path) -> Store:
    return open_store(folder, CONFIG, ManualClock(), is_replicated=True)


def fill(store: Store, count: int, start: int = 0, size: int | None = None) -> None:
    queue = store.open_queue("s", 0)
    where, random = ("s", 0, "g"), Random(start)
    for number in range(start, start + count):
        store.append(
            [
                intake(
                    queue,
                    [bytes([65 + number % 26]) * (size or random.randrange(300))],
                    number=number,
                )
            ]
        )
        if number == 0:
            store.act(Begin(*where, "", 0))
            store.act(Join(*where, "c", "i", 1000, -1))
        store.act(PullAction(*where, "c", (Pulled(number, 1, 1),)))
        store.write_actions()


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """Three replicas with the same log, closed without a checkpoint."""
    store = opened(tmp_path / "a")
    store.append_barrier(1)
    fill(store, 30)
    store.epoch = 3
    store.append_barrier(5)
    fill(store, 30, start=30)
    store.close()
    for name in ("b", "c"):
        shutil.copytree(tmp_path / "a", tmp_path / name)
    return [tmp_path / name for name in ("a", "b", "c")]


def files(folder: Path) -> dict[str, bytes]:
    return {
        f"{log}/{path.name}": path.read_bytes()
        for log in ("message", "action")
        for path in (folder / log).iterdir()
    }


def log_of(store: Store, log: int) -> Segments:
    return (store.messages, store.actions)[log]


def entries(store: Store, log: int) -> list[Entry]:
    return list(walk(log_of(store, log), 0))


def spoil(folder: Path, log: int, position: int, size: int = 1) -> None:
    """Flip bits in a closed or open store's file."""
    path = max(
        each for each in (folder / context.NAMES[log]).iterdir() if int(each.stem) <= position
    )
    at = position - int(path.stem)
    with path.open("r+b") as file:
        file.seek(at)
        data = file.read(size)
        file.seek(at)
        file.write(bytes(each ^ 0x55 for each in data))


class Peer(control_pb2_grpc.BrokerControlServicer):
    """Only what mending asks."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.answer: Callable[[bytes], bytes] = lambda data: data

    @answering
    async def ReadLog(self, request: pb.ReadLogRequest) -> pb.ReadLogResponse:
        data = context.read_log(self.store, request.log, request.position, request.bytes_max)
        return pb.ReadLogResponse(entries=self.answer(data))


@asynccontextmanager
async def serving(*stores: Store) -> AsyncIterator[tuple[dict[ServerName, str], list[Peer]]]:
    """Control ports of other replicas; the last one does not exist."""
    servers, addresses, peers = [], {}, []
    for number, store in enumerate(stores):
        server = rpc_server(RpcListener(RpcBounds(10, 10)))
        peers.append(Peer(store))
        control_pb2_grpc.add_BrokerControlServicer_to_server(peers[-1], server)
        addresses[ServerName(replica=f"r{number}")] = (
            f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        )
        await server.start()
        servers.append(server)
    try:
        yield addresses, peers
    finally:
        await asyncio.gather(*[server.stop(None) for server in servers])


async def repaired(folder: Path, addresses: dict[ServerName, str]) -> Store:
    """Open the store and repair what prevents that."""
    for _ in range(100):
        try:
            return opened(folder)
        except LogDamaged as damage:
            if not await context.repair_folder(addresses, folder, CONFIG.segment_bytes, damage):
                raise
    raise AssertionError("there is no end to it")


@pytest.mark.parametrize("log", [0, 1])
@pytest.mark.parametrize("part", ["envelope", "region", "all of it"])
async def test_a_damaged_entry_comes_back_byte_for_byte_wherever_it_lies(
    folders: list[Path], log: int, part: str
) -> None:
    mine, other = opened(folders[0]), opened(folders[1])
    before = files(folders[0])
    found = entries(mine, log)
    begins = set(log_of(mine, log).bases)
    some = [
        entry
        for at, entry in enumerate(found)
        if at % 6 == 0 or entry.position in begins or entry.end in begins
    ]
    async with serving(other) as (addresses, _):
        for entry in [*some, found[-1]]:
            size = {"envelope": 8, "region": 8, "all of it": entry.envelope.total_bytes}[part]
            spoil(
                folders[0], log, entry.position + (ENVELOPE_BYTES if part == "region" else 0), size
            )
            assert files(folders[0]) != before
            assert await context.repair(
                addresses, mine, LogDamaged("", log=log, position=entry.position)
            )
            assert files(folders[0]) == before


@pytest.mark.parametrize("log", [0, 1])
@pytest.mark.parametrize("count", [2, 7, 30])
async def test_several_neighbours_are_one_hole_also_over_a_segments_end(
    folders: list[Path], log: int, count: int
) -> None:
    mine, other = opened(folders[0]), opened(folders[1])
    before, found = files(folders[0]), entries(mine, log)
    async with serving(other) as (addresses, _):
        for first in range(0, len(found) - count + 1, 9):
            for entry in found[first : first + count]:
                spoil(folders[0], log, entry.position, 70)
            assert await context.repair(
                addresses, mine, LogDamaged("", log=log, position=found[first].position)
            )
            assert files(folders[0]) == before


async def test_a_store_that_cannot_be_opened_is_mended_before(folders: list[Path]) -> None:
    store = opened(folders[1])
    before = files(folders[0])
    for log in (0, 1):
        for entry in entries(store, log)[:-20:4]:
            if entry.end < log_of(store, log).bases[-1]:
                spoil(folders[0], log, entry.position + 5, 100)
    async with serving(store) as (addresses, _):
        mine = await repaired(folders[0], addresses)
    assert files(folders[0]) == before
    assert not mine.lost_tail
    assert mine.index == store.index


async def test_with_a_checkpoint_too(folders: list[Path]) -> None:
    """The replay starts after the checkpoint, and only damage in what is read is known; the consume
    log is rebuilt.
    """
    store = opened(folders[0])
    store.commit(store.index)
    fill(store, 300, start=60)
    close_store(store)
    shutil.rmtree(folders[1])
    shutil.copytree(folders[0], folders[1])
    other = opened(folders[1])
    before = files(folders[0])
    spoil(folders[0], 0, entries(other, 0)[-1].position, 70)
    spoil(folders[0], 0, entries(other, 0)[17].position, 70)
    shutil.rmtree(folders[0] / "consume")
    async with serving(other) as (addresses, _):
        mine = await repaired(folders[0], addresses)
    assert files(folders[0]) == before
    assert mine.index == other.index


async def test_damage_on_two_of_three_at_different_places_is_mended_on_both(
    folders: list[Path],
) -> None:
    stores = [opened(folder) for folder in folders]
    before, found = files(folders[0]), entries(stores[0], 0)
    spoil(folders[0], 0, found[10].position, 70)
    spoil(folders[1], 0, found[11].position + 80, 4)
    spoil(folders[1], 0, found[12].position, 70)
    async with serving(*stores) as (addresses, _):
        for mine, at in ((0, 10), (1, 11)):
            others = {
                name: address for name, address in addresses.items() if name.replica != f"r{mine}"
            }
            assert await context.repair(
                others, stores[mine], LogDamaged("", log=0, position=found[at].position)
            )
            assert files(folders[mine]) == before


async def test_damage_at_the_same_place_on_all_replicas_is_not_mended(folders: list[Path]) -> None:
    stores = [opened(folder) for folder in folders]
    found = entries(stores[0], 0)
    for folder in folders:
        spoil(folder, 0, found[10].position, 70)
    before = [files(folder) for folder in folders]
    async with serving(*stores[1:]) as (addresses, _):
        assert not await context.repair(
            addresses, stores[0], LogDamaged("", log=0, position=found[10].position)
        )
        stores[0].close()
        with pytest.raises(LogDamaged):
            await repaired(folders[0], addresses)
    assert [files(folder) for folder in folders] == before


async def test_a_peer_that_is_away_or_behind_is_passed_over(folders: list[Path]) -> None:
    mine, other, behind = opened(folders[0]), opened(folders[1]), opened(folders[2])
    before, found = files(folders[0]), entries(mine, 0)
    spoil(folders[0], 0, found[-2].position, 70)
    damage = LogDamaged("", log=0, position=found[-2].position)
    behind.messages.truncate(found[-4].position)
    async with serving(behind, other) as (addresses, _):
        addresses = {ServerName(replica="away"): "127.0.0.1:1", **addresses}
        assert await context.repair(addresses, mine, damage)
    assert files(folders[0]) == before


async def test_a_hole_at_the_end_of_an_unopened_log_is_not_filled_without_proof(
    folders: list[Path],
) -> None:
    """No complete entry follows and no checkpoint has the epoch, so the entry could be another
    master's.
    """
    store = opened(folders[1])
    last = entries(store, 0)[-1]
    spoil(folders[0], 0, last.position, 70)
    before = files(folders[0])
    async with serving(store) as (addresses, _):
        assert not await context.repair_folder(
            addresses, folders[0], 4_000, LogDamaged("", log=0, position=last.position)
        )
    assert files(folders[0]) == before


# --- what must never be written -------------------------------------------------------------------


def other_history(folder: Path, store: Store, index: int) -> Store:
    """A replica whose log differs from `store`'s after an index, with entries of the same sizes at
    the same positions.
    """
    shutil.copytree(store.folder, folder)
    other = open_store(folder, CONFIG, ManualClock(), is_replicated=True, until=index)
    other.epoch = other.epochs[-1][0] + 1
    fill(other, 20, start=index, size=100)
    return other


async def test_an_entry_of_another_history_is_refused(tmp_path: Path) -> None:
    """The same places, the same indexes, whole checksums, another epoch: only the neighbours and
    our own history tell.
    """
    store = opened(tmp_path / "a")
    store.append_barrier(1)
    fill(store, 20, size=100)
    for index in range(5, store.index - 4, 3):
        other = other_history(tmp_path / f"o{index}", store, index)
        found = [entry for entry in entries(store, 0) if entry.envelope.index > index]
        for entry in (found[0], found[-1]):
            spoil(store.folder, 0, entry.position, 70)
            before = files(store.folder)
            async with serving(other) as (addresses, _):
                assert not await context.repair(
                    addresses, store, LogDamaged("", log=0, position=entry.position)
                )
            assert files(store.folder) == before
            spoil(store.folder, 0, entry.position, 70)
        other.close()


def test_nothing_is_written_whose_checksums_do_not_hold(folders: list[Path]) -> None:
    mine = opened(folders[0])
    found = entries(mine, 0)
    begin, end = found[10].position, found[13].end
    good = b"".join(
        mine.messages.read(entry.position, entry.envelope.total_bytes) for entry in found[10:14]
    )
    assert end - begin == len(good)
    spoil(folders[0], 0, begin, 70)
    before = files(folders[0])
    damage = LogDamaged("", log=0, position=begin)
    first = found[10].envelope.total_bytes
    for at in [*range(0, first, 3), *range(first, first + 64, 8)]:
        bad = bytearray(good)
        bad[at] ^= 1
        assert not context.mend(mine.messages, damage, bytes(bad))
    for size in range(0, first + 1, 5):
        assert not context.mend(mine.messages, damage, good[:size])
    assert files(folders[0]) == before
    assert context.mend(mine.messages, damage, good)


@pytest.mark.parametrize(
    "change",
    ["index too low", "index too high", "epoch too low", "epoch too high", "of the other log"],
)
def test_an_entry_that_does_not_fit_between_its_neighbours_is_refused(
    folders: list[Path], change: str
) -> None:
    mine = opened(folders[0])
    found = entries(mine, 0)
    at = next(number for number, entry in enumerate(found) if entry.envelope.epoch == 5) + 6
    hole, following_entry = found[at], found[at + 1]
    envelope = hole.envelope
    changed = {
        "index too low": envelope._replace(index=found[at - 1].envelope.index),
        "index too high": envelope._replace(index=following_entry.envelope.index),
        "epoch too low": envelope._replace(epoch=1),
        "epoch too high": envelope._replace(epoch=6),
        "of the other log": envelope._replace(kind=int(Kind.ACTIONS)),
    }[change]
    data = place(changed.kind, changed.total_bytes, changed.region_crc, *changed[3:8]) + hole.region
    data += mine.messages.read(following_entry.position, following_entry.envelope.total_bytes)
    spoil(folders[0], 0, hole.position, 70)
    before = files(folders[0])
    assert not context.mend(
        mine.messages, LogDamaged("", log=0, position=hole.position), data, mine.epoch_at
    )
    assert files(folders[0]) == before


async def test_a_peer_that_answers_nonsense_changes_nothing(folders: list[Path]) -> None:
    mine, other = opened(folders[0]), opened(folders[1])
    found = entries(mine, 0)
    spoil(folders[0], 0, found[10].position, 70)
    before = files(folders[0])
    damage = LogDamaged("", log=0, position=found[10].position)
    async with serving(other) as (addresses, peers):
        for answer in (
            lambda _: b"",
            lambda _: bytes(200),
            lambda data: data[:-8],
            lambda data: data[8:],
            lambda data: data[:20],
        ):
            peers[0].answer = answer
            assert not await context.repair(addresses, mine, damage)
            assert files(folders[0]) == before


async def test_a_place_that_is_whole_is_not_touched(folders: list[Path]) -> None:
    """The caller was wrong about the damage, and must not be told that the place was repaired."""
    mine, other = opened(folders[0]), opened(folders[1])
    async with serving(other) as (addresses, _):
        assert not await context.repair(
            addresses, mine, LogDamaged("", log=0, position=entries(mine, 0)[10].position)
        )


# --- being asked ----------------------------------------------------------------------------------


def test_a_replica_gives_whole_entries_up_to_its_own_damage(folders: list[Path]) -> None:
    mine = opened(folders[0])
    found = entries(mine, 0)
    spoil(folders[0], 0, found[10].position, 70)
    data = context.read_log(mine, 0, found[3].position, MIB)
    assert found[3].position + len(data) == found[10].position
    assert len(context.read_log(mine, 0, found[3].position, 1)) == found[3].envelope.total_bytes
    with pytest.raises(LogDamaged, match="as well"):
        context.read_log(mine, 0, found[10].position, 1)
    with pytest.raises(LogDamaged):
        context.read_log(mine, 0, found[3].position + 8, 1)
    with pytest.raises(InvalidArgument):
        context.read_log(mine, 2, 0, 1)
    assert context.read_log(mine, 0, mine.messages.end, 1) == b""


def test_a_slave_mends_from_what_a_feed_would_have_given(folders: list[Path]) -> None:
    """The bytes of a replica's own file and those on the wire are one and the same."""
    mine = opened(folders[0])
    data = context.read_log(mine, 1, 0, MIB)
    parsed = context.parse(1, 0, data)
    assert parsed is not None
    runs = follower.pack_runs([WriteRun(1, 0, 0, len(data), (data,))])
    assert b"".join(follower.unpack_runs(b"".join(runs))[0].buffers) == data
