"""Two clusters and mirrors between them: what is copied, once, in order, and where groups
continue.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from live_cluster import GROUP, KEYS, ORDERED, PLAIN, History, LiveCluster, require_order, rest

import qmq
from qmq.cli.mirroring.cluster_mirror import (
    ClusterMirror,
    MirroredGroups,
    hold_at_parked,
    read_record,
)
from qmq.cli.mirroring.mirror_notes import MirrorNote, MirrorRecord, newest_done, with_note
from qmq.errors import DeadlineExceeded, InvalidArgument, NotConnected
from qmq.limits import KIB
from qmq.model import Order, SubjectConfig
from qmq.node.metrics.copies import MirrorMetrics
from qmq.proto.v1 import control_pb2 as control
from qmq.proto.v1 import meta_pb2 as pb


async def bodies(mq: qmq.Client, subject: str) -> list[bytes]:
    return [message.body async for message in mq.browse(subject)]


async def caught_up(mirror: ClusterMirror) -> None:
    """Copy until a pass finds nothing more. A subject that a busy server did not answer for in time
    is copied in the next pass.
    """
    async with asyncio.timeout(120):
        while await mirror.pass_once() or mirror.failed:
            others = {
                name: each
                for name, each in mirror.failed.items()
                if not isinstance(each, DeadlineExceeded | NotConnected)
            }
            assert not others, others


def mirror(
    source: qmq.Client, target: qmq.Client, folder: Path, *, back: bool = False
) -> ClusterMirror:
    names = ("west", "east") if back else ("east", "west")
    return ClusterMirror(
        source, target, *names, [".*"], folder / "-to-".join(names), moves_groups=True
    )


async def test_a_mirror_copies_each_message_once_through_restarts(
    cluster: LiveCluster, second: LiveCluster, history: History, tmp_path: Path
) -> None:
    async with cluster.client() as here, second.client() as there:
        await history.create_subjects(here)
        await history.send(here, 20)
        for rounds in (5, 0, 5):
            found = mirror(here, there, tmp_path)
            await history.send(here, rounds)
            passing = asyncio.ensure_future(found.pass_once())
            await asyncio.sleep(0)
            if rounds:
                await history.split(here)
                passing.cancel()  # as a process that ends in the middle
            await asyncio.gather(passing, return_exceptions=True)
            found.close()
        found = mirror(here, there, tmp_path)
        await caught_up(found)
        found.close()
        assert sorted(await bodies(there, PLAIN)) == sorted(history.plain)
        copies = [(message.key or "", message.body) async for message in there.browse(ORDERED)]
        assert Counter(copies) == Counter(
            (key, body) for key, mine in history.ordered.items() for body in mine
        )
        require_order(await rest(there, ORDERED, GROUP), history.ordered, history.ordered)
        ids = {message.body: message.id async for message in here.browse(PLAIN)}
        assert {message.body: message.id async for message in there.browse(PLAIN)} == ids


async def test_the_counters_tell_in_the_middle_of_a_round_how_far_it_is(
    cluster: LiveCluster, second: LiveCluster, tmp_path: Path
) -> None:
    count = 500  # of 48 KiB: 24 MiB are several times what one read of the source returns
    async with cluster.client() as here, second.client() as there:
        await here.metadata.create_subject(SubjectConfig("long"))
        await here.send_many(
            "long", [b"%d" % number * (16 * KIB) for number in range(count, 2 * count)]
        )
        found = mirror(here, there, tmp_path)
        passing = asyncio.ensure_future(found.pass_once())
        seen = []
        while not passing.done():
            seen += [(each.lag, each.copied) for each in found.states() if each.subject == "long"]
            await asyncio.sleep(0)
        await passing
        amid = [each for each in seen if 0 < each[1] < count]
        assert amid, "the counters of a running round must show what it has copied"
        assert {lag for lag, _ in amid} == {count}, (
            "and how much there was to read when the round began"
        )
        assert [copied for _, copied in seen] == sorted(copied for _, copied in seen)
        (last,) = [each for each in found.states() if each.subject == "long"]
        assert (last.lag, last.copied, last.failures) == (0, count, 0)
        found.close()


async def test_a_group_continues_in_the_target_where_it_is_in_the_source(
    cluster: LiveCluster, second: LiveCluster, history: History, tmp_path: Path
) -> None:
    async with cluster.client() as here, second.client() as there:
        await history.create_subjects(here)
        found = mirror(here, there, tmp_path)
        await history.send(here, 10)
        await caught_up(found)
        assert len(await rest(here, PLAIN, GROUP)) == 10
        assert len(await rest(here, ORDERED, GROUP)) == 10 * len(KEYS)
        await history.send(here, 3)
        await caught_up(found)
        await caught_up(found)
        found.close()
        assert sorted(body for _, body in await rest(there, PLAIN, GROUP)) == sorted(
            history.plain[10:]
        ), "what is done is not delivered again"
        newest = {key: mine[10:] for key, mine in history.ordered.items()}
        got = await rest(there, ORDERED, GROUP)
        assert {body for _, body in got} >= {body for mine in newest.values() for body in mine}
        again = mirror(here, there, tmp_path)
        await history.send(here, 1)
        await caught_up(again)
        again.close()
        assert [body for _, body in await rest(there, PLAIN, GROUP)] == history.plain[13:], (
            "a group that continued there is not moved back"
        )


async def test_a_group_that_is_further_in_the_target_is_not_moved_back(
    cluster: LiveCluster, second: LiveCluster, tmp_path: Path
) -> None:
    async with cluster.client() as here, second.client() as there:
        config = SubjectConfig("once", order=Order.STRICT, logical_partitions=16)
        await here.metadata.create_subject(config, partitions=2)
        for number in range(20):
            await here.send("once", b"%d" % number, key=f"k{number % 4}")
        assert len(await taken(here, "once", 5)) == 5
        found = mirror(here, there, tmp_path)
        await caught_up(found)
        assert len(await taken(there, "once", 20)) == 20
        assert len(await taken(here, "once", 15)) == 15, (
            "now it has done all that the first note is about"
        )
        await here.send("once", b"new", key="k0")
        await caught_up(found)
        await caught_up(found)
        found.close()
        assert await taken(there, "once", 1) == [b"new"]


YEAR_MS = 365 * 86_400_000


async def test_no_clock_of_a_mirror_moves_a_group_past_unread_messages(
    cluster: LiveCluster, second: LiveCluster, history: History, tmp_path: Path
) -> None:
    async with cluster.client() as here, second.client() as there:
        await history.create_subjects(here)
        found = ClusterMirror(here, there, "east", "west", [".*"], tmp_path, moves_groups=False)
        await history.send(here, 5)
        await caught_up(found)
        assert len(await rest(here, ORDERED, GROUP)) == 5 * len(KEYS)
        first = read_record(tmp_path, ORDERED).notes[-1]
        await history.send(here, 3)
        await caught_up(found)
        found.close()
        groups = MirroredGroups(here, there, ORDERED, is_ordered=True)
        ahead = MirrorRecord((replace(first, time_ms=first.time_ms + YEAR_MS),))
        await groups.move(ahead)
        unread = {key: mine[5:] for key, mine in history.ordered.items()}
        got = await rest(there, ORDERED, GROUP)
        assert {body for _, body in got} >= {body for mine in unread.values() for body in mine}


async def test_a_mirror_whose_clock_was_ahead_and_is_right_again_still_moves_groups(
    cluster: LiveCluster, second: LiveCluster, history: History, tmp_path: Path
) -> None:
    async with cluster.client() as here, second.client() as there:
        await history.create_subjects(here)
        found = ClusterMirror(here, there, "east", "west", [PLAIN], tmp_path, moves_groups=False)
        await history.send(here, 5)
        await caught_up(found)
        assert len(await rest(here, PLAIN, GROUP)) == 5
        found.close()
        record = read_record(tmp_path, PLAIN)
        moved = {GROUP: record.notes[-1].time_ms + YEAR_MS}
        await MirroredGroups(here, there, PLAIN, is_ordered=False).move(
            replace(record, moved=moved)
        )
        assert await rest(there, PLAIN, GROUP) == []


async def taken(mq: qmq.Client, subject: str, count: int) -> list[bytes]:
    """A consumer of the group handles so many messages, and goes."""
    found: list[bytes] = []
    async with asyncio.timeout(60), mq.ordered_consumer(subject, GROUP, ack="explicit") as consumer:
        while len(found) < count:
            for message in await consumer.take(1):
                found.append(message.body)
                await message.ack_sync()
    return found


@pytest.mark.sampled
async def test_mirrors_in_both_directions_copy_nothing_back(
    cluster: LiveCluster, second: LiveCluster, history: History, tmp_path: Path
) -> None:
    async with cluster.client() as here, second.client() as there:
        await history.create_subjects(here)
        await history.send(here, 5)
        one, other = mirror(here, there, tmp_path), mirror(there, here, tmp_path, back=True)
        await caught_up(one)
        theirs = History(numbers=history.numbers)
        await theirs.send(there, 5)
        for _ in range(3):
            await caught_up(other)
            await caught_up(one)
        both = sorted(history.plain + theirs.plain)
        assert sorted(await bodies(here, PLAIN)) == sorted(await bodies(there, PLAIN)) == both
        assert sum(each.left_out for each in one.states()) == 5 * (1 + len(KEYS))
        shown = {
            reading.figure.name: dict(reading.rows)
            for reading in MirrorMetrics(one.states).read()
            if reading is not None
        }
        assert shown["qmq_mirror_copied_messages_total"][(PLAIN,)] == 5
        assert shown["qmq_mirror_lag_messages"] == dict.fromkeys(
            [("later",), (ORDERED,), (PLAIN,)], 0
        )
        one.close()
        other.close()


@pytest.mark.sampled
async def test_a_subject_of_another_kind_in_the_target_is_named_and_holds_up_no_other(
    cluster: LiveCluster, second: LiveCluster, history: History, tmp_path: Path
) -> None:
    async with cluster.client() as here, second.client() as there:
        await history.create_subjects(here)
        await history.send(here, 2)
        await there.metadata.create_subject(SubjectConfig(ORDERED, order=Order.NONE))
        found = mirror(here, there, tmp_path)
        await found.pass_once()
        assert list(found.failed) == [ORDERED]
        assert isinstance(found.failed[ORDERED], InvalidArgument)
        assert sorted(await bodies(there, PLAIN)) == sorted(history.plain)
        found.close()


def test_a_mirrored_group_stays_before_parked_messages_that_a_list_has_not() -> None:
    """The list of parked keys has the first ones, partition by partition."""
    parts = [
        control.PartitionStatus(partition=number, start_sequence=5, parked_messages=number % 3)
        for number in (1, 2, 3, 4)
    ]
    listed = [
        control.ParkedKey(partition=1, key=b"inherited"),
        control.ParkedKey(partition=1, key=b"a", messages=1, first_sequence=7),
    ]
    done = {("b", number): 100.0 for number in (1, 2, 3, 4)}
    hold_at_parked(done, pb.OrderedGroup(partitions=parts), listed)
    assert done == {("b", 1): 7.0, ("b", 2): 5.0, ("b", 3): 100.0, ("b", 4): 5.0}


def test_a_group_gets_the_newest_note_that_it_has_done_and_never_a_newer_one() -> None:
    notes: tuple[MirrorNote, ...] = ()
    for number in range(10_000):
        notes = with_note(notes, MirrorNote({("g", 0): number}, {("h", 0): number}, number))
        assert notes[-1].time_ms == number
    assert len(notes) <= 64
    assert [each.time_ms for each in notes] == sorted(each.time_ms for each in notes)
    for done in (0, 17, 5_000, 9_990, 9_999):
        found = newest_done(notes, {("g", 0): done})
        assert found is None or found.mark[("g", 0)] <= done
    assert newest_done(notes, {("g", 0): 9_999}) == notes[-1]
    assert newest_done(notes, {}) in (None, notes[0])
    record = MirrorRecord(notes, {("g", 0): 4}, {"a": 5})
    assert MirrorRecord.decode(record.encode()) == record
    assert record.lag({("g", 0): 9, ("g", 1): 3}, {("g", 1): 1}) == 7


@pytest.mark.sampled
async def test_the_command_copies_once_and_shows_its_lag(
    cluster: LiveCluster, second: LiveCluster, history: History, tmp_path: Path
) -> None:
    names = (
        "--source-name",
        "east",
        "--target-name",
        "west",
        "--state",
        str(tmp_path / "state"),
        "--server",
        cluster.server,
    )

    async def command(*words: str) -> subprocess.CompletedProcess[str]:
        run = [sys.executable, "-m", "qmq.cli", "mirror", *words]
        return await asyncio.to_thread(
            subprocess.run, run, capture_output=True, text=True, timeout=120, check=False
        )

    async with cluster.client() as here, second.client() as there:
        await history.create_subjects(here)
        await history.send(here, 3)
        done = await command(
            "run", *names, "--to-server", second.server, "--once", "--subject", PLAIN
        )
        assert done.returncode == 0, done.stderr
        assert sorted(await bodies(there, PLAIN)) == sorted(history.plain)
        await here.send(PLAIN, b"one more")
        shown = json.loads((await command("status", *names, "--json")).stdout)
        assert [(each["subject"], each["lag"]) for each in shown] == [(PLAIN, 1)]
