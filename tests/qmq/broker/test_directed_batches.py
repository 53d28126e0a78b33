"""Directed batches at a broker: which groups get them, which skip them, which batches are refused,
and that a replay indexes them in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from qmq_ordering.routes import LpRange
from support import ManualClock
from support.invariants import check_group

from qmq.broker.dispatch.pull import BatchReader, PullResult, TagFilter, collect
from qmq.broker.produce_checks import Destination, read_batch
from qmq.errors import InvalidArgument, OrderMismatch
from qmq.limits import MIB
from qmq.log.actions import Begin, Join, PullAction, Pulled
from qmq.log.consume_log import IndexEntry
from qmq.log.log_config import LogConfig
from qmq.log.queue import Queue
from qmq.log.recovery import open_store
from qmq.log.store import Intake, Store
from qmq.rpc.channel import LOOK_INSIDE, failures, group_of
from qmq.wire.batch import encode, sent_sizes
from qmq.wire.batch_columns import BatchFlag, Columns

TO_A, TO_B = {"qmq-group": b"a", "x": b"y"}, {"x": b"z", "qmq-group": b"b"}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = open_store(tmp_path, LogConfig(), ManualClock())
    yield opened
    opened.close()


@pytest.fixture
def queue(store: Store) -> Queue:
    return store.open_queue("s", 0)


DIRECTED = BatchFlag.DIRECTED


def checked(
    queue: Queue,
    columns: Columns,
    *,
    number: int = 0,
    flags: int = DIRECTED,
    lps: LpRange | None = None,
    takes_due_times: bool = False,
) -> Intake:
    """A batch as the broker takes it in."""
    envelope, region = encode(
        b"s", columns, producer_id=7, batch_sequence=number, create_time_ms=1, flags=flags
    )
    destination = Destination(
        queue, MIB, lps, check_due_times=_takes_any if takes_due_times else None
    )
    return read_batch(region, sent_sizes(envelope)[1], lambda *_: destination)


def _takes_any(*_: object) -> None:
    """A delay server's check that finds nothing."""


class Log:
    """The stored batches of a queue: two messages each, directed to a group or to all."""

    def __init__(self, store: Store, queue: Queue) -> None:
        self.store, self.queue, self.count = store, queue, 0

    def add(
        self, headers: Mapping[str, bytes] | None = None, tags: tuple[str, ...] | None = None
    ) -> None:
        columns = Columns(
            [b"x", b"y"],
            headers=[headers] * 2 if headers else None,
            tags=[tags] * 2 if tags else None,
        )
        flags = DIRECTED if headers and "qmq-group" in headers else 0
        self.store.append([checked(self.queue, columns, number=self.count, flags=flags)])
        self.count += 1


class Group:
    """A consumer group with one consumer."""

    def __init__(self, log: Log, name: str, tags: TagFilter | None = None) -> None:
        self.log, self.name, self.tags = log, name, tags
        self.reader = BatchReader(log.queue)
        log.store.act(Begin("s", 0, name, "", 0))
        log.store.act(Join("s", 0, name, "c", "i", 1000, -1))

    def pull(self, messages_max: int = 100) -> PullResult:
        share = self.log.queue.share(self.name)
        found = collect(
            self.log.store, self.reader, self.name, share, self.tags, messages_max, MIB, 0
        )
        if found.pulled:
            self.log.store.act(PullAction("s", 0, self.name, "c", tuple(found.pulled)))
            check_group(share)
        return found

    @property
    def next(self) -> int:
        return self.log.queue.share(self.name).next_sequence


@pytest.fixture
def log(store: Store, queue: Queue) -> Log:
    return Log(store, queue)


def sequences(delivery: PullResult) -> list[int]:
    return [
        sequence
        for each in delivery.pieces
        for sequence in range(each.first, each.first + each.count)
    ]


# --- handing out ----------------------------------------------------------------------------------


def test_a_directed_batch_goes_to_its_group_and_others_pass_over_it(log: Log) -> None:
    log.add()
    log.add(TO_A)
    log.add()
    a, b = Group(log, "a"), Group(log, "b")
    assert sequences(a.pull()) == [0, 1, 2, 3, 4, 5]
    assert sequences(Group(log, "aa").pull()) == [0, 1, 4, 5], (
        "its name only begins with the other one's"
    )
    found = b.pull()
    assert sequences(found) == [0, 1, 4, 5]
    assert found.pulled == [Pulled(0, 2, 1), Pulled(4, 2, 1)]
    assert a.next == b.next == 6


def test_a_group_moves_past_directed_batches_of_others_at_the_end(log: Log) -> None:
    log.add()
    log.add(TO_A)
    log.add(TO_A)
    b = Group(log, "b")
    assert b.pull().pulled == [Pulled(0, 2, 1), Pulled(6, 0, 1)]
    log.add(TO_A)
    found = b.pull()
    assert (found.pulled, found.pieces, b.next) == ([Pulled(8, 0, 1)], [], 8)
    assert b.pull().pulled == [], "nothing is left for it"


def test_a_directed_batch_may_be_handed_out_in_parts(log: Log) -> None:
    log.add(TO_A)
    log.add(TO_B)
    log.add()
    a = Group(log, "a")
    assert [sequences(a.pull(1)) for _ in range(5)] == [[0], [1], [4], [5], []]


def test_tags_choose_among_directed_messages_as_among_others(log: Log) -> None:
    log.add(TO_A, ("red",))
    log.add(TO_A, ("blue",))
    log.add(TO_A)
    log.add(TO_B, ("red",))
    log.add(None, ("red",))
    log.add(None, ("blue",))
    assert sequences(Group(log, "a", TagFilter.of(["red"], [])).pull()) == [0, 1, 8, 9]
    assert sequences(Group(log, "b", TagFilter.of([], ["blue"])).pull()) == [10, 11]
    assert sequences(Group(log, "c", TagFilter.of(["red", "blue"], [])).pull()) == [8, 9, 10, 11]


def test_a_batch_whose_bloom_is_full_by_its_tags_goes_to_everybody(
    store: Store, queue: Queue
) -> None:
    tags = [tuple(f"{message}-{tag}" for tag in range(10)) for message in range(100)]
    batch = checked(queue, Columns([b"x"] * 100, tags=tags), flags=0)
    assert batch.tag_bloom == LOOK_INSIDE
    store.append([batch])
    for name in ("a", "b"):
        assert sequences(Group(Log(store, queue), name).pull()) == list(range(100))


# --- taking in ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers",
    [
        None,
        [{}, {}],
        [{"x": b"a"}, {"qmq-group": b"a"}],
        [{"qmq-group": b"a"}, {"x": b"a"}],
        [{"qmq-group": b"a"}, {"qmq-group": b"b"}],
        [{"qmq-group": b""}] * 2,
        [{"qmq-group": b"\xff"}] * 2,
        [{"qmq-group": b"a b"}] * 2,
    ],
)
@pytest.mark.parametrize("due_times_ms", [None, [5, 6]])
def test_a_directed_batch_without_a_group_is_refused_everywhere(
    queue: Queue, headers: list[Mapping[str, bytes]] | None, due_times_ms: list[int] | None
) -> None:
    with pytest.raises(InvalidArgument, match="qmq-group"):
        checked(
            queue,
            Columns([b"x", b"y"], headers=headers, due_times_ms=due_times_ms),
            takes_due_times=due_times_ms is not None,
        )
    checked(
        queue,
        Columns([b"x", b"y"], headers=headers, due_times_ms=due_times_ms),
        takes_due_times=due_times_ms is not None,
        flags=0,
    )


def test_a_directed_batch_to_an_ordered_subject_is_refused(queue: Queue) -> None:
    columns = Columns([b"x"], keys=[b"k"], headers=[TO_A], logical_partitions=[0])
    with pytest.raises(OrderMismatch, match="directed"):
        checked(queue, columns, lps=LpRange(0, 1))
    checked(queue, columns, lps=LpRange(0, 1), flags=0)
    delayed = Columns([b"x"], keys=[b"k"], headers=[TO_A], due_times_ms=[5])
    with pytest.raises(OrderMismatch, match="directed"):
        checked(queue, delayed, flags=DIRECTED | BatchFlag.ORDERED, takes_due_times=True)


def test_a_replay_indexes_directed_batches_as_they_were_indexed(tmp_path: Path) -> None:
    def entries(store: Store) -> list[IndexEntry]:
        index = store.open_queue("s", 0).index
        return [entry for _, entry in index.scan(index.first)]

    store = open_store(tmp_path, LogConfig(), ManualClock())
    log = Log(store, store.open_queue("s", 0))
    for headers, tags in ((None, ("t",)), (TO_A, None), (TO_B, ("t",)), ({"x": b"y"}, None)):
        log.add(headers, tags)
    stored = entries(store)
    assert [entry.tag_bloom == LOOK_INSIDE for entry in stored] == [False, True, True, False]
    store.close()
    again = open_store(tmp_path, LogConfig(), ManualClock())
    assert entries(again) == stored
    again.close()


# --- what a batch says ----------------------------------------------------------------------------


def region(headers: list[Mapping[str, bytes]] | None, flags: int) -> bytes:
    return encode(
        b"s",
        Columns([b"x"] * 2, headers=headers),
        producer_id=7,
        batch_sequence=0,
        create_time_ms=1,
        flags=flags,
    )[1]


def test_the_group_is_that_of_the_first_message() -> None:
    assert group_of(region([TO_B, TO_A], DIRECTED)) == b"b"
    assert group_of(region([TO_B, TO_B], 0)) is None
    assert group_of(region([{}, TO_A], DIRECTED)) == group_of(region(None, DIRECTED)) == b"", (
        "of no group"
    )


@pytest.mark.parametrize(
    ("value", "count"),
    [(b"1", 1), (b"12", 12), (b"", 0), (b"-1", 0), (b"x", 0), (b"1" * 10, 0), (b"\xb2", 0)],
)
def test_only_a_decimal_number_counts_as_failures(value: bytes, count: int) -> None:
    assert failures({"qmq-attempt": value}) == count
    assert failures({}) == 0
