"""Masters of a broker group as a reader follows them: a new master is found, safe requests are
repeated, and stored data is found after a crash.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from support import eventually, node_config, running
from support.clusters import REPLICATED, cluster

import qmq
from qmq.columns.servers.connection import BlockingConnection
from qmq.columns.servers.log import ServerAddress, action_groups, committed_actions
from qmq.columns.servers.metaservers import Metadata, RetryDeadline
from qmq.columns.servers.reading import MasterConnections
from qmq.errors import InvalidArgument, NotConnected, Outcome, QmqError, UnknownSubject
from qmq.log.actions import decode_actions
from qmq.model import SubjectConfig
from qmq.wire import frame_payloads as wire
from qmq.wire.batch import Kind, encode, unwrap
from qmq.wire.batch_columns import Columns
from qmq.wire.frame import FrameKind

PRODUCER = 77


@contextmanager
def masters_of(
    servers: str, retry_ms: int = 20_000, *, delayed: bool = False
) -> Iterator[MasterConnections]:
    metadata = Metadata(servers, retry_ms)
    found = MasterConnections(metadata, delayed=delayed)
    try:
        yield found
    finally:
        found.close()
        metadata.close()


def batch(number: int, count: int = 3) -> bytes:
    return b"".join(
        encode(
            b"s",
            Columns([b"x"] * count),
            producer_id=PRODUCER,
            batch_sequence=number,
            create_time_ms=1,
        )
    )


def find(masters: MasterConnections, group: str = "g1", before: int = 1 << 40) -> list[list[int]]:
    request = wire.Find("s", 0, f"{PRODUCER:016x}", before, 10)
    return wire.FoundBatches.unpack(masters.call("s", group, FrameKind.FIND, request.pack())).found


async def test_what_an_attempt_stored_before_it_died_is_found_at_the_next_master_too(
    tmp_path: Path,
) -> None:
    async with cluster(tmp_path, REPLICATED) as it, qmq.connect(it.servers) as mq:
        await mq.metadata.create_subject(SubjectConfig("s", groups=("g1",)))
        with masters_of(it.servers) as masters:

            def attempt() -> list[list[int]]:
                channel = masters.take("s", "g1")
                for number in range(3):
                    channel.send(FrameKind.PRODUCE, batch(number))
                channel.receive()
                channel.close()  # the attempt dies: of two of its batches it has not heard
                return find(masters)

            assert await asyncio.to_thread(attempt) == [[2, 6, 3], [1, 3, 3], [0, 0, 3]]
            await it.crash((await it.master("g1")).config.replica)
            assert await asyncio.to_thread(find, masters) == [[2, 6, 3], [1, 3, 3], [0, 0, 3]]


async def test_a_connection_that_was_given_back_is_used_again_and_one_that_was_lost_is_not(
    tmp_path: Path,
) -> None:
    async with cluster(tmp_path) as it, qmq.connect(it.servers) as mq:
        await mq.metadata.create_subject(SubjectConfig("s", groups=("g1",)))
        with masters_of(it.servers) as masters:

            def use() -> None:
                first, second = masters.take("s", "g1"), masters.take("s", "g1")
                assert first is not second
                masters.give("g1", first)
                assert masters.take("s", "g1") is first
                masters.lose("g1", first, NotConnected("gone"))
                masters.give("g1", second)
                assert not first.is_open
                assert masters.take("s", "g1") is second
                second.close()

            await asyncio.to_thread(use)


async def test_a_broker_that_does_not_know_a_subject_yet_is_asked_again(tmp_path: Path) -> None:
    async with cluster(tmp_path) as it, qmq.connect(it.servers) as mq:
        await mq.metadata.create_subject(SubjectConfig("s", groups=("g1",)))
        asked: list[BlockingConnection] = []

        def act(channel: BlockingConnection) -> str:
            asked.append(channel)
            if len(asked) < 3:
                raise UnknownSubject("there is no subject 's'")
            return "known"

        with masters_of(it.servers) as masters:
            with pytest.raises(UnknownSubject):
                await asyncio.to_thread(masters.take, "t", "g1")
            assert await asyncio.to_thread(masters.ask, "s", "g1", act) == "known"
        asked.clear()
        with (
            masters_of(it.servers, 0) as masters,
            pytest.raises(NotConnected, match="does not know subject 's'"),
        ):
            await asyncio.to_thread(masters.ask, "s", "g1", act)


async def test_a_metaserver_that_is_away_is_passed_over(tmp_path: Path) -> None:
    async with cluster(tmp_path) as it, qmq.connect(it.servers) as mq:
        await mq.send("s", b"x")
        with closing(ServerAddress(f"127.0.0.1:1, {it.servers}", 10_000).open()) as log:
            assert await asyncio.to_thread(log.subjects) == ["s"]
            assert (
                sum(
                    each.end
                    for each in (await asyncio.to_thread(log.topology, ["s"])).queues.values()
                )
                == 1
            )


def test_the_timeout_restarts_with_every_step_and_ends_with_the_last_failure() -> None:
    patience = RetryDeadline(20)
    failure = NotConnected("away")
    patience.pause(failure)
    patience.renew()
    with pytest.raises(NotConnected) as raised:
        while True:
            patience.pause(failure)
    assert raised.value is failure
    assert patience.left_ms == 0


async def test_delayed_batches_are_found_and_fetched_at_the_delay_group(tmp_path: Path) -> None:
    async with running(node_config(tmp_path, delay=True)) as node, qmq.connect(node.address) as mq:
        await mq.metadata.create_subject(SubjectConfig("s"))
        due = node.broker.clock.time_ms() + 3_600_000
        region = encode(
            b"s",
            Columns([b"later"] * 2, due_times_ms=[due] * 2),
            producer_id=PRODUCER,
            batch_sequence=4,
            create_time_ms=1,
        )

        def write(masters: MasterConnections) -> tuple[list[list[int]], wire.Fetched]:
            (group,) = masters.locate("s").hosts
            masters.call("s", group, FrameKind.PRODUCE, *region)
            request = wire.Fetch("s", 0, 0, 1 << 40, 0, 1 << 20, [], [], [], 0)
            return find(masters, group), wire.unpack_fetched(
                masters.call("s", group, FrameKind.FETCH, request.pack())
            )[0]

        with masters_of(node.address, delayed=True) as masters:
            found, fetched = await asyncio.to_thread(write, masters)
        assert found == [[4, 0, 2]]
        assert (fetched.end_sequence, fetched.batches) == (2, 1)


# --- action logs ----------------------------------------------------------------------------------


async def consume(mq: qmq.Client, count: int) -> None:
    async with mq.consumer("s", group="g") as consumer:
        for _ in range(count):
            await (await anext(aiter(consumer))).ack_sync()


async def test_the_committed_action_log_of_a_broker_group_says_what_was_consumed(
    tmp_path: Path,
) -> None:
    async with running(node_config(tmp_path, delay=True)) as node, qmq.connect(node.address) as mq:
        await mq.send_many("s", [b"x"] * 5)
        await consume(mq, 5)
        address = ServerAddress(node.address, 5_000)
        groups = await asyncio.to_thread(action_groups, address)
        assert groups == [node.config.broker.name]
        entries = await asyncio.to_thread(lambda: list(committed_actions(address, groups[0])))
        assert {envelope.kind for envelope, _ in entries} == {Kind.ACTIONS}
        assert [envelope.index for envelope, _ in entries] == sorted(
            envelope.index for envelope, _ in entries
        )
        names = {
            type(action).__name__
            for _, region in entries
            for action in decode_actions(unwrap(region))
        }
        assert {"Begin", "Join", "PullAction", "SettleAction"} <= names
        with pytest.raises(InvalidArgument, match="there are"):
            await asyncio.to_thread(lambda: list(committed_actions(address, "nobody")))


async def test_uncommitted_actions_are_not_reported(tmp_path: Path) -> None:
    async with running(node_config(tmp_path)) as node, qmq.connect(node.address) as mq:
        await mq.send_many("s", [b"x"] * 5)
        await consume(mq, 5)
        address = ServerAddress(node.address, 5_000)
        whole = await asyncio.to_thread(
            lambda: list(committed_actions(address, node.config.broker.name))
        )
        store = node.broker.store
        # the end of a flush is a turn, which commits everything
        await eventually(lambda: store.is_flushed)
        committed, store.committed_index = store.committed_index, whole[1][0].index
        assert (
            await asyncio.to_thread(
                lambda: list(committed_actions(address, node.config.broker.name))
            )
            == whole[:2]
        )
        store.committed_index = committed


async def test_an_unknown_outcome_says_so(tmp_path: Path) -> None:
    """A writer has to know, because it may only look such a batch up again, at the same queue."""
    async with cluster(tmp_path) as it, qmq.connect(it.servers) as mq:
        await mq.metadata.create_subject(SubjectConfig("s", groups=("g1",)))
        with masters_of(it.servers, 0) as masters:
            channel = await asyncio.to_thread(masters.take, "s", "g1")
            await it.stop("g1-a")
            with pytest.raises(QmqError) as raised:
                await asyncio.to_thread(channel.call, FrameKind.PRODUCE, batch(0))
            assert raised.value.outcome is Outcome.UNKNOWN
