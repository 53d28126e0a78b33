"""Consuming from several broker groups, and coming back to a new master: what is still ours, what
is void, which verdicts are sent.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from datetime import timedelta
from itertools import groupby

import pytest
from fake_cluster import (
    NOT_STORED,
    UNKNOWN,
    Cluster,
    FakeGroup,
    FakeQueue,
    Peer,
    batch,
    cluster,
    route,
)
from support import eventually, forms
from support.invariants import check_group

import qmq
from qmq.client.connection.connection import TIMING, ClientTiming
from qmq.client.consuming.consumer import QUANTUM_MESSAGES
from qmq.errors import (
    MessagesExpired,
    NoQuorum,
    NotMaster,
    ProtocolViolation,
    StaleDelivery,
    UnknownConsumer,
)
from qmq.log.actions import Begin, Join, PullAction, Pulled, Return, SettleAction
from qmq.log.group_state import GroupState
from qmq.log.queue import apply_to
from qmq.wire import frame_payloads as wire
from qmq.wire.frame import Frame, FrameKind
from qmq.wire.frame_payloads import Range, Verdict

SHORT = timedelta(seconds=0.1)
ACK = Verdict.ACK


class Queue(FakeQueue):
    """The consuming side of a broker group: a test sets the answers and the deliveries."""

    def __init__(self, group: FakeGroup) -> None:
        super().__init__(group)
        self.stale = 0
        self.holds_answers = False
        self.held: list[tuple[Peer, Frame]] = []
        for replica in group.replicas:
            replica.handle[FrameKind.SETTLE] = self.settle

    def settle(self, peer: Peer, request: Frame) -> None:
        self.settles.append(wire.unpack_settle(request.payload))
        if self.holds_answers:
            self.held.append((peer, request))
        else:
            peer.answer(request, FrameKind.SETTLED, wire.pack_settled(0, self.stale))

    async def hand_out(self, pull: int, bodies: list[bytes], base: int = 0) -> None:
        """Answer the pull that waits: `bodies` are the messages from `base` on, under the pull
        sequences from `pull` on.
        """
        await eventually(lambda: bool(self.pulls))
        peer, request = self.pulls.pop(0)
        head = wire.pack_delivery(self.attached.session, pull, [Range(base, len(bodies), 1, 0)], 1)
        peer.answer(request, FrameKind.MESSAGES, head + batch(bodies, base))

    async def fail_over(self, next_pull: int, *, resumed: bool = True) -> None:
        """The other replica becomes master, and knows only deliveries before `next_pull`; wait
        until the consumer is attached again.
        """
        before = len(self.attaches)
        self.attached = wire.Attached(1, 30_000, next_pull, int(resumed))
        assert self.group.master is not None
        peers = list(self.group.master.peers)
        self.group.fail_over(to=self.group.epoch % 2)
        for peer in peers:
            peer.cut()
        await eventually(lambda: len(self.attaches) > before)
        await eventually(lambda: bool(self.pulls))

    def verdicts(self) -> list[tuple[int, int]]:
        return [(each.first, each.last) for each in self.settled]


@pytest.fixture
def timing() -> ClientTiming:
    return TIMING


@pytest.fixture
async def it(timing: ClientTiming) -> object:
    async with cluster(1, timing=timing) as found:
        yield found


async def taken(
    consumer: qmq.Consumer, queue: Queue, most: int, pull: int, bodies: list[bytes], base: int = 0
) -> qmq.Messages:
    """What a pull of the consumer gets of these messages; see `Queue.hand_out`."""
    pulling = asyncio.create_task(consumer.pull(most))
    await queue.hand_out(pull, bodies, base)
    return await pulling


async def test_what_the_new_master_knows_of_is_still_ours(it: Cluster) -> None:
    queue = Queue(it.groups[0])
    consumer = it.mq.consumer("s", "g", ack="explicit")
    seen = await taken(consumer, queue, 3, 0, [b"0", b"1", b"2", b"3", b"4"])
    await queue.fail_over(5)
    assert (queue.attaches[-1].received, queue.attaches[-1].incarnation) == (
        4,
        queue.attaches[0].incarnation,
    )
    assert (await consumer.pull(10)).bodies == [b"3", b"4"], "what nobody saw is not dropped"
    await seen.ack_sync()
    assert (queue.verdicts(), consumer.stale) == ([(0, 2)], 0)


def kept(queue: Queue) -> int:
    """The batch that the waiting pull names."""
    return wire.unpack_pull(queue.pulls[0][1].payload).kept


async def first_pull(
    it: Cluster, queue: Queue, delivery: bytes
) -> tuple[qmq.Consumer, qmq.Messages]:
    """A consumer, and what its first pull got, which names no batch."""
    consumer = it.mq.consumer("s", "g", ack="explicit")
    pulling = asyncio.create_task(consumer.pull(2))
    await eventually(lambda: bool(queue.pulls))
    assert kept(queue) == -1
    peer, request = queue.pulls.pop(0)
    peer.answer(request, FrameKind.MESSAGES, delivery)
    return consumer, await pulling


async def test_a_pull_names_the_batch_in_which_the_last_delivery_ended(it: Cluster) -> None:
    queue = Queue(it.groups[0])
    queue.attached = wire.Attached(1, 30_000, 0, 0, knows_kept=1)
    whole = batch([b"0", b"1", b"2"], 7)
    consumer, pulled = await first_pull(
        it, queue, wire.pack_delivery(1, 0, [Range(7, 2, 1, 0)], 1) + whole
    )
    assert pulled.bodies == [b"0", b"1"]
    await eventually(lambda: bool(queue.pulls))
    assert kept(queue) == 7
    peer, request = queue.pulls.pop(0)
    peer.answer(request, FrameKind.MESSAGES, wire.pack_delivery(1, 2, [Range(9, 1, 1, 0)], 0))
    assert (await consumer.pull(2)).bodies == [b"2"]
    await eventually(lambda: bool(queue.pulls))
    assert kept(queue) == -1


async def test_a_pull_names_no_batch_to_a_broker_that_does_not_know_of_it(it: Cluster) -> None:
    queue = Queue(it.groups[0])
    _, pulled = await first_pull(
        it, queue, wire.pack_delivery(1, 0, [Range(0, 1, 1, 0)], 1) + batch([b"0", b"1"], 0)
    )
    assert pulled.bodies == [b"0"]
    await eventually(lambda: bool(queue.pulls))
    assert len(queue.pulls[0][1].payload) == 16


async def test_a_pull_names_no_batch_of_an_earlier_session(it: Cluster) -> None:
    queue = Queue(it.groups[0])
    queue.attached = wire.Attached(1, 30_000, 0, 0, knows_kept=1)
    _, pulled = await first_pull(
        it, queue, wire.pack_delivery(1, 0, [Range(0, 1, 1, 0)], 1) + batch([b"0", b"1"], 0)
    )
    assert pulled.bodies == [b"0"]
    await eventually(lambda: bool(queue.pulls) and kept(queue) == 0)
    before = len(queue.attaches)
    queue.attached = wire.Attached(1, 30_000, 1, 1, knows_kept=1)
    queue.pulls[0][0].cut()
    await eventually(lambda: len(queue.attaches) > before and bool(queue.pulls))
    assert kept(queue) == -1


async def test_a_delivery_of_a_batch_that_never_came_is_refused(it: Cluster) -> None:
    queue = Queue(it.groups[0])
    with pytest.raises(ProtocolViolation):
        await first_pull(it, queue, wire.pack_delivery(1, 0, [Range(0, 1, 1, 0)], 0))


async def test_signs_of_life_go_by_the_lease_that_was_granted(it: Cluster) -> None:
    queue = Queue(it.groups[0])
    heard: list[Frame] = []
    queue.attached = wire.Attached(1, 30, 0, 0)

    def heartbeat(peer: Peer, request: Frame) -> None:
        heard.append(request)
        peer.answer(request, FrameKind.OK)

    for replica in it.groups[0].replicas:
        replica.handle[FrameKind.HEARTBEAT] = heartbeat
    async with it.mq.consumer("s", "g", lease_ms=3_600_000) as consumer:
        pulling = asyncio.create_task(consumer.pull(1))
        await eventually(lambda: len(heard) > 1)
        await queue.hand_out(0, [b"0"])
        await pulling


async def test_the_tail_a_new_master_forgot_is_void_and_its_numbers_mean_other_messages(
    it: Cluster,
) -> None:
    queue = Queue(it.groups[0])
    consumer = it.mq.consumer("s", "g", ack="explicit")
    seen = await taken(consumer, queue, 6, 0, [b"%d" % number for number in range(10)])
    await queue.fail_over(4)
    replacement = await taken(consumer, queue, 10, 4, [b"x", b"y", b"z"], base=50)
    assert replacement.bodies == [b"x", b"y", b"z"], "6 to 9, which nobody saw, are dropped"
    with pytest.raises(StaleDelivery, match="2 of the messages"):
        await seen.ack_sync()
    assert queue.verdicts() == [(0, 3)]
    seen[4].nack()
    seen[5].ack_later()
    replacement.ack_later()
    await eventually(lambda: len(queue.settled) == 2)
    assert (queue.verdicts(), consumer.stale) == ([(0, 3), (4, 6)], 2)
    with pytest.raises(StaleDelivery, match="did not know of the delivery"):
        await seen[4].ack_sync()
    await queue.fail_over(7)
    assert queue.attaches[-1].received == 6


@pytest.mark.parametrize("is_seen", [True, False])
async def test_a_group_that_does_not_know_us_any_more_voids_everything(
    it: Cluster, is_seen: bool
) -> None:
    queue = Queue(it.groups[0])
    consumer = it.mq.consumer("s", "g", ack="explicit")
    seen = await taken(consumer, queue, 3 if is_seen else 1, 0, [b"0", b"1", b"2"])
    await queue.fail_over(20, resumed=False)
    with pytest.raises(StaleDelivery):
        await seen.ack_sync()
    seen.ack_later()
    pulling = asyncio.create_task(consumer.pull(10))
    await queue.hand_out(20, [b"0", b"1", b"2"])
    await (await pulling).ack_sync()
    assert queue.verdicts() == [(20, 22)]
    await queue.fail_over(23)
    assert queue.attaches[-1].received == 22


async def test_a_verdict_whose_answer_was_lost_is_sent_again_if_it_is_still_ours(
    it: Cluster,
) -> None:
    queue = Queue(it.groups[0])
    consumer = it.mq.consumer("s", "g", ack="explicit")
    seen = await taken(consumer, queue, 10, 0, [b"%d" % number for number in range(10)])
    queue.holds_answers = True
    waiting = asyncio.create_task(seen[2].ack_sync())
    void = asyncio.create_task(seen[8].ack_sync())
    seen[3].ack_later()
    seen[7].nack()
    await eventually(lambda: len(queue.settled) == 4)
    queue.holds_answers, queue.stale = False, 1
    queue.settles.clear()
    await queue.fail_over(6)
    with pytest.raises(StaleDelivery):
        await void
    await waiting
    await eventually(lambda: len(queue.settled) == 2)
    assert sorted(queue.verdicts()) == [(2, 2), (3, 3)]
    assert consumer.stale == 1, (
        "the nack of 7; that the others settle nothing now means that they were settled before"
    )


@pytest.mark.parametrize(
    "failure",
    [NotMaster("moved"), NotMaster("staged", outcome=UNKNOWN), UnknownConsumer("no session")],
)
async def test_a_verdict_that_is_refused_because_the_session_is_over_is_sent_in_the_next(
    it: Cluster, failure: Exception
) -> None:
    (group,) = it.groups
    queue = Queue(group)
    consumer = it.mq.consumer("s", "g", ack="explicit")
    seen = await taken(consumer, queue, 10, 0, [b"0"])
    refused = []

    def refuse_once(peer: Peer, request: Frame) -> None:
        refused.append(request)
        for replica in group.replicas:
            replica.handle[FrameKind.SETTLE] = queue.settle
        peer.refuse(request, failure)  # type: ignore[arg-type]

    for replica in group.replicas:
        replica.handle[FrameKind.SETTLE] = refuse_once
    queue.attached = wire.Attached(1, 30_000, 1, 1)
    await seen.ack_sync()
    assert (len(refused), queue.verdicts(), len(queue.attaches)) == (1, [(0, 0)], 2)


@pytest.mark.parametrize("timing", [ClientTiming(session_retry_s=(0.01,))])
async def test_a_verdict_that_finds_no_quorum_is_tried_again(it: Cluster) -> None:
    (group,) = it.groups
    queue = Queue(group)
    consumer = it.mq.consumer("s", "g", ack="explicit")
    seen = await taken(consumer, queue, 10, 0, [b"0"])
    tries = []

    def refuse(peer: Peer, request: Frame) -> None:
        tries.append(request)
        if len(tries) < 3:
            peer.refuse(request, NoQuorum("alone", outcome=NOT_STORED))
        else:
            queue.settle(peer, request)

    group.replicas[0].handle[FrameKind.SETTLE] = refuse
    await seen.ack_sync()
    assert (len(tries), len(queue.attaches)) == (3, 1)


async def test_a_delivery_of_the_old_master_that_comes_after_we_left_is_not_taken() -> None:
    async with cluster(1, can_push=True) as it:
        (group,) = it.groups
        queue = Queue(group)
        consumer = it.mq.consumer("s", "g", ack="explicit")
        pulling = asyncio.create_task(consumer.pull(10))
        await eventually(lambda: bool(queue.pulls))
        peer, request = queue.pulls[0]
        await it.meta.is_watched.wait()
        group.is_deaf = True
        group.fail_over()
        it.meta.push(groups=["g0"])
        await eventually(lambda: len(queue.attaches) == 2)
        peer.answer(
            request,
            FrameKind.MESSAGES,
            wire.pack_delivery(1, 0, [Range(0, 1, 1, 0)], 1) + batch([b"old"], 0),
        )
        await queue.hand_out(0, [b"new"])
        assert (await pulling).bodies == [b"new"]


async def test_groups_are_consumed_in_turn_and_verdicts_go_to_the_messages_group() -> None:
    async with cluster(3) as it:
        it.groups[1].is_writable = False
        queues = [Queue(group) for group in it.groups]
        consumer = it.mq.consumer("s", "g")
        first = asyncio.create_task(anext(consumer))
        for number, queue in enumerate(queues):
            await queue.hand_out(0, [b"%d" % number] * 150)
        messages = [await first]
        await eventually(lambda: all(len(each.slices) > 0 for each in consumer.attachments))
        while len(messages) < 450:
            messages.append(await anext(consumer))
        assert Counter(message.broker_group for message in messages) == {
            "g0": 150,
            "g1": 150,
            "g2": 150,
        }
        assert all(int(message.body) == int(message.broker_group[1:]) for message in messages)
        turns = [
            len(list(turn))
            for _, turn in groupby(messages[1:], key=lambda message: message.broker_group)
        ]
        assert max(turns) <= QUANTUM_MESSAGES + 1, "nobody is served until another one is empty"
        await consumer.close()
        for queue in queues:
            assert sum(each.last - each.first + 1 for each in queue.settled) == 150


async def test_pulled_messages_are_of_one_group() -> None:
    async with cluster(2) as it:
        queues = [Queue(group) for group in it.groups]
        consumer = it.mq.consumer("s", "g", ack="explicit")
        pulling = asyncio.create_task(consumer.pull(10))
        await queues[1].hand_out(0, [b"1", b"1"])
        found = await pulling
        assert (found.broker_group, found.bodies) == ("g1", [b"1", b"1"])
        await found.ack_sync()
        assert (queues[0].verdicts(), queues[1].verdicts()) == ([], [(0, 1)])
        assert len(none := await consumer.pull(10, timedelta(0))) == 0
        assert none.broker_group == ""


async def test_the_prefetch_is_a_total_and_with_one_message_the_groups_take_turns() -> None:
    async with cluster(3) as it:
        queues = [Queue(group) for group in it.groups]
        asked = Counter[str]()
        for queue in queues:
            for replica in queue.group.replicas:
                replica.handle[FrameKind.PULL] = _empty(queue.group, asked)
        consumer = it.mq.consumer("s", "g", prefetch=1, ack="explicit")
        pulling = asyncio.create_task(consumer.pull(1))
        await eventually(lambda: min(asked[group.name] for group in it.groups) >= 3)
        assert sum(each.asked for each in consumer.attachments) <= 1
        pulling.cancel()


def _empty(group: FakeGroup, asked: Counter[str]) -> object:
    def answer(peer: Peer, request: Frame) -> None:
        pull = wire.unpack_pull(request.payload)
        assert pull.messages_max == 1
        assert pull.wait_ms <= 100
        asked[group.name] += 1
        peer.answer(request, FrameKind.MESSAGES, wire.pack_delivery(pull.session, 0, [], 0))

    return answer


@pytest.mark.parametrize("is_pushed", [True, False])
async def test_a_group_that_becomes_known_later_is_consumed_too(is_pushed: bool) -> None:
    timing = TIMING if is_pushed else ClientTiming(refresh_s=0.05)
    async with cluster(2, can_push=is_pushed, timing=timing) as it:
        first, second = it.groups
        queues = [Queue(group) for group in it.groups]
        it.meta.answer = lambda _: [route(first)]
        consumer = it.mq.consumer("s", "g", ack="explicit", start="latest")
        pulling = asyncio.create_task(consumer.pull(10))
        await eventually(lambda: bool(queues[0].pulls))
        it.meta.answer = lambda _: [route(first), route(second)]
        if is_pushed:
            await it.meta.is_watched.wait()
            it.meta.push(subjects=["s"])
        await queues[1].hand_out(0, [b"late"])
        assert (await pulling).bodies == [b"late"]
        assert [queue.attaches[0].start for queue in queues] == ["latest", "earliest"], (
            "what is there was sent since we came"
        )


async def test_a_group_that_is_away_does_not_keep_the_others_messages_back() -> None:
    async with cluster(2) as it:
        for replica in it.groups[0].replicas:
            await replica.stop()
        queue = Queue(it.groups[1])
        consumer = it.mq.consumer("s", "g")
        taking = asyncio.create_task(anext(consumer))
        await queue.hand_out(0, [b"x"])
        assert (await taking).body == b"x"


async def test_expired_messages_are_reported_to_one_group_and_the_others_continue() -> None:
    async with cluster(2) as it:
        queues = [Queue(group) for group in it.groups]
        for replica in it.groups[0].replicas:
            replica.handle[FrameKind.PULL] = lambda peer, request: peer.refuse(
                request, MessagesExpired("gone")
            )
        consumer = it.mq.consumer("s", "g", ack="explicit")
        with pytest.raises(MessagesExpired):
            await consumer.pull(1)
        queues[0].group.replicas[0].handle[FrameKind.PULL] = lambda *_: None
        pulling = asyncio.create_task(consumer.pull(1))
        await queues[1].hand_out(0, [b"x"])
        assert (await pulling).bodies == [b"x"]


async def test_skipping_what_expired_in_one_group_does_not_move_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with cluster(2) as it:
        queues = [Queue(group) for group in it.groups]
        resets: list[tuple[str, str, str | None]] = []

        async def reset(subject: str, group: str, *, to: str, broker_group: str | None) -> None:
            assert to == "earliest"
            resets.append((subject, group, broker_group))
            it.groups[0].replicas[0].handle[FrameKind.PULL] = lambda peer, request: queues[
                0
            ].pulls.append((peer, request))

        monkeypatch.setattr(it.mq.metadata, "reset_group", reset)
        it.groups[0].replicas[0].handle[FrameKind.PULL] = lambda peer, request: peer.refuse(
            request, MessagesExpired("gone")
        )
        consumer = it.mq.consumer("s", "g", expired="skip", ack="explicit")
        pulling = asyncio.create_task(consumer.pull(1))
        await queues[0].hand_out(0, [b"oldest"], base=7)
        assert (await pulling).bodies == [b"oldest"]
        assert resets == [("s", "g", "g0")]


async def test_at_most_once_shows_nothing_that_a_failover_took_back(it: Cluster) -> None:
    queue = Queue(it.groups[0])
    consumer = it.mq.consumer("s", "g", consume_most_once=True)
    queue.holds_answers = True
    taking = asyncio.create_task(anext(consumer))
    await queue.hand_out(0, [b"void", b"too"])
    await eventually(lambda: bool(queue.held))
    queue.holds_answers = False
    await queue.fail_over(0)
    await queue.hand_out(0, [b"ours"], base=9)
    assert (await taking).body == b"ours"


class ModelGroup:
    """A broker group whose deliveries leave before they are committed; a failover loses what was
    not. Real rules: `GroupState`.
    """

    def __init__(self, group: FakeGroup, count: int, draw: random.Random) -> None:
        self.group, self.draw, self.count = group, draw, count
        self.actions: list[object] = [Begin("s", 0, "g", "", 0)]
        self.share = GroupState()
        self.committed = 1
        self.consumer = ""
        self.acked: list[int] = []
        """Sequences that were settled, as the broker understood it."""
        apply_to(self.share, self.actions[0])  # type: ignore[arg-type]
        for replica in group.replicas:
            replica.handle |= {
                FrameKind.ATTACH: self._attach,
                FrameKind.PULL: self._pull,
                FrameKind.SETTLE: self._settle,
                FrameKind.HEARTBEAT: lambda peer, request: peer.answer(request, FrameKind.OK),
                FrameKind.DETACH: lambda peer, request: peer.answer(request, FrameKind.OK),
            }

    def _act(self, action: object) -> None:
        self.actions.append(action)
        apply_to(self.share, action)  # type: ignore[arg-type]
        check_group(self.share)

    def _commit(self) -> None:
        self.committed = len(self.actions)

    def fail_over(self) -> None:
        keep = self.draw.randint(self.committed, len(self.actions))
        self.actions, self.share = self.actions[:keep], GroupState()
        for action in self.actions:
            apply_to(self.share, action)  # type: ignore[arg-type]
        self.committed = keep
        broker = self.group.master
        assert broker is not None
        peers = list(broker.peers)
        self.group.fail_over(to=self.group.epoch % 2)
        for peer in peers:
            peer.cut()

    def _attach(self, peer: Peer, request: Frame) -> None:
        asked = wire.Attach.unpack(request.payload)
        self.consumer = asked.consumer
        holder = self.share.holders.get(asked.consumer)
        if holder is None or holder.incarnation != asked.incarnation:
            self._act(Join("s", 0, "g", asked.consumer, asked.incarnation, 30_000, asked.received))
            resumed = 0
        else:
            resumed = 1
            if asked.received + 1 < holder.next_pull:
                self._act(Return("s", 0, "g", asked.consumer, asked.received))
        self._commit()
        next_pull = self.share.holders[asked.consumer].next_pull
        peer.answer(
            request, FrameKind.ATTACHED, wire.Attached(1, 30_000, next_pull, resumed).pack()
        )

    def _pull(self, peer: Peer, request: Frame) -> None:
        most = min(wire.unpack_pull(request.payload).messages_max, self.draw.randint(1, 6))
        due = self.share.due(10**15, most)
        fresh = min(most, self.count - self.share.next_sequence)
        if due:
            pulled = Pulled(due[0].first, due[0].count, due[0].attempt)
        elif fresh:
            pulled = Pulled(self.share.next_sequence, fresh, 1)
        else:
            return
        first = self.share.holders[self.consumer].next_pull
        self._act(PullAction("s", 0, "g", self.consumer, (pulled,)))
        bodies = [
            b"%d" % number
            for number in range(pulled.first_sequence, pulled.first_sequence + pulled.count)
        ]
        head = wire.pack_delivery(
            1, first, [Range(pulled.first_sequence, pulled.count, pulled.attempt, 0)], 1
        )
        if self.draw.random() < 0.95:
            peer.answer(request, FrameKind.MESSAGES, head + batch(bodies, pulled.first_sequence))

    def _settle(self, peer: Peer, request: Frame) -> None:
        _, settlements = wire.unpack_settle(request.payload)
        holder = self.share.holders[self.consumer]
        for each in settlements:
            for held in holder.held:
                for pull in range(
                    max(held.pull, each.first), min(held.pull + held.count - 1, each.last) + 1
                ):
                    if each.verdict == ACK:
                        self.acked.append(held.first + pull - held.pull)
        asked = sum(each.last - each.first + 1 for each in settlements)
        before = self.share.unacked()
        self._act(
            SettleAction("s", 0, "g", self.consumer, 0, tuple(each[:4] for each in settlements))
        )  # type: ignore[misc]
        settled = before - self.share.unacked()
        if self.draw.random() < 0.8:
            self._commit()
            peer.answer(request, FrameKind.SETTLED, wire.pack_settled(settled, asked - settled))
        else:
            self.fail_over()


@pytest.mark.parametrize("seed", forms.seeds(gate=3, every=8, changing=3))
async def test_failovers_lose_no_message_and_settle_none_on_their_own(seed: int) -> None:
    draw = random.Random(seed)
    async with cluster(2) as it:
        models = {group.name: ModelGroup(group, 30, draw) for group in it.groups}
        consumer = it.mq.consumer("s", "g", ack="explicit", prefetch=draw.choice((2, 5, 40)))
        intended: dict[str, set[int]] = {name: set() for name in models}
        heard: dict[str, Counter[int]] = {name: Counter() for name in models}
        async with asyncio.timeout(60):
            while any(len(set(heard[name])) < model.count for name, model in models.items()):
                found = await consumer.pull(draw.randint(1, 8), SHORT)
                for message in found:
                    assert message.body == b"%d" % message.sequence
                    if draw.random() < 0.15:
                        models[message.broker_group].fail_over()
                    if draw.random() < 0.1:
                        message.nack(timedelta(0))
                        continue
                    intended[message.broker_group].add(message.sequence)
                    try:
                        await message.ack_sync()
                        heard[message.broker_group][message.sequence] += 1
                    except StaleDelivery:
                        pass
                if not found:
                    for model in models.values():
                        model.fail_over()
        for name, model in models.items():
            assert set(model.acked) <= intended[name], (
                f"seed={seed}: a verdict settled another message than the application's"
            )
            assert set(heard[name].values()) == {1}, (
                f"seed={seed}: a message came again whose acknowledgement was answered"
            )
