"""Spark's side of the log against real processes: a master that is killed, or stopped in the middle
of an answer, is followed.
"""

from __future__ import annotations

import asyncio
from contextlib import closing

import pytest
from system.group import Group

import qmq
from qmq.columns.model import QueueKey, QueuePiece, ReadSelection
from qmq.columns.servers import reading
from qmq.columns.servers.log import ServerAddress
from qmq.columns.servers.metaservers import Metadata
from qmq.columns.servers.reading import MasterConnections
from qmq.model import SubjectConfig
from qmq.wire import frame_payloads as wire
from qmq.wire.batch import BatchView, encode
from qmq.wire.batch_columns import Columns
from qmq.wire.frame import FrameKind

pytestmark = pytest.mark.xdist_group("faults")

BATCHES, COUNT = 200, 20
PRODUCER = 4711


async def filled(group: Group, subject: str) -> QueuePiece:
    """A subject with so many batches."""
    await group.settled()
    async with qmq.connect(group.server) as mq:
        await mq.metadata.create_subject(SubjectConfig(subject, groups=("g1",)))
        for each in range(BATCHES):
            await mq.send_many(subject, [b"%d-%d" % (each, n) for n in range(COUNT)])
    return QueuePiece(QueueKey(subject, 0, "g1"), 0, BATCHES * COUNT)


@pytest.mark.parametrize("fault", ["kill", "stop"])
async def test_a_read_continues_batch_for_batch_when_the_master_is_lost(
    group: Group, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setattr(reading, "FETCH_BYTES", 4096)
    piece = await filled(group, f"spark.{fault}")
    with closing(ServerAddress(group.server, answer_s=2.0).open()) as log:
        reader = log.read(piece, ReadSelection(), skips_lost=False)
        found = [await asyncio.to_thread(next, reader) for _ in range(5)]
        master = await group.master()
        await asyncio.to_thread(
            group.cluster.kill if fault == "kill" else group.cluster.pause, master
        )
        found += await asyncio.to_thread(list, reader)
        assert [batch.envelope.base_sequence for batch in found] == list(
            range(0, BATCHES * COUNT, COUNT)
        )
        bodies = [
            body
            for envelope, region in found
            for body in BatchView(envelope, bytes(region)).bodies()
        ]
        assert bodies == [b"%d-%d" % (each, n) for each in range(BATCHES) for n in range(COUNT)]
    await asyncio.to_thread(
        group.cluster.start if fault == "kill" else group.cluster.resume, master
    )
    await group.settled_peer(master)


async def test_messages_of_a_killed_master_are_found_or_sent_by_the_next_attempt(
    group: Group,
) -> None:
    """An attempt sends ten batches, and the master is killed with answers under way; the next one
    asks what is there, sends the rest.
    """
    subject = "spark.find"
    await group.settled()
    async with qmq.connect(group.server) as mq:
        await mq.metadata.create_subject(SubjectConfig(subject, groups=("g1",)))
    metadata = Metadata(group.server)
    masters = MasterConnections(metadata)

    def batch(number: int) -> bytes:
        return b"".join(
            encode(
                subject.encode(),
                Columns([b"%d" % number]),
                producer_id=PRODUCER,
                batch_sequence=number,
                create_time_ms=1,
            )
        )

    def find() -> dict[int, int]:
        request = wire.Find(subject, 0, f"{PRODUCER:016x}", 1 << 40, 100)
        found = wire.FoundBatches.unpack(
            masters.call(subject, "g1", FrameKind.FIND, request.pack())
        ).found
        return {number: sequence for number, sequence, _ in found}

    def attempt() -> None:
        sent = masters.take(subject, "g1")
        for number in range(10):
            sent.send(FrameKind.PRODUCE, batch(number))
        sent.receive()
        sent.close()

    await asyncio.to_thread(attempt)
    master = await group.master()
    await asyncio.to_thread(group.cluster.kill, master)
    found = await asyncio.to_thread(find)
    assert 0 in found
    for number in sorted(set(range(10)) - set(found)):
        await asyncio.to_thread(masters.call, subject, "g1", FrameKind.PRODUCE, batch(number))
    assert sorted(await asyncio.to_thread(find)) == list(range(10))
    with closing(ServerAddress(group.server).open()) as log:
        reader = log.read(
            QueuePiece(QueueKey(subject, 0, "g1"), 0, 10), ReadSelection(), skips_lost=False
        )
        stored = await asyncio.to_thread(list, reader)
    bodies = [
        body for envelope, region in stored for body in BatchView(envelope, bytes(region)).bodies()
    ]
    assert sorted(bodies) == sorted(b"%d" % number for number in range(10))
    masters.close()
    metadata.close()
    await asyncio.to_thread(group.cluster.start, master)
    await group.settled_peer(master)
