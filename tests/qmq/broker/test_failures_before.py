"""How often messages failed before they were sent again, read from a queue of ordinary and directed
batches.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support import ManualClock, intake

from qmq import model
from qmq.broker.dispatch.pull import BatchReader, failures_in
from qmq.errors import LogDamaged
from qmq.log.log_config import LogConfig
from qmq.log.recovery import open_store
from qmq.log.store import Store
from qmq.wire.batch_columns import BatchFlag


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Messages 0 to 2 as they were sent; 3 and 4 failed 4 times and once before; 5 and 6 as they
    were sent.
    """
    found = open_store(tmp_path / "store", LogConfig(), ManualClock())
    queue = found.open_queue("s", 0)
    own = [{model.GROUP: b"g", model.ATTEMPT: b"%d" % times} for times in (4, 1)]
    found.append(
        [
            intake(queue, [b"a", b"b", b"c"], number=0),
            intake(queue, [b"d", b"e"], number=1, flags=BatchFlag.DIRECTED, headers=own),
            intake(queue, [b"f", b"g"], number=2),
        ]
    )
    return found


def asked(store: Store, sequence: int, count: int) -> list[int]:
    queue = store.open_queue("s", 0)
    found = failures_in(store, queue, BatchReader(queue))(sequence, count)
    return [times for number, times in found for _ in range(number)]


def test_a_range_over_several_batches_knows_of_each_message(store: Store) -> None:
    assert asked(store, 0, 7) == [0, 0, 0, 4, 1, 0, 0]
    assert asked(store, 2, 2) == [0, 4]
    assert asked(store, 4, 1) == [1]
    assert asked(store, 6, 3) == [0, 0, 0], "what is behind the end never failed"


def test_a_damaged_copy_counts_as_never_failed_and_stops_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged(*_: object) -> tuple[bytes, bytes]:
        raise LogDamaged("a flipped bit (in this test)")

    monkeypatch.setattr(store, "read", damaged)
    assert asked(store, 0, 7) == [0] * 7
