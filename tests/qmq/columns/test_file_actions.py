"""The committed part of an action log: everything up to the mark, and nothing after it."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from random import Random

import pytest
from file_support import GROUP, Traffic, checkpoint, folder_in_memory, mark, small_log
from support import ManualClock, node_config, running

import qmq
from qmq.columns.files.folders import find_folders
from qmq.columns.files.log import action_folders, committed_actions
from qmq.errors import InvalidArgument, LogDamaged, MessagesExpired
from qmq.log.actions import Begin, Join, decode_actions
from qmq.log.recovery import open_store
from qmq.log.store import Store
from qmq.wire.batch import Kind, unwrap


@pytest.fixture
def folder() -> Iterator[Path]:
    with folder_in_memory() as found:
        yield found / GROUP


def act(store: Store, number: int) -> None:
    store.act(
        Begin("a", 0, f"group-{number}", "", 0)
        if number % 2
        else Join("a", 0, "group-1", f"c{number}", "i", 1_000, -1)
    )
    store.write_actions()


def names(folder: Path) -> list[str]:
    """The groups and consumers that the actions name."""
    entries = [
        region for envelope, region in committed_actions(folder) if envelope.kind == Kind.ACTIONS
    ]
    found = [action for region in entries for action in decode_actions(unwrap(region))]
    return [each.group if isinstance(each, Begin) else each.consumer for each in found]  # type: ignore[union-attr]


def test_actions_are_given_in_order_over_all_segments_up_to_the_mark(folder: Path) -> None:
    store = open_store(folder, small_log(), ManualClock())
    wanted = [f"group-{number}" if number % 2 else f"c{number}" for number in range(1, 60)]
    for number in range(1, 60):
        act(store, number)
        if number == 45:
            store.commit(store.index)
            mark(store)
    assert len(store.actions.bases) > 3
    assert names(folder) == wanted[:45]
    store.commit(store.index)
    mark(store)
    assert names(folder) == wanted
    kinds = {envelope.kind for envelope, _ in committed_actions(folder)}
    assert kinds == {Kind.ACTIONS, Kind.SNAPSHOT}
    (named,) = find_folders([str(folder)])
    assert len(list(committed_actions(named))) == len(list(committed_actions(str(folder))))
    store.close()


def test_a_segment_deleted_meanwhile_and_a_missing_one_are_reported(folder: Path) -> None:
    store = open_store(folder, small_log(), ManualClock())
    for number in range(1, 60):
        act(store, number)
    store.commit(store.index)
    mark(store)
    store.close()
    paths = sorted((folder / "action").iterdir())
    reading = committed_actions(folder)
    next(reading)
    paths[0].unlink()
    paths[1].unlink()
    with pytest.raises(MessagesExpired, match=f"deleted .*{paths[1].name}.*read again"):
        list(reading)
    reading = committed_actions(folder)
    next(reading)
    paths[3].unlink()
    with pytest.raises(LogDamaged, match=f"{paths[3].name} is missing"):
        list(reading)


def test_damaged_action_names_file_and_byte(folder: Path) -> None:
    store = open_store(folder, small_log(), ManualClock())
    act(store, 1)
    checkpoint(store)
    store.close()
    (path,) = (folder / "action").iterdir()
    data = bytearray(path.read_bytes())
    data[70] ^= 1
    path.write_bytes(data)
    with pytest.raises(LogDamaged, match=rf"{path.name} is damaged at byte 0 .*checksum"):
        names(folder)


def test_whole_actions_of_a_copy_without_a_mark_are_read_on_demand(folder: Path) -> None:
    store = open_store(folder, small_log(), ManualClock())
    act(store, 1)
    store.close()
    with pytest.raises(InvalidArgument, match="so its committed position is unknown"):
        list(committed_actions(folder))
    assert len(list(committed_actions(folder, "all"))) == 1


def test_folder_with_segments_of_messages_alone_has_no_actions(folder: Path) -> None:
    folder.mkdir()
    (folder / f"{0:020d}.log").touch()
    with pytest.raises(InvalidArgument, match="has no action log"):
        list(committed_actions(folder))
    assert action_folders([str(folder)]) == []


def test_of_two_replicas_the_one_that_is_committed_further_is_taken(folder: Path) -> None:
    for name, count in (("one", 3), ("two", 5), ("three", 4)):
        traffic = Traffic(folder / name, Random(1))
        for number in range(1, count + 1):
            act(traffic.store, number)
        traffic.store.commit(traffic.store.index)
        mark(traffic.store)
        traffic.store.close()
    (folder / "one" / GROUP / "committed.qmm").unlink()  # it has just begun
    (found,) = action_folders([str(folder / "*")])
    assert found.path == folder / "two" / GROUP
    assert found.broker_group == GROUP
    for name in ("two", "three"):
        (folder / name / GROUP / "committed.qmm").unlink()
    with pytest.raises(InvalidArgument, match="so its committed position is unknown"):
        action_folders([str(folder / "*")])


async def test_actions_of_a_node_with_a_delay_group_are_of_both(tmp_path: Path) -> None:
    config = node_config(tmp_path, delay=True)
    async with running(config) as node, qmq.connect(node.address) as mq:
        await mq.send("a", b"now")
        await mq.send("a", b"soon", delay=timedelta(seconds=0.1))
        async with mq.consumer("a", group="billing") as consumer:
            async for message in consumer:
                await message.ack_sync()
                if message.body == b"soon":
                    break
    found = {each.broker_group: each for each in action_folders([str(tmp_path)])}
    assert found.keys() == {config.broker.name, "delay"}
    assert found["delay"].is_delay
    for each in found.values():
        assert any(envelope.kind == Kind.ACTIONS for envelope, _ in committed_actions(each))
