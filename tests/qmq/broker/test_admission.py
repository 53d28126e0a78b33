"""A broker's admission of batches: numbers without gaps, no older session after a newer one, and
duplicates only with the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support import ManualClock

from qmq.broker.produce_checks import Admission
from qmq.errors import NumberTaken, Outcome, OutOfSequence, ProducerFenced
from qmq.log.log_config import LogConfig
from qmq.log.queue import WINDOW, Queue
from qmq.log.recovery import open_store
from qmq.log.store import Intake, Store
from qmq.model import begins_session, next_session, session_of
from qmq.wire.batch import encode, sent_sizes
from qmq.wire.batch_columns import BatchFlag, Columns, parse_header

SECOND = next_session(0)
THIRD = next_session(SECOND)


@dataclass
class World:
    """A store with an ordered partition and an unordered queue."""

    store: Store
    ordered: Queue
    plain: Queue

    def batch(
        self, number: int, body: bytes = b"x", *, queue: Queue | None = None, flags: int = 0
    ) -> Intake:
        queue = queue or self.ordered
        envelope, region = encode(
            queue.id.subject.encode(),
            Columns([body]),
            producer_id=7,
            batch_sequence=number,
            create_time_ms=1,
            flags=flags,
            partition=queue.id.partition,
        )
        return Intake(queue, region, sent_sizes(envelope)[1], parse_header(region), 0)

    def write(self, *batches: Intake) -> list[int]:
        """Admit batches in one write, each as a separate request, store them, and return the
        sequences.
        """
        admission = Admission(self.store, lambda _: True)
        for each in batches:
            admission.admit([each])
        return [each.base_sequence for each in self.store.append(list(batches))]


def opened(folder: Path) -> World:
    store = open_store(folder, LogConfig(), ManualClock())
    return World(store, store.open_queue("s", 1), store.open_queue("plain", 0))


@pytest.fixture
def it(tmp_path: Path) -> Iterator[World]:
    world = opened(tmp_path)
    yield world
    world.store.close()


# --- sessions -------------------------------------------------------------------------------------


def test_the_numbers_of_sessions() -> None:
    assert [session_of(number) for number in (-1, 0, SECOND - 1, SECOND, THIRD + 5)] == [
        -1,
        0,
        0,
        1,
        2,
    ]
    assert [
        number for number in (0, 1, SECOND - 1, SECOND, SECOND + 1, THIRD) if begins_session(number)
    ] == [0, SECOND, THIRD]
    assert [next_session(number) for number in (-1, 0, SECOND - 1, SECOND + 7)] == [
        0,
        SECOND,
        SECOND,
        THIRD,
    ]


def test_a_newer_session_begins_behind_whatever_there_is_and_fences_the_older_ones(
    it: World,
) -> None:
    assert it.write(it.batch(0)) == [0]
    with pytest.raises(OutOfSequence):
        it.write(it.batch(SECOND + 1))
    assert it.write(it.batch(THIRD)) == [1]
    for late in (1, SECOND, SECOND + 1):
        with pytest.raises(ProducerFenced, match="session 2 has begun") as refused:
            it.write(it.batch(late))
        assert refused.value.outcome is Outcome.NOT_STORED
    with pytest.raises(OutOfSequence):
        it.write(it.batch(THIRD + 2))
    assert it.write(it.batch(THIRD + 1)) == [2]
    assert it.write(it.batch(0)) == [0], "what an older session stored is answered again"


def test_sessions_are_kept_apart_within_one_write(it: World) -> None:
    admission = Admission(it.store, lambda _: True)
    admission.admit([it.batch(0)])
    admission.admit([it.batch(SECOND), it.batch(SECOND + 1)])
    with pytest.raises(ProducerFenced):
        admission.admit([it.batch(1)])
    with pytest.raises(ProducerFenced):
        admission.admit([it.batch(SECOND + 2), it.batch(1)])
    admission.admit([it.batch(SECOND + 2), it.batch(THIRD)])


def test_a_session_may_be_the_first_that_a_partition_sees_of_a_producer(it: World) -> None:
    assert it.write(it.batch(SECOND)) == [0]
    with pytest.raises(ProducerFenced):
        it.write(it.batch(0))


def test_sessions_are_known_after_a_restart(tmp_path: Path) -> None:
    first = opened(tmp_path)
    first.write(first.batch(0))
    first.write(first.batch(SECOND))
    first.store.close()
    again = opened(tmp_path)
    with pytest.raises(ProducerFenced):
        again.write(again.batch(1))
    again.store.close()


# --- duplicates -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["ordered", "plain"])
def test_a_number_that_is_taken_by_other_content_is_refused(it: World, kind: str) -> None:
    queue = it.ordered if kind == "ordered" else it.plain
    assert it.write(it.batch(0, b"mine", queue=queue)) == [0]
    assert it.write(it.batch(0, b"mine", queue=queue)) == [0]
    with pytest.raises(NumberTaken, match="other content") as refused:
        it.write(it.batch(0, b"forged", queue=queue))
    assert refused.value.outcome is Outcome.NOT_STORED
    assert queue.next_sequence == 1


@pytest.mark.parametrize("kind", ["ordered", "plain"])
def test_within_one_write_too(it: World, kind: str) -> None:
    queue = it.ordered if kind == "ordered" else it.plain
    admission = Admission(it.store, lambda _: True)
    admission.admit([it.batch(0, b"mine", queue=queue)])
    admission.admit([it.batch(0, b"mine", queue=queue)])
    with pytest.raises(NumberTaken):
        admission.admit([it.batch(0, b"forged", queue=queue)])
    with pytest.raises(NumberTaken):
        admission.admit([it.batch(1, b"mine", queue=queue), it.batch(1, b"forged", queue=queue)])


def test_what_fell_out_of_the_window_is_compared_in_the_log(tmp_path: Path) -> None:
    it = opened(tmp_path)
    for number in range(3 * WINDOW):
        it.write(it.batch(number, b"%d" % number, queue=it.plain))
    it.store.close()
    it = opened(tmp_path)
    assert it.write(it.batch(1, b"1", queue=it.plain)) == [1]
    with pytest.raises(NumberTaken):
        it.write(it.batch(1, b"forged", queue=it.plain))
    it.store.close()


def test_the_retry_flag_does_not_count_as_different_content(it: World) -> None:
    again = int(BatchFlag.AGAIN)
    it.write(it.batch(0), it.batch(1, flags=again))
    assert it.write(it.batch(0, flags=again), it.batch(1), it.batch(1, flags=again)) == [0, 1, 1]
    for number in (0, 1):
        for flags in (0, again):
            with pytest.raises(NumberTaken):
                it.write(it.batch(number, b"forged", flags=flags))


def test_what_retention_took_is_taken_for_the_same(it: World) -> None:
    it.write(it.batch(0, b"mine", queue=it.plain))
    it.write(it.batch(1, b"mine", queue=it.plain))
    it.plain.start_sequence = 1
    assert it.write(it.batch(0, b"mine", queue=it.plain)) == [0]
