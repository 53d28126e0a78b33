"""Verdicts while a broker is unreachable: kept on disk, sent when it is back, by this process or by
the next one.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import AsyncIterator, Sequence
from datetime import timedelta
from pathlib import Path

import pytest
from fake_cluster import Cluster, FakeGroup, FakeQueue, Peer, cluster
from support import eventually

import qmq
from qmq.client.connection.connection import ClientTiming
from qmq.client.consuming import ack_spool
from qmq.client.consuming.ack_spool import SpooledAck, SpoolOwner, unpack
from qmq.errors import InvalidArgument, NotMaster, UnknownConsumer
from qmq.wire import frame_payloads as wire
from qmq.wire.frame import Frame, FrameKind
from qmq.wire.frame_payloads import BY_GROUP_MS, RESUME, Settlement, Verdict

QUICK = ClientTiming(hand_in_retry_s=(0.01,))
ACK, NACK, DEAD, RELEASE = Verdict.ACK, Verdict.NACK, Verdict.DEAD, Verdict.RELEASE


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QMQ_STATE_DIR", str(tmp_path))
    return tmp_path / "verdicts"


@pytest.fixture
async def it(state: Path) -> AsyncIterator[Cluster]:
    async with cluster(2, timing=QUICK) as found:
        yield found


@pytest.fixture
def queues(it: Cluster) -> list[FakeQueue]:
    return [FakeQueue(group) for group in it.groups]


def files(state: Path) -> list[tuple[SpoolOwner, list[SpooledAck]]]:
    return [unpack(path.read_bytes()) for path in sorted(state.glob("*"))]


def kept(state: Path) -> list[Settlement]:
    return [each.settlement for _, verdicts in files(state) for each in verdicts]


async def away(group: FakeGroup) -> None:
    """All replicas die."""
    for replica in group.replicas:
        await replica.stop()


async def back(group: FakeGroup) -> None:
    for replica in group.replicas:
        await replica.start()


async def taken(
    mq: qmq.Client, queue: FakeQueue, bodies: list[bytes], *attempts: int, **how: object
) -> tuple[qmq.Consumer, qmq.Messages]:
    consumer = mq.consumer("s", "g", **{"ack": "explicit", "name": "worker", **how})  # type: ignore[arg-type]
    pulling = asyncio.create_task(consumer.pull(len(bodies)))
    await queue.deliver(bodies, *attempts)
    return consumer, await pulling


async def left_behind(it: Cluster, queue: FakeQueue, **how: object) -> SpoolOwner:
    """A client was closed while the broker was away, with verdicts on 0 (done) and 1 (failed) of 0
    to 3; the broker is back.
    """
    async with qmq.Client(it.meta.address, timing=QUICK) as mq:
        consumer, found = await taken(mq, queue, [b"0", b"1", b"2", b"3"], **how)
        await away(queue.group)
        await eventually(
            lambda: (
                not any(
                    each.session for each in consumer.attachments if each.group == queue.group.name
                )
            )
        )
        found[0].ack_later()
        found[1].nack(timedelta(minutes=1), "no runway")
    queue.frames.clear()
    queue.resume()
    await back(queue.group)
    return SpoolOwner(queue.group.name, queue.attaches[-1])


async def handed_in(mq: qmq.Client, state: Path) -> None:
    """Another consumer of the group comes, and the kept verdicts are gone."""
    pulling = asyncio.create_task(mq.consumer("s", "g", name="another").pull(1))
    await eventually(lambda: not files(state))
    pulling.cancel()


# --- in the same process --------------------------------------------------------------------------


async def test_nothing_is_written_while_brokers_can_be_reached(
    it: Cluster, queues: list[FakeQueue], state: Path
) -> None:
    consumer, found = await taken(it.mq, queues[0], [b"0", b"1", b"2"])
    await found[0].ack_sync()
    found[1].nack(error="x")
    await consumer.close()
    assert len(queues[0].settled) == 2
    assert not files(state)


async def test_verdicts_given_without_a_broker_are_kept_until_delivered(
    it: Cluster, queues: list[FakeQueue], state: Path
) -> None:
    consumer, found = await taken(it.mq, queues[0], [b"0", b"1", b"2", b"3", b"4"])
    await away(it.groups[0])
    await eventually(lambda: consumer.attachments[0].session is None)
    found[0].nack(error="first")
    found[1].reject("second")
    waiting = asyncio.create_task(found[2].ack_sync())
    found[3].ack_later()
    await eventually(lambda: len(kept(state)) == 4)
    ((owner, _),) = files(state)
    assert sorted(kept(state)) == [
        Settlement(0, 0, NACK, BY_GROUP_MS, "first"),
        Settlement(1, 1, DEAD, 0, "second"),
        Settlement(2, 2, ACK, 0),
        Settlement(3, 3, ACK, 0),
    ]
    assert owner == SpoolOwner(
        "g0",
        wire.Attach("s", 0, "g", "worker", consumer.incarnation, 4, RESUME, 30_000, [], [], ""),
    )
    queues[0].resume()
    await back(it.groups[0])
    await waiting
    await eventually(lambda: sum(each.last - each.first + 1 for each in queues[0].settled) == 4)
    await eventually(lambda: not files(state))


async def test_an_unanswered_verdict_is_kept_when_the_broker_stops(
    it: Cluster, queues: list[FakeQueue], state: Path
) -> None:
    queues[0].is_silent = True
    consumer, found = await taken(it.mq, queues[0], [b"0", b"1"])
    found[0].nack(error="unheard")
    await eventually(lambda: bool(queues[0].settled))
    assert not files(state)
    await away(it.groups[0])
    await eventually(lambda: kept(state) == [Settlement(0, 0, NACK, BY_GROUP_MS, "unheard")])
    queues[0].is_silent = False
    queues[0].resume()
    await back(it.groups[0])
    await eventually(lambda: not files(state))
    assert len(queues[0].settled) == 2
    await consumer.close()


async def test_what_became_void_is_kept_no_longer_before_anything_else_is_handed_out(
    it: Cluster, queues: list[FakeQueue], state: Path
) -> None:
    consumer, found = await taken(it.mq, queues[0], [b"%d" % number for number in range(6)])
    await away(it.groups[0])
    await eventually(lambda: consumer.attachments[0].session is None)
    found.nack(error="x")
    await eventually(lambda: len(kept(state)) == 1)
    queues[0].is_silent = True
    queues[0].attached = wire.Attached(1, 30_000, 4, 1)
    await back(it.groups[0])
    await queues[0].pull()
    ((owner, _),) = files(state)
    assert (kept(state), owner.attach.received) == ([Settlement(0, 3, NACK, BY_GROUP_MS, "x")], 3)
    await away(it.groups[0])
    queues[0].pulls.clear()
    queues[0].is_silent = False
    queues[0].attached = wire.Attached(1, 30_000, 9, 0)
    await back(it.groups[0])
    await queues[0].pull()
    assert not files(state), "the lease was lost: nothing is ours"
    await consumer.close()


async def test_consumers_continue_on_a_full_disk(
    it: Cluster,
    queues: list[FakeQueue],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(ack_spool.os, "write", full)
    consumer, found = await taken(it.mq, queues[0], [b"0", b"1"])
    with caplog.at_level(logging.WARNING, "qmq.client"):
        await away(it.groups[0])
        await eventually(lambda: consumer.attachments[0].session is None)
        found.nack(error="x")
        await eventually(lambda: "No space left" in caplog.text)
    queues[0].resume()
    await back(it.groups[0])
    await eventually(lambda: queues[0].settled == [Settlement(0, 1, NACK, BY_GROUP_MS, "x")])


async def test_without_a_folder_verdicts_wait_in_memory(
    it: Cluster, queues: list[FakeQueue], state: Path
) -> None:
    async with qmq.Client(it.meta.address, timing=QUICK, state_dir=False) as mq:
        _, found = await taken(mq, queues[0], [b"0"])
        await away(it.groups[0])
        found.nack(error="x")
        queues[0].resume()
        await back(it.groups[0])
        await eventually(lambda: queues[0].settled == [Settlement(0, 0, NACK, BY_GROUP_MS, "x")])
    assert not files(state)


# --- in the next process --------------------------------------------------------------------------


async def test_closing_while_the_broker_is_away_leaves_everything_for_the_next_start(
    it: Cluster, queues: list[FakeQueue], state: Path
) -> None:
    async with qmq.Client(it.meta.address, timing=QUICK) as mq:
        consumer = mq.consumer("s", "g", name="worker")
        following = asyncio.create_task(anext(consumer))
        await queues[0].deliver([b"0", b"1", b"2"])
        await following
        await away(it.groups[0])
        await eventually(
            lambda: any(
                each.group == "g0" and each.session is None for each in consumer.attachments
            )
        )
        await consumer.close(ValueError("broken"))
    assert sorted(kept(state)) == [
        Settlement(0, 0, NACK, BY_GROUP_MS, "ValueError: broken"),
        Settlement(1, 2, RELEASE, 0),
    ]


async def test_the_next_client_hands_in_as_the_one_that_was(
    it: Cluster, queues: list[FakeQueue], state: Path
) -> None:
    before = await left_behind(it, queues[0])
    (queue, other) = queues
    consumer = it.mq.consumer("s", "g", name="another")
    following = asyncio.create_task(anext(consumer))
    await eventually(lambda: queue.detached == 1 and not files(state))
    resumed = next(each for each in queue.attaches if each.start == RESUME)
    assert (resumed.consumer, resumed.incarnation, resumed.received) == (
        "worker",
        before.attach.incarnation,
        3,
    )
    done, failed = queue.settled
    assert done == Settlement(0, 0, ACK, 0)
    assert failed._replace(delay_ms=0) == Settlement(1, 1, NACK, 0, "no runway")
    assert 50_000 < failed.delay_ms <= 60_000, "the delay began when the verdict was given"
    await other.deliver([b"x"])
    assert (await following).body == b"x"


async def test_interceptors_hear_of_messages_sent_on_behalf_of_others(
    it: Cluster, queues: list[FakeQueue], state: Path
) -> None:
    await left_behind(it, queues[0])
    reports: list[qmq.SettleReport] = []

    class Settled(qmq.BaseInterceptor):
        def settled(self, report: qmq.SettleReport) -> None:
            reports.append(report)

    async with qmq.Client(it.meta.address, timing=QUICK, interceptors=[Settled()]) as mq:
        await handed_in(mq, state)
    assert [
        (each.subject, each.group, each.broker_group, dict(each.verdicts)) for each in reports
    ] == [("s", "g", "g0", {"ack": 1, "nack": 1})]


async def test_who_comes_back_under_its_name_hands_in_before_it_attaches(
    it: Cluster, queues: list[FakeQueue], state: Path
) -> None:
    await left_behind(it, queues[0])
    queue = queues[0]
    consumer = it.mq.consumer("s", "g", name="worker")
    pulling = asyncio.create_task(consumer.pull(1))
    await queue.pull()
    assert queue.frames == [
        FrameKind.ATTACH,
        FrameKind.SETTLE,
        FrameKind.DETACH,
        FrameKind.ATTACH,
        FrameKind.PULL,
    ]
    assert [each.start for each in queue.attaches[-2:]] == [RESUME, "earliest"]
    assert not files(state)
    pulling.cancel()


async def test_it_waits_while_another_hands_that_in(
    it: Cluster, queues: list[FakeQueue], state: Path
) -> None:
    await left_behind(it, queues[0])
    queue = queues[0]
    queue.is_silent = True
    other = it.mq.consumer("s", "g", name="another")
    others = asyncio.create_task(other.pull(1))
    await eventually(lambda: bool(queue.settles))
    async with qmq.Client(it.meta.address, timing=QUICK) as mq:
        mine = asyncio.create_task(mq.consumer("s", "g", name="worker").pull(1))
        await eventually(lambda: len(it.groups[0].replicas[0].peers) == 2)
        queue.is_silent = False
        for peer in list(it.groups[0].replicas[0].peers):
            peer.cut()
        await eventually(
            lambda: any(
                each.consumer == "worker" and each.start == "earliest"
                for each in queue.attaches[1:]
            )
        )
        starts = [(each.consumer, each.start) for each in queue.attaches[1:]]
        assert starts.index(("worker", RESUME)) < starts.index(("worker", "earliest"))
        assert queue.detached == 1
        for task in (mine, others):
            task.cancel()


async def test_kept_verdicts_are_dropped_if_the_lease_was_lost(
    it: Cluster, queues: list[FakeQueue], state: Path
) -> None:
    await left_behind(it, queues[0])
    queues[0].attached = wire.Attached(0, 30_000, 0, 0)
    await handed_in(it.mq, state)
    assert (queues[0].settled, queues[0].detached) == ([], 0)


@pytest.mark.parametrize("where", [FrameKind.ATTACH, FrameKind.SETTLE, FrameKind.DETACH])
async def test_a_request_lost_with_its_connection_is_sent_again(
    it: Cluster, queues: list[FakeQueue], state: Path, where: int
) -> None:
    await left_behind(it, queues[0])
    (replica, _) = it.groups[0].replicas
    proper = replica.handle[where]
    cuts: list[int] = []

    def cut_first(peer: Peer, request: Frame) -> None:
        if len(cuts) < 2:
            cuts.append(request.kind)
            peer.cut()
        else:
            proper(peer, request)

    replica.handle[where] = cut_first
    await handed_in(it.mq, state)
    assert {(each.first, each.verdict) for each in queues[0].settled} == {(0, ACK), (1, NACK)}


async def test_the_sender_retries_until_the_broker_is_back_while_others_are_consumed(
    it: Cluster, queues: list[FakeQueue], state: Path
) -> None:
    await left_behind(it, queues[0])
    await away(it.groups[0])
    consumer = it.mq.consumer("s", "g", name="another")
    for number in range(3):
        pulling = asyncio.create_task(consumer.pull(1))
        await queues[1].deliver([b"%d" % number])
        await (await pulling).ack_sync()
    assert len(files(state)) == 1
    await back(it.groups[0])
    await eventually(lambda: not files(state))
    assert len(queues[0].settled) == 2


async def test_a_new_master_is_found(it: Cluster, queues: list[FakeQueue], state: Path) -> None:
    await left_behind(it, queues[0])
    old, _ = it.groups[0].replicas

    def refuse(peer: Peer, request: Frame) -> None:
        it.groups[0].fail_over()
        peer.refuse(request, NotMaster("moved"))

    old.handle[FrameKind.ATTACH] = refuse
    await handed_in(it.mq, state)
    assert len(queues[0].settled) == 2


@pytest.mark.parametrize(
    "failure", [InvalidArgument("no such start"), UnknownConsumer("the lease ended")]
)
async def test_what_a_broker_will_never_take_is_let_go_with_a_warning(
    it: Cluster,
    queues: list[FakeQueue],
    state: Path,
    failure: qmq.QmqError,
    caplog: pytest.LogCaptureFixture,
) -> None:
    await left_behind(it, queues[0])
    for replica in it.groups[0].replicas:
        replica.handle[FrameKind.SETTLE] = lambda peer, request: peer.refuse(request, failure)
    with caplog.at_level(logging.WARNING, "qmq.client"):
        await handed_in(it.mq, state)
    assert "verdicts of consumer worker are lost" in caplog.text


async def test_many_consumers_that_start_hand_it_in_once(
    it: Cluster, queues: list[FakeQueue], state: Path
) -> None:
    await left_behind(it, queues[0])
    consumers = [it.mq.consumer("s", "g", name=f"another{number}") for number in range(5)]
    pulling = [asyncio.create_task(each.pull(1)) for each in consumers]
    await eventually(lambda: [each.start for each in queues[1].attaches].count("earliest") == 6)
    await eventually(lambda: not files(state))
    assert [each.start for each in queues[0].attaches].count(RESUME) == 1
    await _cancelled(pulling)


async def test_a_consumer_that_is_closed_meanwhile_leaves_the_file_to_the_next(
    it: Cluster, queues: list[FakeQueue], state: Path
) -> None:
    await left_behind(it, queues[0])
    await away(it.groups[0])
    consumer = it.mq.consumer("s", "g", name="another")
    pulling = asyncio.create_task(consumer.pull(1))
    await queues[1].pull()
    await consumer.close()
    await _cancelled([pulling])
    assert len(files(state)) == 1
    await back(it.groups[0])
    following = asyncio.create_task(it.mq.consumer("s", "g", name="third").pull(1))
    await eventually(lambda: not files(state))
    await _cancelled([following])


async def _cancelled(tasks: Sequence[asyncio.Task[qmq.Messages]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
