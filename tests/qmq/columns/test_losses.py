"""What a stream lost is said once, and counted once; that retention is near is said before."""

from __future__ import annotations

from qmq.columns.losses import LossCount, LostRange, RetentionWatch, lost_ranges, lost_text
from qmq.columns.model import QueueKey, SourceQueue

ONE, TWO = QueueKey("orders", 0, "g1"), QueueKey("orders", 0, "g2")


def queue(start: int, end: int, key: QueueKey = ONE) -> SourceQueue:
    return SourceQueue(key, start, end)


def test_all_that_is_gone_is_named_for_each_queue() -> None:
    queues = {ONE: queue(500, 900), TWO: queue(50, 60, TWO)}
    found = lost_ranges({ONE: 5, TWO: 50}, {ONE: 100, TWO: 60}, queues)
    assert found == [LostRange(ONE, 5, 500)]
    found = lost_ranges({ONE: 5, TWO: 49}, {ONE: 100, TWO: 60}, queues)
    text = lost_text(found, "copy")
    assert text.startswith("reader copy: 496 messages were deleted before they were read")
    assert "messages 5 to 499 of orders/0@g1 (495); messages 49 to 49 of orders/0@g2 (1)" in text


def test_a_text_about_many_queues_is_short() -> None:
    found = [LostRange(QueueKey("s", number, "g1"), 0, 1) for number in range(1, 1_001)]
    text = lost_text(found)
    assert text.startswith("1000 messages")
    assert text.endswith("; and of 900 more queues")


def test_a_loss_is_reported_once_and_counted_by_its_micro_batches() -> None:
    losses = LossCount()
    gone = LostRange(ONE, 5, 500)
    assert losses.add([gone], {ONE: 35}) == [gone]
    assert losses.add([gone], {ONE: 35}) == [], "the micro-batch is planned again"
    assert losses.lost == {ONE: 30}
    assert losses.add([LostRange(ONE, 35, 500)], {ONE: 700}) == []
    assert losses.lost == {ONE: 495}
    assert losses.add([LostRange(ONE, 700, 710)], {ONE: 800}) == [LostRange(ONE, 700, 710)]
    assert losses.lost == {ONE: 505}


def test_retention_that_comes_near_is_reported_once_with_the_time_left() -> None:
    watch = RetentionWatch()
    done = {ONE: 300}
    assert watch.look({ONE: queue(0, 1_000)}, done, 0.0) == []
    assert watch.look({ONE: queue(200, 1_000)}, done, 10.0) == [], "it may have been a purge"
    (near,) = watch.look({ONE: queue(250, 1_000)}, done, 20.0)
    assert str(near) == (
        "orders/0@g1 keeps messages 250 to 999; 50 of these 750 are read, and 700 wait: retention "
        "is about to delete messages from 300 on before they are read, in about 10 s as it goes now"
    )
    assert watch.look({ONE: queue(260, 1_000)}, done, 30.0) == [], "it was reported"
    assert watch.look({ONE: queue(260, 1_000)}, {ONE: 900}, 40.0) == []
    assert watch.look({ONE: queue(890, 2_000)}, {ONE: 900}, 50.0) != [], "it is near again"


def test_a_stream_that_has_read_all_is_not_near_a_loss() -> None:
    watch = RetentionWatch()
    for start in range(0, 1_000, 100):
        assert watch.look({ONE: queue(start, 1_000)}, {ONE: 1_000}, start) == []
        assert watch.look({ONE: queue(start, start)}, {ONE: start}, start) == []
