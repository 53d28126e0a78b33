"""A batch that is received twice is checked and decoded once, and only if both are equal."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from qmq.client.consuming.message import ArrivedBatches, ReceivedBatches
from qmq.errors import CorruptBatch
from qmq.wire.batch import ENVELOPE_BYTES, Kind, encode, place, region_crc_of
from qmq.wire.batch_columns import Columns
from qmq.wire.frame_payloads import Range


def stored(base: int, *bodies: bytes, index: int = 1, epoch: int = 1) -> bytes:
    """A batch as a master stored it, its first message at `base`."""
    sent, region = encode(
        b"s", Columns(list(bodies)), producer_id=1, batch_sequence=0, create_time_ms=1
    )
    return (
        place(
            Kind.DATA, ENVELOPE_BYTES + len(region), region_crc_of(sent), base, epoch, index, 1, 0
        )
        + region
    )


FIRST = stored(0, b"a", b"b", b"c")
SECOND = stored(3, b"d", b"e", index=2)


def alone() -> ArrivedBatches:
    """For a consumer that gets each delivery in another round."""
    return ArrivedBatches(lambda call: call())


def test_a_batch_in_which_a_delivery_ended_stands_for_its_copy_in_the_next() -> None:
    received = ReceivedBatches(alone())
    (first,) = received.read(FIRST, 0, 1, [Range(0, 2, 1, 0)])
    again, second = received.read(FIRST + SECOND, 0, 2, [Range(2, 1, 1, 0), Range(3, 2, 1, 1)])
    assert again is first
    assert second.bodies == [b"d", b"e"]


def test_a_range_behind_the_batches_that_came_is_of_the_kept_batch() -> None:
    received = ReceivedBatches(alone())
    (first,) = received.read(FIRST, 0, 1, [Range(0, 1, 1, 0)])
    assert received.kept == 0
    assert received.read(b"", 0, 0, [Range(1, 1, 1, 0)]) == [first]
    assert received.kept == 0
    second, again = received.read(SECOND, 0, 1, [Range(2, 1, 1, 1), Range(3, 1, 1, 0)])
    assert (again, second.bodies, received.kept) == (first, [b"d", b"e"], 3)


def test_a_batch_is_kept_for_the_next_delivery_only() -> None:
    received = ReceivedBatches(alone())
    (first,) = received.read(FIRST, 0, 1, [Range(0, 1, 1, 0)])
    received.read(SECOND, 0, 1, [Range(3, 2, 1, 0)])
    (again,) = received.read(FIRST, 0, 1, [Range(1, 1, 1, 0)])
    assert again is not first


@pytest.mark.parametrize(
    "other",
    [
        stored(0, b"x", b"y", b"z"),
        stored(0, b"a", b"b", b"c", index=2),
        stored(0, b"a", b"b", b"c", epoch=2),
    ],
)
def test_another_batch_at_the_same_sequence_does_not_pass_for_a_copy(other: bytes) -> None:
    received = ReceivedBatches(alone())
    (first,) = received.read(FIRST, 0, 1, [Range(0, 1, 1, 0)])
    (found,) = received.read(other, 0, 1, [Range(1, 1, 1, 0)])
    assert found is not first


def test_a_batch_names_the_server_that_it_came_from() -> None:
    received = ReceivedBatches(alone())
    (first,) = received.read(FIRST, 0, 1, [Range(0, 1, 1, 0)], "one:1")
    (again,) = received.read(FIRST, 0, 1, [Range(1, 1, 1, 0)], "two:2")
    assert (first.server, again.server) == ("one:1", "two:2")


def test_a_batch_whose_checksum_is_wrong_is_refused() -> None:
    received = ReceivedBatches(alone())
    received.read(FIRST, 0, 1, [Range(0, 1, 1, 0)])
    with pytest.raises(CorruptBatch):
        received.read(
            SECOND[:ENVELOPE_BYTES] + bytes(len(SECOND) - ENVELOPE_BYTES), 0, 1, [Range(3, 2, 1, 0)]
        )


def test_a_batch_that_two_consumers_get_in_a_round_is_decoded_once() -> None:
    ends: list[Callable[[], object]] = []
    arrived = ArrivedBatches(ends.append)
    mine, other = ReceivedBatches(arrived), ReceivedBatches(arrived)
    ranges = [Range(0, 3, 1, 0)]
    (first,) = mine.read(FIRST, 0, 1, ranges, "one:1")
    assert other.read(FIRST, 0, 1, ranges, "one:1") == [first]
    assert other.read(FIRST, 0, 1, ranges, "two:1")[0].server == "two:1"
    with pytest.raises(CorruptBatch):
        other.read(FIRST[:-8], 0, 1, ranges, "one:1")
    for each in ends:
        each()
    assert mine.read(FIRST, 0, 1, ranges, "one:1") != [first]
