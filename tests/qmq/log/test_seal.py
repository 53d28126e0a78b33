"""A partition's last entry stays the last: after restarts, checkpoints, snapshots, and on
slaves.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from qmq_ordering.routes import LpRange
from support import ManualClock, intake

from qmq.log.actions import LaneBegin, LaneDone, LaneGrant
from qmq.log.checkpoint import close_store, discard
from qmq.log.log_config import LogConfig
from qmq.log.queue import Sealed
from qmq.log.recovery import open_store
from qmq.log.store import Store
from qmq.wire.batch import Kind, parse_envelope

CONFIG = LogConfig()


def opened(folder: Path, config: LogConfig = CONFIG) -> Store:
    return open_store(folder, config, ManualClock())


def sealed_store(folder: Path) -> Store:
    store = opened(folder)
    queue = store.open_queue("s", 1)
    store.append([intake(queue, [b"a", b"b"])])
    store.append_command(queue, "change-1", 2)
    store.commit(store.index)
    return store


@pytest.mark.parametrize("ending", ["checkpoint", "killed", "no checkpoint"])
def test_a_sealed_partition_is_sealed_after_any_restart(tmp_path: Path, ending: str) -> None:
    store = sealed_store(tmp_path)
    store.act(LaneBegin("s", 1, "g", "", 0, 8, 0, 0))
    token = store.act(LaneGrant("s", 1, "g", "c", 0, 8, "i", 1000))
    store.act(LaneDone("s", 1, "g", "c", token, ((0, 1),)))
    store.write_actions()
    if ending == "killed":
        store.close()
    else:
        close_store(store)
    if ending == "no checkpoint":
        discard(tmp_path / "checkpoint")
    store = opened(tmp_path)
    queue = store.open_queue("s", 1)
    assert queue.sealed == Sealed(2, "change-1", 2)
    assert queue.next_sequence == queue.visible_sequence == 3
    assert not queue.is_finished(queue.lanes["g"], LpRange(0, 8))
    store.act(LaneDone("s", 1, "g", "c", token, ((2, 2),)))
    assert queue.is_finished(queue.lanes["g"], LpRange(0, 8))
    store.close()


def test_the_command_message_is_an_entry_of_its_own_kind_with_a_sequence(tmp_path: Path) -> None:
    store = sealed_store(tmp_path)
    queue = store.open_queue("s", 1)
    entry = queue.index.entry(1)
    envelope, _ = store.read(queue, entry)
    assert (entry.base_sequence, entry.count) == (2, 1)
    assert parse_envelope(envelope).kind == Kind.COMMAND
    with pytest.raises(AssertionError):
        store.append_command(queue, "change-2", 3)
    store.close()


def test_a_seal_survives_in_the_snapshots_when_its_segment_is_gone(tmp_path: Path) -> None:
    small = LogConfig(segment_bytes=65_536, action_segment_bytes=65_536)
    store = opened(tmp_path, small)
    store.append_command(store.open_queue("s", 1), "c", 2)
    store.act(LaneBegin("s", 1, "g", "", 0, 8, 1, 0))
    store.write_actions()
    other = store.open_queue("t", 0)
    for number in range(30):
        store.append([intake(other, [bytes(8000)], number=number)])
        store.act(LaneDone("t", 1, "g", "c", 99, tuple((at, at) for at in range(0, 4000, 2))))
        store.write_actions()
    assert len(store.messages.bases) > 2
    assert len(store.actions.bases) > 1
    for segments in store.logs:
        for path in segments.drop_before(segments.bases[-1]):
            path.unlink()
    store.close()
    discard(tmp_path / "checkpoint")
    store = opened(tmp_path, small)
    queue = store.open_queue("s", 1)
    assert queue.sealed == Sealed(0, "c", 2)
    assert queue.lanes["g"].done_before() == 1
    assert queue.is_finished(queue.lanes["g"], LpRange(0, 8))
    store.close()


def test_hazard_4_missing_parent_progress_is_not_read_as_done(tmp_path: Path) -> None:
    """Hazard 4 (KCL): a lease that is not found must not let the child begin."""
    store = sealed_store(tmp_path)
    queue = store.open_queue("s", 1)
    assert not queue.is_finished(None, LpRange(0, 8))
    queue.start_sequence = 2  # retention has taken the messages
    assert queue.is_finished(None, LpRange(0, 8))
    store.close()
