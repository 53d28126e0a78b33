"""An ordered consumer against fake brokers and metaservers: order for each key, and no verdicts
outside the consumer's lanes.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from datetime import timedelta

import pytest
from fake_cluster import UNKNOWN, cluster
from fake_lanes import WHOLE, FakeLanes, LaneCluster, N, key_in, lane, lane_cluster, one_lane
from qmq_ordering.hashing import logical_partition
from qmq_ordering.routes import LpRange
from support import eventually

import qmq
from qmq.client.consuming.ordered.consumer import OrderedConsumer
from qmq.client.consuming.ordered.lane_reader import LaneInbox
from qmq.client.consuming.ordered.message import OrderedMessage
from qmq.errors import (
    ClientClosed,
    InvalidArgument,
    LaneLost,
    MessagesExpired,
    OrderMismatch,
    UnknownSubject,
)
from qmq.wire.frame import FrameKind
from qmq.wire.frame_payloads import LaneVerdict

LEFT, RIGHT = LpRange(0, N // 2), LpRange(N // 2, N)
NOW = (0.0,)
"""Retry delays of a test that does not want to wait."""


def numbered(keys: Sequence[bytes], count: int) -> list[tuple[bytes, bytes]]:
    """`count` messages of each key, mixed; the body is the message's number among its key's."""
    return [(key, str(number).encode()) for number in range(count) for key in keys]


KEYS = [f"k{each}".encode() for each in range(20)]


class Recorder:
    """A handler that remembers its messages, and checks that no two messages of a key are handled
    at the same time.
    """

    def __init__(self, *, wait_s: float = 0.0) -> None:
        self.wait_s = wait_s
        self.seen: dict[bytes, list[int]] = defaultdict(list)
        self.in_work: set[bytes] = set()
        self.most_at_once = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.fails: Counter[tuple[bytes, int]] = Counter()
        """How often a message shall fail still."""
        self.attempts: list[tuple[bytes, int, int]] = []

    @property
    def count(self) -> int:
        return sum(map(len, self.seen.values()))

    async def __call__(self, message: OrderedMessage) -> None:
        key, number = message.key_bytes or b"", int(message.body)
        assert key not in self.in_work, "two messages of one key are in work"
        self.in_work.add(key)
        self.most_at_once = max(self.most_at_once, len(self.in_work))
        try:
            await asyncio.sleep(random.uniform(0, self.wait_s))
            await self.gate.wait()
            self.attempts.append((key, number, message.attempt))
            if self.fails[key, number] > 0:
                self.fails[key, number] -= 1
                raise ValueError("as the test wants it")
            self.seen[key].append(number)
        finally:
            self.in_work.remove(key)

    def check_order(self, count: int | None = None) -> None:
        for key, numbers in self.seen.items():
            assert numbers == list(range(len(numbers) if count is None else count)), key


async def stopped(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def ordered(c: LaneCluster, name: str = "a", **options: object) -> OrderedConsumer:
    """A consumer with a short lease: closing waits half a lease for messages that a test leaves
    unfinished.
    """
    return c.mq.ordered_consumer("s", "g", name=name, **{"lease_ms": 1_000} | options)  # type: ignore[arg-type]


async def until_parked(broker: FakeLanes, count: int) -> None:
    await eventually(
        lambda: sum(len(each) for each in broker.partition(1).parked.values()) == count
    )


# --- order, and as much at once as there are keys -------------------------------------------------


async def test_keys_are_worked_on_concurrently_and_each_in_order() -> None:
    async with lane_cluster(groups=2) as c:
        handler = Recorder(wait_s=0.003)
        for number, broker in enumerate(c.lanes):
            half = (
                [key for key in KEYS if LEFT.first <= logical_partition(key, N) < LEFT.end]
                if number == 0
                else []
            )
            rest = (
                [key for key in KEYS if key not in half and logical_partition(key, N) >= LEFT.end]
                if number == 1
                else []
            )
            broker.append(number + 1, numbered(half or rest, 30))
        c.assignments.assign(a=[lane(1, LEFT, group="g0"), lane(2, RIGHT, group="g1")])
        task = asyncio.create_task(ordered(c, prefetch=100).run(handler, concurrency=64))
        await eventually(lambda: handler.count == 30 * len(KEYS))
        await eventually(
            lambda: c.lanes[0].partition(1).is_all_done() and c.lanes[1].partition(2).is_all_done()
        )
        handler.check_order(30)
        assert handler.most_at_once > 5
        await stopped(task)


async def test_concurrency_is_never_exceeded() -> None:
    async with lane_cluster() as c:
        handler = Recorder(wait_s=0.002)
        c.broker.append(1, numbered(KEYS, 5))
        c.assignments.assign(a=[lane()])
        task = asyncio.create_task(ordered(c).run(handler, concurrency=3))
        await eventually(lambda: handler.count == 5 * len(KEYS))
        assert handler.most_at_once == 3
        await stopped(task)


async def test_idle_workers_are_not_woken_by_messages_that_a_busy_one_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with lane_cluster() as c:
        c.assignments.assign(a=[lane()])
        consumer, seen, waits = ordered(c), list[bytes](), 0
        wait = LaneInbox.wait

        async def counted(inbox: LaneInbox, until_s: float = math.inf) -> bool:
            nonlocal waits
            waits += 1
            return await wait(inbox, until_s)

        async def handler(message: OrderedMessage) -> None:
            seen.append(message.body)

        monkeypatch.setattr(LaneInbox, "wait", counted)
        c.broker.append(1, [(b"first", b"")])
        task = asyncio.create_task(consumer.run(handler, concurrency=64))
        await eventually(lambda: waits >= 64 and c.broker.partition(1).is_all_done())
        waits = 0
        c.broker.append(1, numbered(KEYS, 20))
        await eventually(
            lambda: len(seen) == 1 + 20 * len(KEYS) and c.broker.partition(1).is_all_done()
        )
        assert waits < 20, "workers were woken for nothing"
        await stopped(task)


async def test_a_message_is_acknowledged_when_the_loop_comes_back() -> None:
    async with one_lane((b"a", b"0"), (b"b", b"1"), (b"a", b"2")) as c:
        consumer = ordered(c)
        seen = []
        async for message in consumer:
            seen.append(message.body)
            assert message.sequence not in c.broker.partition(1).done
            if len(seen) == 3:
                break
        assert seen == [b"0", b"1", b"2"]
        await eventually(lambda: c.broker.partition(1).done == {0, 1})
        await consumer.close()
        assert c.broker.partition(1).done == {0, 1}, (
            "nobody finished the message that the loop was left with"
        )
        assert consumer.stale == 0


async def test_a_pull_leaves_while_a_loop_that_never_waits_is_still_busy() -> None:
    async with one_lane(*numbered(KEYS, 20)) as c:
        consumer = ordered(c, prefetch=100)
        await anext(consumer)
        (reader,) = consumer.readers
        assert reader.session is not None
        stream = reader.session.connection.stream
        before, rounds = stream.taken_bytes, list[int]()
        asyncio.get_running_loop().call_soon(rounds.append, 1)
        for _ in range(80):
            await anext(consumer)
            if stream.taken_bytes > before:
                break
        assert not rounds, "the event loop went round: the test shows nothing"
        assert stream.taken_bytes > before
        await consumer.close()


async def test_a_message_says_where_it_belongs() -> None:
    async with lane_cluster() as c:
        c.broker.partition(1).version = 7
        c.broker.append(1, [(b"a", b"0")])
        c.assignments.assign(a=[lane(version=7)])
        consumer = ordered(c)
        message = await anext(consumer)
        assert (message.key, message.partition, message.broker_group, message.subject) == (
            "a",
            1,
            "g0",
            "s",
        )
        assert (message.logical_partition, message.route_version, message.attempt) == (
            logical_partition(b"a", N),
            7,
            1,
        )
        assert message.token == c.broker.grants[0].token
        assert consumer.lanes == (lane(version=7),)
        assert "s/1/0" in repr(message)


async def test_with_explicit_acks_one_message_of_each_of_several_keys_is_in_hand() -> None:
    async with one_lane((b"a", b"a0"), (b"a", b"a1"), (b"b", b"b0")) as c:
        consumer = ordered(c, ack="explicit")
        first, second = await anext(consumer), await anext(consumer)
        assert (first.body, second.body) == (b"a0", b"b0")
        waiting = asyncio.create_task(anext(consumer))
        await second.ack_sync()
        assert c.broker.partition(1).done == {2}, "ack returns when it is committed"
        assert not waiting.done()
        await first.ack_sync()
        assert (await waiting).body == b"a1"


async def test_each_lane_may_hold_its_share_so_that_none_starves() -> None:
    async with lane_cluster() as c:
        left, right = key_in(LEFT), key_in(RIGHT)
        c.broker.append(1, [(left, b"%d" % each) for each in range(50)])
        c.broker.append(2, [(right, b"0")])
        c.assignments.assign(a=[lane(1), lane(2)])
        handler = Recorder()
        handler.gate.clear()
        task = asyncio.create_task(ordered(c, prefetch=10).run(handler))
        await eventually(lambda: handler.in_work == {left, right})
        handler.gate.set()
        await eventually(lambda: handler.count == 51)
        await stopped(task)


# --- sessions and tokens --------------------------------------------------------------------------


async def test_a_broken_connection_is_resumed_with_the_token_and_nothing_is_seen_twice() -> None:
    async with one_lane(*numbered(KEYS, 5)) as c:
        handler = Recorder(wait_s=0.005)
        consumer = ordered(c)
        task = asyncio.create_task(consumer.run(handler))
        for count in (10, 40, 70):
            await eventually(lambda count=count: handler.count >= count)
            c.broker.is_mute = True
            c.broker.cut()
        await eventually(lambda: handler.count >= 85)
        c.broker.fail_over()
        await eventually(c.broker.partition(1).is_all_done)
        handler.check_order(5)
        assert consumer.stale == 0
        assert c.broker.next_token == 2, "one token through all of it"
        assert {each.token for each in c.broker.attaches[1:]} == {1}
        await stopped(task)


async def test_a_consumer_that_lost_its_lane_settles_nothing_and_drops_what_it_has() -> None:
    async with lane_cluster() as c:
        c.broker.append(1, [(b"a", b"0"), (b"b", b"1"), (b"c", b"2")])
        c.assignments.assign(a=[lane()], b=[])
        consumer = ordered(c, ack="explicit")
        first, second = await anext(consumer), await anext(consumer)
        c.broker.take_away()
        c.assignments.assign(a=[], b=[lane()])
        other = ordered(c, "b")
        taker = await anext(other)
        assert (taker.body, taker.token) == (b"0", 2)
        with pytest.raises(LaneLost):
            await first.ack_sync()
        assert consumer.stale == 2
        with pytest.raises(LaneLost):
            await second.ack_sync()
        assert c.broker.partition(1).done == set()
        assert consumer.lanes == ()


# --- assignments change ---------------------------------------------------------------------------


async def test_running_handlers_finish_before_the_lane_is_released_and_none_begin() -> None:
    async with one_lane((b"a", b"0"), (b"b", b"1"), (b"a", b"2")) as c:
        consumer = ordered(c, ack="explicit", prefetch=100)
        message = await anext(consumer)
        c.assignments.assign(a=[])
        await eventually(lambda: consumer.lanes == ())
        waiting = asyncio.create_task(anext(consumer))
        assert c.broker.detached == []
        message.ack_later()
        await eventually(lambda: [each.token for each in c.broker.detached] == [1])
        assert c.broker.partition(1).done == {0}
        assert not waiting.done()
        assert consumer.stale == 0
        waiting.cancel()


async def test_a_handler_that_takes_too_long_is_given_up_with_its_lane() -> None:
    async with one_lane((b"a", b"0")) as c:
        consumer = ordered(c, ack="explicit", lease_ms=200)
        message = await anext(consumer)
        c.assignments.assign(a=[])
        await eventually(lambda: bool(c.broker.detached))
        assert consumer.stale == 1
        with pytest.raises(LaneLost):
            await message.ack_sync()
        assert c.broker.partition(1).done == set()


async def test_lanes_that_stay_are_kept_also_under_another_version_of_the_route() -> None:
    async with lane_cluster() as c:
        c.broker.append(1, [(b"a", b"0"), (b"a", b"1")])
        c.broker.append(2, [(b"b", b"0")])
        c.assignments.assign(a=[lane(1)])
        consumer = ordered(c, ack="explicit")
        message = await anext(consumer)
        c.broker.partition(1).version = 2
        c.assignments.assign(a=[lane(1, version=2), lane(2)])
        assert (await anext(consumer)).partition == 2
        await message.ack_sync()
        assert (await anext(consumer)).body == b"1"
        assert [each.partition for each in c.broker.attaches] == [1, 2]
        c.broker.cut()
        await eventually(
            lambda: (
                [(each.partition, each.version) for each in c.broker.attaches].count((1, 2)) == 1
            )
        )


async def test_a_range_that_comes_back_waits_until_this_consumer_itself_has_let_go() -> None:
    async with one_lane((b"a", b"0"), (b"a", b"1")) as c:
        consumer = ordered(c, ack="explicit")
        message = await anext(consumer)
        halves = [lane(lps=LEFT), lane(lps=RIGHT)]
        c.assignments.assign(a=halves)
        await eventually(lambda: consumer.lanes == ())
        c.assignments.assign(a=[lane()])
        await eventually(lambda: c.metas[0].synced[-1].generation == c.assignments.generation)
        assert len(c.broker.attaches) == 1
        await message.ack_sync()
        assert (await anext(consumer)).body == b"1"
        assert [(each.first, each.end) for each in c.broker.attaches] == [
            tuple(WHOLE),
            tuple(WHOLE),
        ]


async def test_lanes_continue_while_no_metaserver_answers_and_the_next_one_is_asked() -> None:
    async with lane_cluster(metas=2) as c:
        c.broker.append(1, numbered(KEYS, 2))
        c.assignments.assign(a=[lane()])
        handler = Recorder()
        task = asyncio.create_task(ordered(c).run(handler))
        await eventually(lambda: handler.count == 2 * len(KEYS))
        asked = c.metas[0] if c.metas[0].synced else c.metas[1]
        other = c.metas[1] if asked is c.metas[0] else c.metas[0]
        assert asked.server is not None
        await asked.server.stop(None)
        c.broker.append(1, [(b"late", b"0")])
        await eventually(lambda: handler.seen[b"late"] == [0])
        await eventually(lambda: bool(other.synced))
        c.broker.append(2, [(b"later", b"0")])
        c.assignments.assign(a=[lane(1), lane(2)])
        await eventually(lambda: handler.seen[b"later"] == [0])
        await stopped(task)


# --- the end of a lane ----------------------------------------------------------------------------


async def test_the_end_of_a_lane_is_reported_only_when_all_of_it_is_committed() -> None:
    async with lane_cluster() as c:
        c.broker.append(1, [(b"a", b"0"), (b"b", b"1")])
        c.broker.seal(1)
        c.assignments.assign(a=[lane()])
        handler = Recorder()
        c.broker.holds_settled = True
        task = asyncio.create_task(ordered(c).run(handler))
        await eventually(lambda: handler.count == 2 and bool(c.broker.held))
        assert c.assignments.finished == []
        c.broker.answer_held()
        await eventually(lambda: lane() in c.assignments.finished)
        assert [(each.first, each.last) for each in c.broker.verdicts(LaneVerdict.DONE)][-1][
            1
        ] == 2, "the command message is settled too"
        await stopped(task)


# --- failures -------------------------------------------------------------------------------------


async def test_a_failed_message_is_tried_again_in_place_and_blocks_its_lane_only() -> None:
    async with lane_cluster() as c:
        c.broker.append(1, [(b"bad", b"0"), (b"bad", b"1"), *[(key, b"0") for key in KEYS]])
        c.broker.append(2, [(b"other", b"0")])
        c.assignments.assign(a=[lane(1), lane(2)])
        handler = Recorder()
        handler.fails[b"bad", 0] = 1_000_000
        task = asyncio.create_task(ordered(c, retry_delays_s=(0.01,)).run(handler, concurrency=1))
        await eventually(
            lambda: handler.seen[b"other"] == [0] and (b"bad", 0, 4) in handler.attempts
        )
        assert set(handler.seen) == {b"other"}, "no other message of the lane was handled"
        await eventually(lambda: c.broker.partition(1).failures.get(0, 0) >= 3)
        handler.fails.clear()
        await eventually(c.broker.partition(1).is_all_done)
        handler.check_order()
        assert handler.seen[b"bad"] == [0, 1]
        await stopped(task)


async def test_a_message_fails_by_word_and_comes_again_before_anything_newer_of_its_key() -> None:
    async with one_lane((b"a", b"0"), (b"a", b"1"), (b"b", b"0")) as c:
        consumer = ordered(c, ack="explicit")
        first = await anext(consumer)
        first.fail(timedelta(0))
        again = await anext(consumer)
        assert (again.body, again.key, again.attempt) == (b"0", "a", 2)
        first.ack_later()
        assert c.broker.partition(1).done == set(), (
            "an acknowledgement of an earlier try no longer counts"
        )
        again.ack_later()
        rest = [await anext(consumer), await anext(consumer)]
        assert sorted((each.key or "", each.body) for each in rest) == [("a", b"1"), ("b", b"0")]
        with pytest.raises(InvalidArgument):
            rest[0].fail(timedelta(seconds=-1))


async def test_a_key_that_fails_too_often_is_set_aside_with_what_follows_and_others_flow() -> None:
    async with one_lane((b"bad", b"0"), (b"ok", b"0"), (b"bad", b"1")) as c:
        handler = Recorder()
        handler.fails[b"bad", 0] = 1_000_000
        task = asyncio.create_task(
            ordered(c, on_failure="park", attempts_max=3, retry_delays_s=NOW).run(handler)
        )
        await until_parked(c.broker, 2)
        c.broker.append(1, [(b"bad", b"2"), (b"ok", b"1")])
        await until_parked(c.broker, 3)
        await eventually(c.broker.partition(1).is_all_done)
        assert c.broker.partition(1).parked == {b"bad": [0, 2, 3]}
        assert handler.seen == {b"ok": [0, 1]}
        assert [attempt for key, _, attempt in handler.attempts if key == b"bad"] == [1, 2, 3]
        await stopped(task)


async def test_parked_keys_stay_parked_and_a_replay_comes_before_newer_messages() -> None:
    async with lane_cluster() as c:
        partition = c.broker.partition(1)
        partition.append([(b"bad", b"0"), (b"bad", b"1"), (b"ok", b"0")])
        partition.done, partition.parked = {0}, {b"bad": [0]}
        c.assignments.assign(a=[lane()])
        handler = Recorder()
        task = asyncio.create_task(ordered(c, on_failure="park").run(handler))
        await eventually(partition.is_all_done)
        assert (handler.seen, partition.parked) == ({b"ok": [0]}, {b"bad": [0, 1]})
        partition.done -= set(partition.parked.pop(b"bad"))
        c.broker.take_away()
        c.broker.append(1, [(b"bad", b"2")])
        c.broker.cut()
        await eventually(partition.is_all_done)
        assert handler.seen[b"bad"] == [0, 1, 2]
        await stopped(task)


async def test_a_handler_that_cancels_itself_has_failed() -> None:
    async with one_lane((b"a", b"0")) as c:
        attempts = []

        async def handler(message: OrderedMessage) -> None:
            attempts.append(message.attempt)
            if len(attempts) == 1:
                raise asyncio.CancelledError

        task = asyncio.create_task(ordered(c, retry_delays_s=NOW).run(handler))
        await eventually(c.broker.partition(1).is_all_done)
        assert attempts == [1, 2]
        await stopped(task)


async def test_expired_messages_are_raised_and_the_consumer_continues_after_a_reset() -> None:
    async with lane_cluster() as c:
        c.broker.append(1, [(b"a", b"0"), (b"a", b"1")])
        c.broker.partition(1).start = 1
        c.assignments.assign(a=[lane()])
        consumer = ordered(c)
        with pytest.raises(MessagesExpired):
            await anext(consumer)
        with pytest.raises(MessagesExpired):
            await consumer.run(Recorder())
        c.broker.partition(1).start = 0
        assert (await anext(consumer)).body == b"0"


# --- the end --------------------------------------------------------------------------------------


async def test_closing_finishes_and_settles_what_runs_then_leaves_the_group() -> None:
    async with one_lane(*numbered(KEYS, 3)) as c:
        handler = Recorder()
        handler.gate.clear()
        consumer = ordered(c)
        task = asyncio.create_task(consumer.run(handler, concurrency=4))
        await eventually(lambda: len(handler.in_work) == 4)
        closing = asyncio.create_task(consumer.close())
        await eventually(lambda: consumer.lanes == ())
        assert c.broker.detached == []
        handler.gate.set()
        await closing
        await task
        assert len(c.broker.partition(1).done) == handler.count == 4
        assert c.broker.grants == []
        assert c.assignments.left == ["a"]
        assert consumer.stale == 0
        with pytest.raises(ClientClosed):
            await anext(consumer)
        await consumer.close()


async def test_signs_of_life_of_a_lane_go_by_the_lease_that_was_granted() -> None:
    async with lane_cluster() as c:
        c.broker.append(1, [(b"a", b"0")])
        c.broker.lease_ms_max = 600
        c.assignments.assign(a=[lane()])
        consumer = ordered(c, ack="explicit", lease_ms=3_600_000)
        message = await anext(consumer)
        await eventually(lambda: c.broker.heartbeats > 1)
        await message.ack_sync()
        await consumer.close()


async def test_the_first_sign_of_life_comes_at_a_random_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else consumers that attached together would send all of theirs at once, for ever."""
    monkeypatch.setattr("qmq.client.consuming.session.random.random", lambda: 0.0)
    async with lane_cluster() as c:
        c.broker.append(1, [(b"a", b"0")])
        c.assignments.assign(a=[lane()])
        consumer = ordered(c, ack="explicit", lease_ms=3_600_000)
        message = await anext(consumer)
        await eventually(lambda: c.broker.heartbeats == 1)
        await message.ack_sync()
        await consumer.close()


async def test_closing_does_not_wait_for_ever_for_a_handler() -> None:
    async with one_lane((b"a", b"0")) as c:
        handler = Recorder()
        handler.gate.clear()
        consumer = ordered(c, lease_ms=200)
        task = asyncio.create_task(consumer.run(handler, concurrency=1))
        await eventually(lambda: bool(handler.in_work))
        await consumer.close()
        await task
        assert handler.in_work == set(), "the handler was cut off"
        assert c.broker.partition(1).done == set()
        assert c.broker.grants == []
        assert consumer.stale == 1


async def test_results_that_could_not_be_reported_before_the_end_are_stale() -> None:
    async with one_lane((b"a", b"0"), (b"b", b"1")) as c:
        consumer = ordered(c, ack="explicit", lease_ms=200)
        message = await anext(consumer)
        c.broker.holds_settled = True
        acknowledging = asyncio.create_task(message.ack_sync())
        await eventually(lambda: bool(c.broker.held))
        await consumer.close()
        with pytest.raises(ClientClosed) as failure:
            await acknowledging
        assert failure.value.outcome is UNKNOWN
        assert consumer.stale == 1


async def test_a_message_in_the_hand_of_another_task_may_finish_while_the_consumer_closes() -> None:
    async with one_lane((b"a", b"0"), (b"a", b"1")) as c:
        consumer = ordered(c)
        goes_on = asyncio.Event()
        seen = []

        async def loop() -> None:
            async for message in consumer:
                seen.append(message.body)
                await goes_on.wait()

        task = asyncio.create_task(loop())
        await eventually(lambda: seen == [b"0"])
        closing = asyncio.create_task(consumer.close())
        await eventually(lambda: consumer.lanes == ())
        goes_on.set()
        await closing
        assert c.broker.partition(1).done == {0}
        with pytest.raises(ClientClosed):
            await task


async def test_a_cancelled_run_leaves_its_messages_for_the_next_one() -> None:
    async with one_lane(*numbered(KEYS[:3], 2)) as c:
        handler = Recorder()
        handler.gate.clear()
        consumer = ordered(c)
        task = asyncio.create_task(consumer.run(handler))
        await eventually(lambda: len(handler.in_work) == 3)
        await stopped(task)
        assert handler.in_work == set()
        handler.gate.set()
        task = asyncio.create_task(consumer.run(handler))
        await eventually(c.broker.partition(1).is_all_done)
        handler.check_order(2)
        assert {attempt for *_, attempt in handler.attempts} == {1}
        await stopped(task)


async def test_leaving_with_an_error_waits_for_nothing() -> None:
    async with one_lane((b"a", b"0"), (b"b", b"1")) as c:
        with pytest.raises(ValueError, match="as the test wants it"):
            async with ordered(c, ack="explicit", lease_ms=3_600_000) as consumer:
                await anext(consumer)
                raise ValueError("as the test wants it")
        assert c.broker.grants == []
        assert c.broker.partition(1).done == set()


async def test_the_client_closes_its_consumers() -> None:
    async with one_lane((b"a", b"0")) as c:
        async with qmq.connect(c.metas[0].address) as mq:
            await anext(mq.ordered_consumer("s", "g", name="a"))
        assert c.assignments.left == ["a"]
        assert c.broker.grants == []


# --- wrong answers of a broker --------------------------------------------------------------------


async def test_an_unordered_consumer_of_an_ordered_subject_is_told_what_to_use() -> None:
    async with cluster(1) as c:
        for replica in c.groups[0].replicas:
            replica.handle[FrameKind.ATTACH] = lambda peer, request: peer.refuse(
                request, OrderMismatch("subject 's' is ordered")
            )
        with pytest.raises(OrderMismatch, match="ordered_consumer"):
            await anext(c.mq.consumer("s", "g"))


async def test_what_a_metaserver_refuses_for_good_is_raised() -> None:
    async with lane_cluster() as c:
        c.assignments.refusal = OrderMismatch(
            "subject 's' is not ordered: consume it with mq.consumer"
        )
        with pytest.raises(OrderMismatch):
            await anext(ordered(c))
        c.assignments.refusal = UnknownSubject("there is no subject 's'")
        with pytest.raises(UnknownSubject):
            await ordered(c, "b").run(Recorder())


@pytest.mark.parametrize(
    "options",
    [
        {"ack": "never"},
        {"start": "now"},
        {"gate": "open"},
        {"prefetch": 0},
        {"on_failure": "skip"},
        {"retry_delays_s": ()},
    ],
)
async def test_options_that_make_no_sense_are_refused(options: dict[str, object]) -> None:
    async with qmq.connect("localhost:1") as mq:
        with pytest.raises(InvalidArgument):
            mq.ordered_consumer("s", "g", **options)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument):
            await mq.ordered_consumer("s", "g").run(Recorder(), concurrency=0)


# --- hazards seen at peers (peers.md, 2.3), as far as the consumer decides them -------------------


async def test_hazard_13_a_failed_message_is_never_overtaken_by_a_newer_one_of_its_key() -> None:
    async with lane_cluster() as c:
        chance = random.Random(13)
        c.broker.append(1, numbered(KEYS[:8], 12))
        c.assignments.assign(a=[lane()], b=[])
        handler = Recorder(wait_s=0.001)
        for key in KEYS[:8]:
            for number in range(12):
                handler.fails[key, number] = chance.choice([0, 0, 0, 1, 2])
        failures = sum(handler.fails.values())
        task = asyncio.create_task(ordered(c, retry_delays_s=(0.001, 0.003)).run(handler))
        await eventually(c.broker.partition(1).is_all_done)
        handler.check_order(12)
        assert len(handler.attempts) == 8 * 12 + failures
        await stopped(task)


async def test_hazard_14_changes_between_wide_and_narrow_lanes_never_stop_the_drain() -> None:
    async with lane_cluster() as c:
        c.broker.append(1, numbered(KEYS, 40))
        shapes = [
            {"a": [lane()], "b": []},
            {"a": [lane(lps=LEFT)], "b": [lane(lps=RIGHT)]},
            {"a": [lane(lps=RIGHT)], "b": [lane(lps=LEFT)]},
            {"a": [], "b": [lane()]},
            {
                "a": [lane(lps=LpRange(0, 3)), lane(lps=LpRange(3, 9))],
                "b": [lane(lps=LpRange(9, N))],
            },
        ]
        c.assignments.assign(**shapes[0])
        first, second = Recorder(wait_s=0.002), Recorder(wait_s=0.002)
        consumers = [ordered(c), ordered(c, "b")]
        tasks = [
            asyncio.create_task(each.run(handler))
            for each, handler in zip(consumers, (first, second), strict=True)
        ]
        flip = 0
        while not c.broker.partition(1).is_all_done():
            before = first.count + second.count
            flip += 1
            c.assignments.assign(**shapes[flip % len(shapes)])
            await eventually(
                lambda before=before: (
                    first.count + second.count > before + 15 or c.broker.partition(1).is_all_done()
                )
            )
        assert flip > 3
        assert [each.stale for each in consumers] == [0, 0]
        for key in KEYS:
            assert sorted(first.seen[key] + second.seen[key]) == list(range(40)), "each once"
            assert first.seen[key] == sorted(first.seen[key])
            assert second.seen[key] == sorted(second.seen[key])
        await stopped(*tasks)
