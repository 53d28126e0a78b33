"""A step is one entry: after any crash, on every replica and after every replay the settlement and
the effects are both there, or neither is.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from shutil import copytree

import pytest
from replica_support import SMALL, checkpoint, feed_all, files, opened, small, state_of
from support import ManualClock, intake
from support.retention import begin_retention, end_retention
from support.steps import acknowledged, effect, waiting_effects

from qmq.errors import DiskFull, InvalidArgument
from qmq.log.actions import (
    Begin,
    DropQueue,
    Join,
    LaneBegin,
    LaneDone,
    LaneGrant,
    PullAction,
    Pulled,
    StepDone,
    StepPlan,
)
from qmq.log.checkpoint import close_store, discard
from qmq.log.log_config import LogConfig
from qmq.log.queue import Queue
from qmq.log.step_record import Effect
from qmq.log.step_state import STEPS_QUEUE, StepState
from qmq.log.store import StepIntake, Store
from qmq.model import STEPS, SubjectConfig

WHERE = ("s", 0, "g")


def store_with_deliveries(
    folder: Path, count: int = 8, config: LogConfig = SMALL, clock: ManualClock | None = None
) -> Store:
    """A consumer holds `count` messages, one in each of its pull sequences."""
    store = opened(folder, config, clock=clock)
    store.append_barrier(1)
    queue = store.open_queue("s", 0)
    store.append([intake(queue, [b"x"] * count)])
    store.act(Begin(*WHERE, "", 0))
    store.act(Join(*WHERE, "c", "i", 1000, -1))
    store.act(PullAction(*WHERE, "c", (Pulled(0, count, 1),)))
    return store


def source(store: Store) -> Queue:
    return store.open_queue("s", 0)


def steps_of(store: Store) -> StepState:
    found = store.open_queue(STEPS, 0).steps
    assert found is not None
    return found


def step(store: Store, number: int, *effects: Effect, is_again: bool = False) -> int:
    """The step of message `number`. Returns its sequence."""
    settlement = acknowledged(source(store), "g", "c", number, number)
    taken = StepIntake(1 << 40, number, (settlement,), effects, is_again)
    return store.append_step(taken).base_sequence


def held(store: Store) -> list[int]:
    holder = source(store).shares["g"].holders.get("c")
    return (
        [n for item in holder.held for n in range(item.pull, item.pull + item.count)]
        if (holder is not None)
        else []
    )


def test_a_step_settles_its_messages_and_its_effects_wait(tmp_path: Path) -> None:
    store = store_with_deliveries(tmp_path)
    queue = source(store)
    assert queue.holds(acknowledged(queue, "g", "c", 0, 7))
    assert step(store, 0, effect("a", [b"1", b"2"]), effect("b", [b"3"])) == 0
    assert step(store, 2, effect("a", [b"4"])) == 1
    assert held(store) == [1, 3, 4, 5, 6, 7]
    assert not queue.holds(acknowledged(queue, "g", "c", 0, 0))
    assert not queue.holds(acknowledged(queue, "g", "c", 1, 2))
    assert not queue.holds(acknowledged(queue, "g", "d", 1, 1))
    assert queue.holds(acknowledged(queue, "g", "c", 3, 7))
    assert waiting_effects(store, "a") == [(0, 0), (0, 1), (1, 2)]
    assert waiting_effects(store, "b") == [(0, 0)]
    store.close()


def test_a_repeated_step_is_known_by_its_number(tmp_path: Path) -> None:
    store = store_with_deliveries(tmp_path)
    step(store, 0, effect("a", [b"1"]))
    before = state_of(store)
    assert step(store, 0, effect("a", [b"1"]), is_again=True) == 0
    assert store.find_step(1 << 40, 0, is_again=True) is not None
    assert store.find_step(1 << 40, 1, is_again=True) is None
    assert state_of(store) == before
    store.close()


def test_a_step_that_is_none_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    store = store_with_deliveries(tmp_path)
    index = store.index
    with pytest.raises(InvalidArgument):
        step(store, 0, effect("a", [b"1"]), effect("a", [b"2"]))
    assert (store.index, held(store)) == (index, list(range(8)))
    store.close()


def test_without_room_nothing_of_a_step_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_with_deliveries(tmp_path)
    store.write_actions()

    def full(*_: object, **__: object) -> None:
        raise DiskFull("no room")

    monkeypatch.setattr(store.space, "require", full)
    before = state_of(store)
    with pytest.raises(DiskFull):
        step(store, 0, effect("a", [b"1"]))
    assert state_of(store) == before
    store.close()


@pytest.mark.parametrize("log", ["message", "action"])
def test_wherever_a_log_is_cut_a_step_is_there_as_a_whole_or_not_at_all(
    tmp_path: Path, log: str
) -> None:
    config = LogConfig()
    store = store_with_deliveries(tmp_path / "store", config=config)
    for number in (0, 1):
        step(store, number, effect("a", [b"x"]), effect("b", [b"y"]))
    store.write_actions()
    store.close()
    seen = set[int]()
    newest = max(name for name in files(tmp_path / "store") if name.startswith(log))
    size = (tmp_path / "store" / newest).stat().st_size
    for end in range(0, size + 1, 8):
        folder = tmp_path / str(end)
        copytree(tmp_path / "store", folder)
        with (folder / newest).open("r+b") as file:
            file.truncate(end)
        cut = opened(folder, config)
        decided = steps_of(cut).targets
        counts = {name: target.next_number for name, target in decided.items()}
        if held_is_known(cut):
            settled = 8 - len(held(cut))
            assert counts == ({"a": settled, "b": settled} if settled else {})
            seen.add(settled)
        else:
            assert counts == {}
        cut.close()
    assert seen == ({0, 1, 2} if log == "message" else {1, 2})


def held_is_known(store: Store) -> bool:
    """Whether the deliveries are in what is left of the log."""
    share = source(store).shares.get("g")
    return share is not None and share.next_sequence == 8


ENDINGS: dict[str, tuple[Callable[[Store], None], Callable[[Store], None]]] = {
    "kill": (lambda _: None, Store.close),
    "checkpoint": (lambda _: None, close_store),
    "behind a checkpoint": (lambda store: more(store), Store.close),
}


def more(store: Store) -> None:
    checkpoint(store)
    step(store, 5, effect("a", [b"late"]), effect("c", [b"new"]))
    store.act(StepDone(*STEPS_QUEUE, (1,)))
    store.write_actions()


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("is_lost", [False, True], ids=["as it is", "checkpoint is lost"])
def test_what_waits_follows_from_the_log(tmp_path: Path, ending: str, is_lost: bool) -> None:
    store = store_with_deliveries(tmp_path)
    for number in range(4):
        step(store, number, effect("a", [b"x", b"y"]), effect("b", [b"z"], is_ordered=True))
    store.act(StepPlan(*STEPS_QUEUE, 1, "a", 0, "g1", 9, 0, ((0, 0, 2), (1, 2, 1))))
    store.act(StepPlan(*STEPS_QUEUE, 2, "a", 0, "g1", 9, 1, ((1, 3, 1),)))
    store.act(StepDone(*STEPS_QUEUE, (2,)))
    store.write_actions()
    store.commit(store.index)
    go_on, close = ENDINGS[ending]
    go_on(store)
    expected, waiting = state_of(store), waiting_effects(store, "a")
    close(store)
    if is_lost:
        discard(tmp_path / "checkpoint")
    again = opened(tmp_path)
    assert state_of(again) == expected
    assert waiting_effects(again, "a") == waiting
    again.close()


def test_a_segments_snapshot_has_what_waits(tmp_path: Path) -> None:
    store = store_with_deliveries(tmp_path, 200)
    for number in range(200):
        step(store, number, effect("a", [b"x"]), effect("b", [b"y" * 100]))
        store.act(StepPlan(*STEPS_QUEUE, number + 1, "b", 0, "g1", 9, number, ((number, 0, 1),)))
        store.act(StepDone(*STEPS_QUEUE, (number + 1,)))
        store.write_actions()
    assert len(store.actions.bases) > 3
    for path in store.actions.drop_before(store.actions.bases[-1]):
        path.unlink()
    expected = state_of(store)
    store.close()
    again = opened(tmp_path)
    assert state_of(again) == expected
    assert steps_of(again).targets["a"].left == 200
    again.close()


@pytest.mark.parametrize("from_files", [False, True])
def test_a_slave_has_the_masters_steps(tmp_path: Path, from_files: bool) -> None:
    master = store_with_deliveries(tmp_path / "m")
    slave = opened(tmp_path / "s")
    for number in range(4):
        step(master, number, effect("a", [b"x"]))
    master.act(StepPlan(*STEPS_QUEUE, 1, "a", 0, "g1", 9, 0, ((0, 0, 1),)))
    master.write_actions()
    feed_all(master, slave, from_files=from_files)
    assert STEPS.encode() not in {name for name, _ in slave.queues}, "nothing is committed yet"
    slave.commit(slave.index)
    assert state_of(slave) == state_of(master)
    assert waiting_effects(slave, "a") == [(1, 1), (2, 2), (3, 3)]
    master.close()
    slave.close()


def test_a_lane_settles_by_its_token_and_each_message_once(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.append_barrier(1)
    queue = store.open_queue("o", 1)
    store.append([intake(queue, [b"x"] * 4)])
    store.act(LaneBegin("o", 1, "g", "", 0, 8, 0, 0))
    token = store.act(LaneGrant("o", 1, "g", "c", 0, 8, "i", 1000))
    done = LaneDone("o", 1, "g", "c", token, ((0, 0), (2, 2)))
    assert queue.holds(done)
    store.append_step(StepIntake(5, 0, (done,), (effect("a", [b"x"], is_ordered=True),)))
    assert not queue.holds(done)
    assert queue.holds(LaneDone("o", 1, "g", "c", token, ((1, 1), (3, 3))))
    assert store.has_waiting_effects(queue, "g")
    later = store.act(LaneGrant("o", 1, "g", "d", 0, 8, "j", 1000))
    assert not queue.holds(LaneDone("o", 1, "g", "c", token, ((1, 1),)))
    assert queue.holds(LaneDone("o", 1, "g", "d", later, ((1, 1),)))
    store.act(StepPlan(*STEPS_QUEUE, 1, "a", 0, "g1", 9, 0, ((0, 0, 1),)))
    store.act(StepDone(*STEPS_QUEUE, (1,)))
    assert not store.has_waiting_effects(queue, "g")
    store.close()


def test_a_late_replay_of_a_step_brings_back_no_deleted_group(tmp_path: Path) -> None:
    """Retention of the action log has taken what came before the step; the message log has it."""
    store = store_with_deliveries(tmp_path)
    step(store, 0, effect("a", [b"1"]))
    store.act(DropQueue("s", 0, "", ""))
    store.write_actions()
    number = 0
    while len(store.actions.bases) < 3:
        store.act(Begin("other", 0, f"group-{number}", "", 0))
        store.write_actions()
        number += 1
    for path in store.actions.drop_before(store.actions.bases[-1]):
        path.unlink()
    expected = state_of(store)
    store.close()
    again = opened(tmp_path)
    assert not source(again).shares
    assert state_of(again) == expected
    again.close()


@pytest.mark.parametrize("is_done", [False, True])
def test_retention_keeps_what_waits_and_nothing_else(tmp_path: Path, is_done: bool) -> None:
    clock = ManualClock()
    store = store_with_deliveries(tmp_path, 40, small(retention_ms=1000), clock)
    queue = store.open_queue(STEPS, 0)
    for number in range(40):
        step(store, number, *(effect(each, [bytes(300)]) for each in ("a", "b")))
    plans = [("b", n) for n in range(40)] + [("a", n) for n in range(40 if is_done else 20)]
    for at, (target, n) in enumerate(plans, 1):
        store.act(StepPlan(*STEPS_QUEUE, at, target, 0, "g1", 9, at, ((n, n, 1),)))
        store.act(StepDone(*STEPS_QUEUE, (at,)))
    store.write_actions()
    store.commit(store.index)
    clock.now_ms += 10_000
    store.append([intake(source(store), [bytes(3000)], number=1)])
    store.commit(store.index)
    gone = begin_retention(store, SubjectConfig)
    checkpoint(store)
    end_retention(gone)
    assert queue.start_sequence == (40 if is_done else 19)
    assert waiting_effects(store, "a") == ([] if is_done else [(n, n) for n in range(20, 40)])
    assert store.messages.start > 0
    store.close()
