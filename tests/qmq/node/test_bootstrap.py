"""The kind of a group is decided once for all its replicas, whichever of them creates the group,
with and without the coordination store.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from qmq_coordination.broker_groups import BrokerGroupState, DelaySettings, read_group
from qmq_coordination.embedded import EmbeddedStore
from qmq_replication.membership import ReplicaMembership
from support.stores import Fault, FaultyStore

from qmq.errors import InvalidArgument, LogDamaged
from qmq.log.disk import Disk
from qmq.node import process

VOTERS = ("a", "b", "c")
HOUR = DelaySettings(3_600_000, 10**10)
HALF = DelaySettings(1_800_000, 10**10)


async def test_a_delay_group_is_founded_with_its_settings_in_one_step() -> None:
    store = EmbeddedStore()
    assert await process.found(store, "d", VOTERS, HOUR) == ReplicaMembership(1, VOTERS)
    state = await read_group(store, "d")
    assert (state.delay, state.voters) == (HOUR, VOTERS)
    assert len({item.mod_revision for item in state.items.values()}) == 1
    assert await process.found(store, "d", ("x",), HOUR) == ReplicaMembership(1, VOTERS)
    await store.close()


@pytest.mark.parametrize(
    ("founded", "wanted", "says"),
    [
        (HOUR, HALF, "created with QMQ_BUCKET=60m .* started with QMQ_BUCKET=30m"),
        (HOUR, None, "is a delay group: start its replicas with `qmq delay`"),
        (None, HOUR, "is a broker group: start its replicas with `qmq broker`"),
    ],
)
async def test_founding_a_group_with_another_kind_is_refused(
    founded: DelaySettings | None, wanted: DelaySettings | None, says: str
) -> None:
    store = EmbeddedStore()
    await process.found(store, "d", VOTERS, founded)
    before = await read_group(store, "d")
    with pytest.raises(InvalidArgument, match=says):
        await process.found(store, "d", VOTERS, wanted)
    with pytest.raises(InvalidArgument, match=says):
        process.check_group(before, wanted)
    assert await read_group(store, "d") == before
    await store.close()


async def test_of_replicas_that_create_a_group_with_different_settings_one_kind_stays() -> None:
    store = EmbeddedStore()
    wishes = [HOUR, HALF, None, HOUR]
    done = await asyncio.gather(
        *[process.found(store, "d", VOTERS, each) for each in wishes], return_exceptions=True
    )
    settled = (await read_group(store, "d")).delay
    for wish, result in zip(wishes, done, strict=True):
        assert isinstance(result, ReplicaMembership if wish == settled else InvalidArgument)
    await store.close()


async def test_a_lost_answer_is_read_back() -> None:
    store = FaultyStore(EmbeddedStore(), {1: Fault.UNANSWERED})
    assert await process.found(store, "d", VOTERS, HOUR) == ReplicaMembership(1, VOTERS)
    assert (await read_group(store, "d")).delay == HOUR
    await store.close()


def test_a_group_that_does_not_exist_may_get_any_kind() -> None:
    process.check_group(BrokerGroupState("new"), HOUR)
    process.check_group(BrokerGroupState("new"), None)


def test_a_folder_remembers_its_kind_while_the_store_is_away(tmp_path: Path) -> None:
    process.note_folder(Disk(), tmp_path, HOUR)
    process.check_folder(tmp_path, "d", HOUR)
    with pytest.raises(InvalidArgument, match="created with"):
        process.check_folder(tmp_path, "d", HALF)
    with pytest.raises(InvalidArgument, match="is a delay group"):
        process.check_folder(tmp_path, "d", None)
    (tmp_path / process.FILE).write_text("what?")
    with pytest.raises(LogDamaged, match="cannot be read"):
        process.check_folder(tmp_path, "d", HOUR)


def test_a_delay_server_refuses_the_folder_of_a_broker(tmp_path: Path) -> None:
    process.note_folder(Disk(), tmp_path, None)
    process.check_folder(tmp_path, "g", None)
    with pytest.raises(InvalidArgument, match="is a broker group"):
        process.check_folder(tmp_path, "g", HOUR)


def test_a_day_has_a_whole_number_of_buckets_and_the_longest_delay_is_bounded() -> None:
    for minutes in (5, 15, 60, 360, 1440):
        settings = DelaySettings(minutes * process.MINUTE_MS, 1)
        assert process.check_settings(settings) is settings
    for minutes in (0, 1, 4, 7, 25, 1441, 2880):
        with pytest.raises(InvalidArgument, match="5 minutes to 24 hours"):
            process.check_settings(DelaySettings(minutes * process.MINUTE_MS, 1))
    for days in (0, -1, 100 * 366 + 1):
        with pytest.raises(InvalidArgument, match="at most 100 years"):
            process.check_settings(DelaySettings(3_600_000, days * process.DAY_MS))
