"""The outcome of each delivery, against a simple model that has each message separately."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from random import Random
from typing import Any

import msgspec
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark_qmq import datasets
from pyspark_qmq.datasets import tables
from pyspark_qmq.datasets.deliveries import (
    Delivery,
    DeliveryFate,
    GroupStanding,
    Replay,
    ShareKey,
    deliveries,
    standings,
)
from qmq_ordering.routes import LpRange
from support import NodeProcess

import qmq
import qmq.blocking
from qmq.columns.files.log import FileAddress
from qmq.columns.reading import LogAddress
from qmq.columns.servers.log import ServerAddress
from qmq.errors import InvalidArgument, LogDamaged
from qmq.log.actions import (
    AnyAction,
    Begin,
    Cancel,
    Cause,
    DeadLettered,
    DropQueue,
    Forget,
    Join,
    LaneBegin,
    LaneDone,
    LaneFail,
    LaneGrant,
    LanePark,
    LaneReset,
    LaneUnpark,
    Leave,
    PullAction,
    Pulled,
    Reset,
    Return,
    SettleAction,
    encode_actions,
)
from qmq.log.group_state import GroupState
from qmq.log.queue import apply_to
from qmq.wire.batch import Envelope, Kind, parse_envelope, wrap
from qmq.wire.frame_payloads import Verdict

Entry = tuple[Envelope, bytes]
START_MS = 1_700_000_000_000


def entry(time_ms: int, *actions: AnyAction, index: int = 1) -> Entry:
    """The entry of one turn of a broker."""
    return _entry(Kind.ACTIONS, encode_actions(actions), time_ms, index)


def snapshot(time_ms: int, states: Iterable[Any], index: int = 1) -> Entry:
    """The snapshot with which a segment begins."""
    return _entry(Kind.SNAPSHOT, msgspec.msgpack.encode(list(states)), time_ms, index)


def _entry(kind: Kind, payload: bytes, time_ms: int, index: int) -> Entry:
    envelope, region = wrap(
        kind, payload, count=1, epoch=1, index=index, time_ms=time_ms, flushed=0
    )
    return parse_envelope(envelope), region


def timed(
    actions: Iterable[AnyAction], start_ms: int = START_MS, step_ms: int = 10
) -> Iterator[Entry]:
    """One entry for each action, `step_ms` apart, from `start_ms` on."""
    for number, action in enumerate(actions):
        yield entry(start_ms + number * step_ms, action, index=number + 1)


pytestmark = pytest.mark.sampled

NAMES = ("orders", 0, "ops")
KEY = ShareKey(*NAMES)
LANES = ("orders", 3, "ops")
ACK, NACK, RELEASE = map(int, (Verdict.ACK, Verdict.NACK, Verdict.RELEASE))


def joined(consumer: str = "c", incarnation: str = "1") -> Join:
    return Join(*NAMES, consumer, incarnation, 30_000, -1)


def pulled(*ranges: tuple[int, int, int], consumer: str = "c") -> PullAction:
    return PullAction(*NAMES, consumer, tuple(Pulled(*each) for each in ranges))


def settled(*settlements: tuple[int, int, int, int], consumer: str = "c") -> SettleAction:
    return SettleAction(*NAMES, consumer, START_MS, settlements)


def replayed(*actions: AnyAction) -> list[Delivery]:
    return list(deliveries(timed(actions)))


def plain(found: list[Delivery]) -> list[tuple[object, ...]]:
    """(first, last, attempt, milliseconds from the start to the pull and the verdict, fate)."""

    def since(time_ms: int | None) -> int | None:
        return None if time_ms is None else time_ms - START_MS

    return [
        (
            each.first,
            each.last,
            each.attempt,
            since(each.pulled_ms),
            since(each.settled_ms),
            each.fate,
        )
        for each in found
    ]


# --- shares ---------------------------------------------------------------------------------------


def test_a_range_that_died_says_so_and_its_copy_ends_nothing_twice() -> None:
    found = replayed(
        joined(),
        pulled((0, 3, 1)),
        settled((0, 1, Verdict.DEAD, 0)),
        DeadLettered(*NAMES, "", ((0, 2),)),
        settled((2, 2, ACK, 0)),
    )
    assert plain(found) == [(0, 1, 1, 10, 20, "dead"), (2, 2, 1, 10, 40, "ack")]


@pytest.mark.parametrize(
    ("cause", "fate"), [(Cause.LOST, "lost"), (Cause.LEFT, "left"), (Cause.AGAIN, "again")]
)
def test_a_return_by_the_broker_is_not_a_verdict_of_the_consumer(cause: Cause, fate: str) -> None:
    back = SettleAction(
        *NAMES, "c", START_MS, ((0, 0, NACK, 9), (1, 1, Verdict.RELEASE, 0)), (), int(cause)
    )
    assert [each[-1] for each in plain(replayed(joined(), pulled((0, 2, 1)), back))] == [
        fate,
        fate,
        "waiting",
        "waiting",
    ]


def test_nothing_is_open_any_more_of_a_group_that_was_forgotten() -> None:
    found = replayed(joined(), pulled((0, 2, 1)), Forget(*NAMES, ""))
    assert [each[-1] for each in plain(found)] == ["reset"]


def test_a_dropped_queue_has_no_open_deliveries_and_its_groups_start_over() -> None:
    found = replayed(
        joined(),
        pulled((0, 2, 1)),
        DropQueue("orders", 0, "", ""),
        Begin(*NAMES, "", 2),
        joined(),
        pulled((2, 1, 1)),
    )
    assert [(each[0], each[-1]) for each in plain(found)] == [(0, "reset"), (2, "open")]


def test_a_range_is_cut_by_verdicts_and_what_is_left_is_open() -> None:
    found = replayed(joined(), pulled((0, 10, 1)), settled((2, 3, ACK, 0), (5, 5, NACK, 700)))
    assert plain(found) == [
        (2, 3, 1, 10, 20, "ack"),
        (5, 5, 1, 10, 20, "nack"),
        (0, 1, 1, 10, None, "open"),
        (4, 4, 1, 10, None, "open"),
        (6, 9, 1, 10, None, "open"),
        (5, 5, 2, None, None, "waiting"),
    ]
    assert found[1].delay_ms == 700


def test_messages_that_expired_while_waiting_are_reported() -> None:
    found = replayed(
        joined(), pulled((0, 4, 1)), settled((0, 3, NACK, 0)), pulled((0, 3, 0), (3, 1, 2))
    )
    assert plain(found)[1:] == [(0, 2, None, None, 30, "expired"), (3, 3, 2, 30, None, "open")]


def test_overlapping_verdicts_and_those_of_others_settle_nothing_twice() -> None:
    """A record of a delay group is passed over."""
    found = replayed(
        joined(),
        pulled((0, 4, 1)),
        settled((0, 2, ACK, 0), (1, 3, NACK, 0)),
        settled((0, 2, ACK, 0), consumer="x"),
        Cancel(1, 2),
    )
    assert [each for each in plain(found) if each[4] is not None] == [
        (0, 2, 1, 10, 20, "ack"),
        (3, 3, 1, 10, 20, "nack"),
    ]


def test_a_log_that_begins_with_a_snapshot_knows_what_was_open_then() -> None:
    share = GroupState()
    for action in (joined(), pulled((0, 4, 1))):
        apply_to(share, action)
    opening = snapshot(START_MS, [[*NAMES, share.to_state()]])
    found = list(deliveries([opening, entry(START_MS + 5, settled((1, 1, ACK, 0)))]))
    assert plain(found) == [
        (1, 1, 1, None, 5, "ack"),
        (0, 0, 1, None, None, "open"),
        (2, 3, 1, None, None, "open"),
    ]


def test_a_snapshot_in_the_middle_changes_nothing() -> None:
    every = list(timed([joined(), pulled((0, 4, 1)), settled((0, 1, ACK, 0))]))
    other = snapshot(START_MS + 15, [[*NAMES, GroupState(77).to_state()]])
    assert list(deliveries([*every[:2], other, every[2]])) == list(deliveries(every))


def test_a_gap_in_the_log_is_damage_and_no_wrong_answer() -> None:
    with pytest.raises(LogDamaged, match="does not fit the entries before it"):
        replayed(pulled((0, 1, 1)))
    with pytest.raises(LogDamaged, match="entry 3 "):
        replayed(Begin(*NAMES, "", 9), joined(), pulled((2, 1, 2)))


def test_the_times_of_pulls_that_are_settled_are_forgotten() -> None:
    actions: list[AnyAction] = [joined()]
    for each in range(3_000):
        actions += [pulled((each, 1, 1)), settled((each - 1, each - 1, ACK, 0))]
    replay = Replay()
    found = [each for head, region in timed(actions) for each in replay.entry(head, region)]
    assert len(found) == 2_999
    assert all(each.settled_ms == each.pulled_ms + 30 for each in found)  # type: ignore[operator]  # each is known
    assert replay.shares[KEY].times_kept < 1_100


# --- the dumb model -------------------------------------------------------------------------------


@dataclass
class Model:
    """Each message separately: its holder, its pull sequence, and its outcome."""

    share: GroupState = field(default_factory=GroupState)
    has: dict[tuple[str, int], tuple[int, int, int]] = field(default_factory=dict)
    ended: Counter[tuple[object, ...]] = field(default_factory=Counter)
    actions: list[Entry] = field(default_factory=list)
    now_ms: int = START_MS

    def act(self, action: AnyAction) -> None:
        self.now_ms += 7
        self.actions.append(entry(self.now_ms, action, index=len(self.actions) + 1))
        apply_to(self.share, action)

    def end(self, consumer: str, pulls: range, fate: str) -> None:
        for pull in pulls:
            found = self.has.pop((consumer, pull), None)
            if found is not None:
                self.ended[(*found, self.now_ms, fate)] += 1

    def pull(self, consumer: str, most: int, skipped: int) -> None:
        ranges = [
            Pulled(each.first, each.count, each.attempt) for each in self.share.due(1 << 62, most)
        ]
        ranges.append(Pulled(self.share.next_sequence + skipped, most, 1))
        first, before = self.share.holders[consumer].next_pull, self.share.next_sequence
        self.act(PullAction(*NAMES, consumer, tuple(ranges)))
        for each in ranges:
            for at in range(each.count):
                self.has[consumer, first] = (each.first_sequence + at, each.attempt, self.now_ms)
                first += 1
        for sequence in range(before, before + skipped):
            self.ended[(sequence, None, None, self.now_ms, "passed")] += 1

    def step(self, random: Random) -> None:
        consumer = random.choice("ab")
        holder = self.share.holders.get(consumer)
        kind = random.choice(
            ["pull", "pull", "settle", "settle", "settle", "join", "leave", "return", "reset"]
        )
        everything = range(1 << 12)
        if holder is None or kind == "join":
            self.act(Join(*NAMES, consumer, str(random.random()), 1, -1))
            self.end(consumer, everything, "again")
        elif kind == "pull":
            self.pull(consumer, random.randint(1, 6), random.choice([0, 0, 2]))
        elif kind == "settle":
            first = random.randint(max(holder.next_pull - 12, 0), holder.next_pull)
            last, verdict = first + random.randint(0, 5), random.choice([0, 0, 1, 2])
            self.act(SettleAction(*NAMES, consumer, self.now_ms, ((first, last, verdict, 0),)))
            self.end(consumer, range(first, last + 1), ("ack", "nack", "release")[verdict])
        elif kind == "leave":
            expired = random.random() < 0.5
            self.act(Leave(*NAMES, consumer, expired))
            self.end(consumer, everything, "lost" if expired else "left")
        elif kind == "return":
            received = random.randint(0, holder.next_pull)
            self.act(Return(*NAMES, consumer, received))
            self.end(consumer, everything[received + 1 :], "return")
        elif random.random() < 0.1:
            self.act(Reset(*NAMES, "", random.randint(0, self.share.next_sequence)))
            for name in "ab":
                self.end(name, everything, "reset")


@pytest.mark.parametrize("seed", range(25))
def test_each_message_has_the_fates_that_a_dumb_model_gives_it(seed: int) -> None:
    random, model = Random(seed), Model()
    for _ in range(150):
        model.step(random)
    found: Counter[tuple[object, ...]] = Counter()
    rest: Counter[tuple[object, ...]] = Counter()
    for each in deliveries(model.actions):
        for sequence in range(each.first, each.last + 1):
            if each.settled_ms is not None:
                found[sequence, each.attempt, each.pulled_ms, each.settled_ms, str(each.fate)] += 1
            elif each.fate is DeliveryFate.OPEN:
                rest[sequence, each.attempt, each.pulled_ms] += 1
    assert found == model.ended, f"seed {seed}"
    assert rest == Counter(model.has.values()), f"seed {seed}"


# --- lanes ----------------------------------------------------------------------------------------


def lane_actions() -> list[AnyAction]:
    """Range [0, 8): lane [0, 4) is token 1, lane [4, 8) token 2."""
    grants = [LaneGrant(*LANES, "left", 0, 4, "i", 1), LaneGrant(*LANES, "right", 4, 8, "i", 1)]
    return [LaneBegin(*LANES, "", 0, 8, 0, 0), *grants]


def lanes(*actions: AnyAction) -> list[tuple[object, ...]]:
    return [
        (
            each.first,
            each.last,
            each.attempt,
            each.fate,
            each.consumer,
            each.lps and tuple(each.lps),
            each.key,
        )
        for each in replayed(*lane_actions(), *actions)
    ]


def test_what_was_done_before_is_not_done_again() -> None:
    found = lanes(
        LaneDone(*LANES, "left", 1, ((0, 3), (6, 7))),
        LaneDone(*LANES, "left", 1, ((0, 9), (2, 12))),
    )
    assert [each[:2] for each in found] == [(0, 3), (6, 7), (4, 5), (8, 9), (10, 12)]


def test_a_wider_lane_is_done_where_each_part_of_it_was_not() -> None:
    found = lanes(
        LaneDone(*LANES, "left", 1, ((0, 3),)),
        LaneGrant(*LANES, "both", 0, 8, "i", 1),
        LaneDone(*LANES, "both", 3, ((0, 5),)),
    )
    assert [(each[0], each[1], each[5]) for each in found] == [
        (0, 3, (0, 4)),
        (4, 5, (0, 4)),
        (0, 5, (4, 8)),
    ]


def test_a_void_token_settles_nothing() -> None:
    assert (
        lanes(
            LaneDone(*LANES, "x", 9, ((0, 3),)),
            LaneFail(*LANES, "x", 9, 1, 1),
            LanePark(*LANES, "x", 9, 1, 2, b"k"),
        )
        == []
    )


def test_a_failed_message_is_done_at_its_next_attempt() -> None:
    failed = LaneFail(*LANES, "left", 1, 5, 2)
    assert lanes(failed)[-1][:4] == (5, 5, 3, "waiting")
    found = lanes(failed, LaneDone(*LANES, "left", 1, ((4, 6),)))
    assert [each[:4] for each in found] == [
        (5, 5, 2, "nack"),
        (4, 4, 1, "done"),
        (5, 5, 3, "done"),
        (6, 6, 1, "done"),
    ]


def test_a_parked_key_says_which_message_failed_and_which_only_followed() -> None:
    found = lanes(
        LaneFail(*LANES, "left", 1, 5, 1),
        LanePark(*LANES, "left", 1, 5, 2, b"k"),
        LanePark(*LANES, "left", 1, 8, 2, b"k"),
    )
    assert found == [
        (5, 5, 1, "nack", "left", (0, 4), None),
        (5, 5, 2, "park", "left", (2, 3), b"k"),
        (8, 8, 0, "park", "left", (2, 3), b"k"),
        (5, 5, None, "parked", "", (2, 3), b"k"),
        (8, 8, None, "parked", "", (2, 3), b"k"),
    ]


@pytest.mark.parametrize(
    ("action", "fate"),
    [
        (LaneUnpark(*LANES, "", b"k", True), "replay"),
        (LaneUnpark(*LANES, "", b"k", False), "drop"),
        (LaneReset(*LANES, "", 0, 8, 0), "reset"),
    ],
)
def test_a_key_that_is_given_back_is_parked_no_more(action: AnyAction, fate: str) -> None:
    found = lanes(
        LanePark(*LANES, "left", 1, 5, 2, b"k"), LanePark(*LANES, "left", 1, 5, 2, b"k"), action
    )
    assert [each[3] for each in found] == ["park", fate]


def test_a_replayed_message_is_done_once_more() -> None:
    found = lanes(
        LanePark(*LANES, "left", 1, 0, 2, b"k"),
        LaneDone(*LANES, "left", 1, ((1, 3),)),
        LaneUnpark(*LANES, "", b"k", True),
        LaneGrant(*LANES, "left", 0, 4, "i", 1),
        LaneDone(*LANES, "left", 3, ((0, 3),)),
    )
    assert [(each[0], each[1], each[3], each[5]) for each in found] == [
        (0, 0, "park", (2, 3)),
        (1, 3, "done", (0, 4)),
        (0, 0, "replay", (2, 3)),
        (0, 0, "done", (2, 3)),
    ]


@pytest.mark.parametrize(
    "end", [Forget(*LANES, ""), DropQueue(*LANES[:2], "", "")], ids=["group", "queue"]
)
def test_lanes_that_were_deleted_start_over(end: AnyAction) -> None:
    parked = LanePark(*LANES, "left", 1, 5, 2, b"k")
    found = lanes(parked, end, *lane_actions(), LaneDone(*LANES, "left", 1, ((0, 0),)))
    assert [(each[0], each[3]) for each in found] == [(5, "park"), (5, "reset"), (0, "done")]


def test_lanes_of_a_snapshot_continue() -> None:
    replay = Replay()
    for head, region in timed([*lane_actions(), LanePark(*LANES, "left", 1, 5, 2, b"k")]):
        assert len(list(replay.entry(head, region))) in (0, 1)
    state = replay.lanes[ShareKey(*LANES)].share.to_state()
    opening = snapshot(START_MS, [[*LANES, state, 1]])
    found = list(deliveries([opening, entry(START_MS + 1, LaneDone(*LANES, "left", 1, ((0, 5),)))]))
    told = [(each.first, each.last, each.fate, each.lps) for each in found]
    assert told == [(0, 4, "done", LpRange(0, 4)), (5, 5, "parked", LpRange(2, 3))]


# --- progress -------------------------------------------------------------------------------------


def test_progress_is_reported_once_a_second_with_the_end_of_the_log() -> None:
    times = [0, 400, 999, 1_000, 2_500]
    actions = [
        joined(),
        pulled((0, 10, 1)),
        settled((0, 4, ACK, 0)),
        settled((5, 5, NACK, 0)),
        settled((6, 6, ACK, 0)),
    ]
    found = list(
        standings(entry(START_MS + at, action) for at, action in zip(times, actions, strict=True))
    )
    assert found == [
        GroupStanding(KEY, START_MS + 999, 5, 10, 5, 0, 0, 0, 1),
        GroupStanding(KEY, START_MS + 1_000, 5, 10, 4, 1, 0, 0, 1),
        GroupStanding(KEY, START_MS + 2_500, 5, 10, 3, 1, 0, 0, 1),
    ]


def test_progress_of_lanes_is_that_of_the_slowest() -> None:
    done = [
        LaneDone(*LANES, "left", 1, ((0, 9),)),
        LaneDone(*LANES, "right", 2, ((0, 3),)),
        LanePark(*LANES, "right", 2, 6, 5, b"k"),
    ]
    (found,) = standings(timed([*lane_actions(), *done]))
    assert found == GroupStanding(ShareKey(*LANES), START_MS + 50, 4, None, 0, 0, 1, 0, 2)


def test_a_group_that_never_began_has_no_progress() -> None:
    assert list(standings(timed([LaneGrant(*LANES, "left", 0, 4, "i", 1)]))) == []


# --- whole ----------------------------------------------------------------------------------------

CRASHER = """
import sys, time
import qmq.blocking
with qmq.blocking.connect(sys.argv[1]) as mq:
    with mq.consumer("s", "ops", name="crasher", lease_ms=1000) as consumer:
        print(len(list(consumer.pull(5))), flush=True)
        time.sleep(60)
"""


async def consume(address: str) -> None:
    """Ten messages: crasher dies while it holds some; the others are done, the last one after a
    failure; one of another group is left.
    """
    async with qmq.connect(address) as mq:
        await mq.send_many("s", [b"%d" % each for each in range(10)])
        crasher = subprocess.Popen([sys.executable, "-c", CRASHER, address], stdout=subprocess.PIPE)
        assert crasher.stdout is not None
        assert int(await asyncio.to_thread(crasher.stdout.readline)) > 0
        crasher.kill()
        crasher.wait()
        crasher.stdout.close()
        async with mq.consumer("s", "ops", name="worker") as worker:
            done: set[int] = set()
            failed = False
            while len(done) < 10:
                for message in await worker.pull(10, timedelta(seconds=5)):
                    if message.sequence == 9 and not failed:
                        message.nack(timedelta(0))
                        failed = True
                    else:
                        await message.ack_sync()
                        done.add(message.sequence)
        async with mq.consumer("s", "audit", name="slow") as slow:
            assert len(list(await slow.pull(1, timedelta(seconds=5)))) == 1


def rows_at(address: LogAddress, name: str = "deliveries") -> list[dict[str, Any]]:
    columns = list(tables.COLUMNS[name])
    parts = datasets.partitions(name, address)
    return [
        row
        for part in parts
        for batch in datasets.read(name, part, columns)
        for row in batch.to_pylist()
    ]


def test_brokers_and_folders_report_the_same_of_finished_and_dead_consumers(
    node_process: NodeProcess, spark: SparkSession
) -> None:
    address = node_process.start()
    asyncio.run(consume(address))
    told = rows_at(ServerAddress(address, 10_000))
    by_spark = (
        spark.read.format("qmq")
        .option("qmq.servers", address)
        .option("qmq.log", "deliveries")
        .load()
        .toArrow()
        .to_pylist()
    )
    node_process.stop()
    files = FileAddress((str(node_process.data),))
    assert rows_at(files) == told == by_spark
    fates = {(row["consumer_group"], row["consumer"], row["verdict"]) for row in told}
    assert {
        ("ops", "crasher", "lost"),
        ("ops", "worker", "ack"),
        ("ops", "worker", "nack"),
        ("audit", "slow", "left"),
    } <= fates
    acked = [
        at
        for row in told
        if row["verdict"] == "ack"
        for at in range(row["first_sequence"], row["last_sequence"] + 1)
    ]
    assert sorted(acked) == list(range(10))
    (last,) = [row for row in told if row["verdict"] == "ack" and row["last_sequence"] == 9]
    (failed,) = [row for row in told if row["verdict"] == "nack"]
    assert last["attempt"] == failed["attempt"] + 1
    assert all(
        row["pulled_time"] <= row["settled_time"]
        for row in told
        if row["verdict"] in ("ack", "nack", "lost")
    )
    newest = {row["consumer_group"]: row for row in rows_at(files, "progress")}
    assert (
        newest["ops"]["done_before"],
        newest["ops"]["held"],
        newest["audit"]["done_before"],
    ) == (10, 0, 0)


def test_batches_are_exactly_what_spark_wants() -> None:
    actions = [
        joined(),
        pulled((0, 4, 1)),
        settled((0, 1, ACK, 0)),
        *lane_actions(),
        LanePark(*LANES, "left", 1, 5, 2, b"k"),
    ]
    (batch,) = tables.delivery_batches("g", deliveries(timed(actions)), list(tables.DELIVERIES))
    assert batch.schema == to_arrow_schema(datasets.schema_of("deliveries"), timezone="UTC")
    (some,) = tables.progress_batches("g", standings(timed([joined()])), list(tables.PROGRESS))
    assert some.schema == to_arrow_schema(datasets.schema_of("progress"), timezone="UTC")


def test_an_unknown_dataset_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="no dataset 'acks'"):
        datasets.schema_of("acks")
    with pytest.raises(InvalidArgument, match=r"option qmq\.path"):
        datasets.partitions("schedules", ServerAddress("localhost:1", 0))
