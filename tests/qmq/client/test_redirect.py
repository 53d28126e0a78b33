"""Finding the master again: after a redirection, a push, or the answer of a lagging metaserver; and
not asking too often.
"""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from fake_cluster import NOT_STORED, UNKNOWN, FakeBroker, Peer, Sent, cluster, route
from support import eventually

import qmq
from qmq.errors import CoordinationUnavailable, DeadlineExceeded, NotMaster
from qmq.wire.frame import Frame


async def test_a_producer_follows_the_mastership_and_stores_everything_once_in_order() -> None:
    async with cluster(1) as it:
        (group,) = it.groups
        producer = it.mq.producer("s", batch_messages=5)
        for number in range(600):
            producer.send(b"%d" % number)
            if number % 100 == 50:
                await asyncio.sleep(0)
                group.fail_over(to=group.epoch % 2)
        await producer.flush()
        assert group.bodies == [b"%d" % number for number in range(600)]


async def test_batches_staged_at_a_master_that_is_deposed_are_stored_once_by_the_next() -> None:
    async with cluster(2) as it:
        group = it.groups[0]

        def depose(broker: FakeBroker, peer: Peer, request: Frame, sent: Sent) -> None:
            if broker is group.replicas[0]:
                if sent.number % 2:
                    group.store(sent)
                group.fail_over()
                peer.refuse(request, NotMaster("mastership lost before commit", outcome=UNKNOWN))
            else:
                group.serve(broker, peer, request, sent)

        group.on_produce = depose
        receipts = [await it.mq.send("s", b"%d" % number) for number in range(100)]
        assert Counter(it.bodies) == Counter(b"%d" % number for number in range(100))
        assert {receipt.broker_group for receipt in receipts} == {"g0", "g1"}


async def test_a_hanging_master_is_left_at_a_push_and_its_batches_are_stored_once() -> None:
    async with cluster(1, can_push=True) as it:
        (group,) = it.groups
        await it.mq.send("s", b"0")
        await it.meta.is_watched.wait()
        group.on_produce = group.store_silently
        sending = asyncio.create_task(it.mq.send("s", b"1"))
        await eventually(lambda: len(group.arrived) == 2)
        group.on_produce = group.serve
        group.is_deaf = True
        group.fail_over()
        it.meta.push(groups=["g0"])
        async with asyncio.timeout(10):
            await sending
        assert group.bodies == [b"0", b"1"]
        assert group.arrived[-1] == group.arrived[-2]
        assert group.replicas[1].peers


async def test_the_answer_of_a_lagging_metaserver_is_ignored_and_the_next_is_asked() -> None:
    async with cluster(1, metas=2) as it:
        (group,) = it.groups
        await it.mq.send("s", b"0")
        old = [route(group)]
        group.fail_over()
        new = [route(group)]
        it.metas[0].answer = it.metas[1].answer = lambda _: new
        await it.mq.send("s", b"1")
        group.fail_over(to=0)
        it.metas[0].answer = lambda _: old
        it.metas[1].answer = lambda _: [route(group)]
        await it.mq.send("s", b"2")
        assert group.bodies == [b"0", b"1", b"2"]


async def test_a_failover_of_many_subjects_asks_once_for_all_and_keeps_pauses() -> None:
    async with cluster(1) as it:
        (group,) = it.groups
        producers = [it.mq.producer(f"s{number}") for number in range(200)]
        await asyncio.gather(*[_send(producer, b"0") for producer in producers])
        assert len(set(it.meta.located)) == 200  # on a slow machine some ask twice
        it.meta.located.clear()
        lagging, group.master = route(group), None
        it.meta.answer = lambda _: [lagging]
        sending = asyncio.gather(*[_send(producer, b"1") for producer in producers])
        await eventually(lambda: len(it.meta.located) == 5)
        group.fail_over()
        it.meta.answer = lambda _: [route(group)]
        await sending
        assert len(it.meta.located) <= 8
        assert len(group.bodies) == 400


async def _send(producer: qmq.Producer, body: bytes) -> None:
    await producer.send(body)


async def test_a_store_that_is_away_is_asked_again() -> None:
    async with cluster(1) as it:
        tries = Counter[str]()

        def stumble(subject: str) -> list[object]:
            tries[subject] += 1
            if tries[subject] < 3:
                raise CoordinationUnavailable("no member answers")
            return [route(it.groups[0])]

        it.meta.answer = stumble  # type: ignore[assignment]
        await it.mq.send("s", b"x")
        assert it.bodies == [b"x"]


async def test_metaservers_take_over_from_each_other() -> None:
    async with cluster(1, metas=2, can_push=True) as it:
        await it.mq.send("s", b"0")
        await eventually(lambda: any(meta.watchers for meta in it.metas))
        watched = next(meta for meta in it.metas if meta.watchers)
        other = next(meta for meta in it.metas if meta is not watched)
        watched.end_streams()
        assert watched.server is not None
        await watched.server.stop(None)
        await other.is_watched.wait()
        it.groups[0].fail_over()
        await it.mq.send("s", b"1")
        assert it.bodies == [b"0", b"1"]


async def test_what_was_missed_while_no_stream_stood_is_asked_for() -> None:
    async with cluster(1, can_push=True) as it:
        await it.mq.send("s", b"0")
        await it.meta.is_watched.wait()
        it.meta.located.clear()
        it.groups[0].fail_over()
        it.meta.end_streams()
        await it.meta.is_watched.wait()
        await eventually(lambda: it.meta.located)  # although nobody sends
        await it.mq.send("s", b"1")
        assert it.bodies == [b"0", b"1"]


async def test_clients_work_with_a_metaserver_that_does_not_push() -> None:
    async with cluster(1, metas=2) as it:
        await it.mq.send("s", b"0")
        # it asked, and is refused
        await eventually(lambda: any(each.is_watched.is_set() for each in it.metas))
        it.groups[0].fail_over()
        await it.mq.send("s", b"1")
        assert it.bodies == [b"0", b"1"]


@pytest.mark.parametrize("outcome", [NOT_STORED, UNKNOWN])
async def test_a_broker_group_without_a_master_fails_with_the_known_reason(
    outcome: qmq.Outcome,
) -> None:
    async with cluster(1) as it:
        (group,) = it.groups
        await it.mq.send("s", b"0")
        group.refuse(NotMaster("none of us is", outcome=outcome))
        with pytest.raises(DeadlineExceeded, match=r"E306|E301") as failed:
            await it.mq.producer("s", delivery_timeout_s=2).send(b"1")
        assert failed.value.outcome is outcome
        group.on_produce = group.serve
        await it.mq.send("s", b"2")


async def test_a_subject_that_is_placed_elsewhere_is_sent_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with cluster(2, can_push=True) as it:
        first, second = it.groups
        it.meta.answer = lambda _: [route(first)]
        await it.mq.send("s", b"0")
        await it.meta.is_watched.wait()
        it.meta.answer = lambda _: [route(second)]
        it.meta.push(subjects=["s"])
        async with asyncio.timeout(10):
            while not second.stored:
                await it.mq.send("s", b"more")
        before = len(first.arrived)
        await it.mq.send("s", b"last")
        assert len(first.arrived) == before


async def test_a_groups_first_master_is_used_as_soon_as_it_is_pushed() -> None:
    async with cluster(2, can_push=True) as it:
        second = it.groups[1]
        first_master, second.master = second.master, None
        await it.mq.send("s", b"0")
        await it.meta.is_watched.wait()
        second.master = first_master
        it.meta.push(groups=["g1"])
        async with asyncio.timeout(10), it.mq.producer("s") as producer:
            while not second.stored:
                await producer.send(b"more")
