"""Duplicates are recognised: recent ones by the producer's window, older ones if the batch is
flagged as a possible duplicate.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from replica_support import checkpoint
from support import ManualClock, intake

from qmq.log.checkpoint import begin_checkpoint
from qmq.log.log_config import LogConfig
from qmq.log.queue import CLOCKS_MS, WINDOW
from qmq.log.recovery import open_store
from qmq.wire.batch_columns import BatchFlag

HOUR_MS = 3_600_000


def test_a_batch_with_the_flag_again_is_stored_once_after_its_producer_expired(
    tmp_path: Path,
) -> None:
    clock = ManualClock()
    store = open_store(tmp_path, LogConfig(producer_expiry_ms=HOUR_MS), clock)
    queue = store.open_queue("s", 0)
    producer = clock.now_ms << 20
    first = store.append([intake(queue, [b"x"], producer=producer)])
    clock.now_ms += 26 * HOUR_MS
    store.append([intake(queue, [b"other"], producer=producer + 1)])
    checkpoint(store)
    assert producer not in queue.producers.windows

    assert store.append([intake(queue, [b"x"], producer=producer, flags=BatchFlag.AGAIN)]) == first
    assert queue.next_sequence == 2
    assert (
        store.append([intake(queue, [b"y"], producer=producer, number=1, flags=BatchFlag.AGAIN)])[
            0
        ].base_sequence
        == 2
    )
    store.close()


def test_batches_outside_the_window_are_found_for_any_producer_clock(tmp_path: Path) -> None:
    clock = ManualClock()
    store = open_store(tmp_path, LogConfig(), clock)
    queue = store.open_queue("s", 0)
    producer = (
        clock.now_ms + 10 * CLOCKS_MS
    ) << 20  # born far in the future, as far as the broker can tell
    first = store.append([intake(queue, [b"x"], producer=producer)])
    for number in range(1, 3 * WINDOW):
        store.append([intake(queue, [b"x"], producer=producer, number=number)])
    assert store.append([intake(queue, [b"x"], producer=producer)]) == first
    store.close()


@pytest.mark.parametrize("ahead_ms", [CLOCKS_MS - 1, 1_000 * CLOCKS_MS], ids=["a day", "years"])
def test_a_producer_whose_clock_is_ahead_is_recognised(tmp_path: Path, ahead_ms: int) -> None:
    clock = ManualClock()
    store = open_store(tmp_path, LogConfig(), clock)
    queue = store.open_queue("s", 0)
    producer = (clock.now_ms + ahead_ms) << 20
    first = store.append([intake(queue, [b"x"], producer=producer)])
    queue.producers.expire(clock.now_ms + 1)
    assert producer not in queue.producers.windows
    assert store.append([intake(queue, [b"x"], producer=producer, flags=BatchFlag.AGAIN)]) == first
    assert queue.next_sequence == 1
    store.close()


def test_the_highest_number_is_recognised_when_lower_ones_have_pushed_it_out(
    tmp_path: Path,
) -> None:
    """Numbers that were refused come after later ones, so the highest may be the first that the
    window forgets.
    """
    clock = ManualClock()
    store = open_store(tmp_path, LogConfig(), clock)
    queue = store.open_queue("s", 0)
    highest = 2 * WINDOW
    first = store.append([intake(queue, [b"x"], number=highest)])
    for number in range(WINDOW):
        store.append([intake(queue, [b"x"], number=number)])
    assert store.append([intake(queue, [b"x"], number=highest)]) == first
    begin_checkpoint(store).run()
    store.close()

    store = open_store(tmp_path, LogConfig(), clock)
    queue = store.open_queue("s", 0)
    assert store.append([intake(queue, [b"x"], number=highest)]) == first
    assert store.append([intake(queue, [b"y"], number=highest + 1)])[0].base_sequence == WINDOW + 1
    store.close()
