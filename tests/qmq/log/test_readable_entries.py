"""Whatever a store writes can be read: by a restart, by a slave of this release and of 0.2, and by
a log that begins there.

The writers of both logs are: batches, command messages, barriers, opening snapshots of both logs,
and actions. Their entries depend on the state of queues and groups, so the property is run with
states of any size, up to what producers, consumers and operators may make.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
from google_crc32c import value as crc32c
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from qmq_ordering.routes import LpRange
from replica_support import feed_all, files, memory, opened, small, state_of
from support import ManualClock, SmallDisk, intake
from support.forms import examples

from qmq.errors import CorruptBatch, DiskFull, InvariantBroken
from qmq.limits import BATCH_BYTES_MAX, KIB, MIB
from qmq.log import follower
from qmq.log.actions import Begin, LaneBegin, LaneGrant, LanePark, SettleAction, encode_actions
from qmq.log.envelopes import Entry, SnapshotReader, is_opened_whole, to_payloads, walk
from qmq.log.group_state import Dying, Requeued
from qmq.log.lane_state import LaneProgress
from qmq.log.queue import PRODUCERS_MAX, WINDOW, Producers
from qmq.log.recovery import open_store
from qmq.log.store import Store
from qmq.wire.batch import ENVELOPE_BYTES, Kind, parse_envelope, place, wrap
from qmq.wire.frame_payloads import Verdict

HUGE = 1 << 62
"""A number that MessagePack writes with nine bytes, as every number that a client chooses may
be.
"""
WHERE = ("subject", 0, "group")
LANES = ("ordered", 1, "group")
CONFIG = small()


@dataclass(frozen=True)
class Load:
    """How much state there is."""

    queues: int
    producers: int
    """In one queue."""
    requeued: int
    dying: int
    parked: int
    done: int
    waiting: int
    """Actions that wait on a full disk."""


loads = st.builds(
    Load,
    queues=st.integers(1, 300),
    producers=st.sampled_from([1, 100, 1_000]),
    requeued=st.sampled_from([0, 3, 50_000]),
    dying=st.sampled_from([0, 5, 5_000]),
    parked=st.sampled_from([0, 2, 200_000]),
    done=st.sampled_from([0, 2, 50_000]),
    waiting=st.sampled_from([0, 1, 300]),
)


def fill(store: Store, load: Load) -> None:
    """Bring the store to that state, as many batches and actions would."""
    for number in range(load.queues):
        store.append([intake(store.open_queue(f"{number}", 0), [b"x"])])
    full = store.open_queue(*WHERE[:2])
    store.append([intake(full, [b"x"] * 3)])
    full.producers = Producers.from_state(windows(load.producers))
    share = full.share(WHERE[2])
    share.next_sequence, share.deaths = 3, HUGE
    share.requeued = [Requeued(HUGE, 2 * at, 1, 1) for at in range(load.requeued)]
    share.dying = [
        Dying(at, HUGE - 2 * at, 1, 1, HUGE, "x" * 1_000, "consumer") for at in range(load.dying)
    ]
    ordered = store.open_queue(*LANES[:2])
    ordered.next_sequence = HUGE
    store.act(LaneBegin(*LANES, "", 0, 8, 0, 0))
    token = store.act(LaneGrant(*LANES, "consumer", 0, 8, "incarnation", 1_000))
    lanes = ordered.lane_share(LANES[2])
    lanes.progress = [
        LaneProgress(
            LpRange(0, 8), 0, [(HUGE + 4 * at, HUGE + 4 * at + 1) for at in range(load.done)]
        )
    ]
    if load.parked:
        store.act(LanePark(*LANES, "consumer", token, 5, 3, b"key"))
        lanes.parked[b"key"].sequences.extend(range(HUGE, HUGE + 2 * load.parked, 2))
        lanes.parked_bytes = lanes.parked[b"key"].size(b"key")
    store.write_actions()


def windows(producers: int) -> dict[int, list[int]]:
    """Full windows, in the form of a snapshot."""
    window = [0, HUGE, *(each for at in range(WINDOW) for each in (HUGE + at, HUGE, HUGE))]
    return {HUGE + producer: window for producer in range(producers)}


def roll_both(store: Store) -> None:
    """Fill the open segment of each log, so that both are opened again, with a snapshot of
    everything.
    """
    queue, bases = store.open_queue("filler", 0), [len(each.bases) for each in store.logs]
    number = 0
    while len(store.messages.bases) == bases[0]:
        number += 1
        store.append([intake(queue, [bytes(2_000)], number=number)])
    while len(store.actions.bases) == bases[1]:
        store.act(Begin("filler", 0, "g" * 100, "", 0))
        store.write_actions()
    store.append([intake(queue, [b"behind"], number=number + 1)])


def entries(store: Store) -> Iterator[Entry]:
    for log in store.logs:
        yield from walk(log, log.start)


def late_settle() -> SettleAction:
    """A verdict that comes too late, with an error of 4,000 bytes."""
    return SettleAction(
        *WHERE, "consumer", HUGE, ((HUGE, HUGE, int(Verdict.NACK), 5),), ((0, "x" * 4_000),)
    )


def wait_on_full_disk(store: Store, disk: SmallDisk, count: int) -> None:
    """Let so many actions wait, in turns of a hundred."""
    disk.left = 0
    for at in range(count):
        store.act(late_settle())
        if at % 100 == 0:
            with pytest.raises(DiskFull):
                store.write_actions()
    disk.left = 1 << 40
    store.write_actions()


def lanes_of(store: Store) -> object:
    queue = store.queue(*LANES[:2])
    return (
        {group: share.to_state() for group, share in queue.lanes.items()}
        if queue is not None
        else None
    )


@settings(max_examples=examples(40), deadline=None, suppress_health_check=list(HealthCheck))
@given(loads)
@example(Load(300, PRODUCERS_MAX, 0, 0, 0, 0, 0))
@example(Load(1, 1, 0, 18_000, 0, 0, 0))
@example(Load(1, 1, 0, 0, 2_000_000, 0, 0))
@example(Load(1, 1, 0, 0, 0, 0, 5_000))
def test_whatever_a_store_writes_can_be_read(load: Load) -> None:
    with tempfile.TemporaryDirectory(dir=memory()) as name:
        disk = SmallDisk(1 << 40)
        master = opened(Path(name) / "m", CONFIG, disk=disk)
        master.append_barrier(1)
        fill(master, load)
        if load.waiting:
            wait_on_full_disk(master, disk, load.waiting)
        roll_both(master)
        for entry in entries(master):
            assert entry.envelope.total_bytes <= BATCH_BYTES_MAX, (
                f"no server of release 0.2 reads {entry.envelope}"
            )
        assert all(is_opened_whole(log, base) for log in master.logs for base in log.bases[1:])

        slave = opened(Path(name) / "s", CONFIG)
        feed_all(master, slave, MIB)
        assert files(slave.folder) == files(master.folder)
        slave.close()

        wanted = (state_of(master), lanes_of(master))
        master.close()
        follower.start_over(Path(name) / "s", (0, 0))
        late = Path(name) / "late"  # as a log after retention: it begins with the newest segments
        for log in master.logs:
            (late / log.folder.name).mkdir(parents=True)
            path = log.folder / f"{log.bases[-1]:020d}.log"
            (late / log.folder.name / path.name).write_bytes(path.read_bytes())
        again = open_store(late, CONFIG, ManualClock())
        assert (state_of(again), lanes_of(again)) == wanted
        again.close()


@given(
    st.integers(0, 64 * KIB).map(lambda less: BATCH_BYTES_MAX - 64 - less)
    | st.integers(BATCH_BYTES_MAX - 80, 2 * BATCH_BYTES_MAX)
)
@settings(max_examples=examples(40), deadline=None)
def test_an_entry_that_could_not_be_read_is_not_made(size: int) -> None:
    try:
        head, region = wrap(
            Kind.ACTIONS, bytes(size), count=1, epoch=1, index=1, time_ms=1, flushed=0
        )
    except InvariantBroken:
        assert size > BATCH_BYTES_MAX - ENVELOPE_BYTES - 16
    else:
        assert parse_envelope(head).total_bytes == ENVELOPE_BYTES + len(region) <= BATCH_BYTES_MAX


@given(st.lists(st.sampled_from([1, 300, 70_000, 1_100_000, 17_000_000, 33_000_000]), max_size=4))
@settings(max_examples=examples(20), deadline=None, suppress_health_check=list(HealthCheck))
def test_a_snapshot_has_every_state_once_in_order(sizes: list[int]) -> None:
    states = [["s", at, "g", ["x" * size]] for at, size in enumerate(sizes)]
    payloads, count = to_payloads(states)
    assert all(len(payload) < BATCH_BYTES_MAX - KIB for payload in payloads)
    reader = SnapshotReader()
    assert [state for payload in payloads for state in reader.states(payload)] == states
    assert count >= len(states)


def test_the_largest_state_of_a_queue_fits_into_one_entry(tmp_path: Path) -> None:
    store = open_store(tmp_path, CONFIG, ManualClock())
    queue = store.open_queue("s" * 127, 65_536)
    queue.producers = Producers.from_state(windows(PRODUCERS_MAX + 1_000))
    payloads, count = to_payloads([queue.to_snapshot()])
    assert len(payloads) == count == 1
    store.close()


# --- what release 0.2 wrote -----------------------------------------------------------------------


def old_entry(kind: Kind, payload: bytes, count: int, index: int) -> list[bytes]:
    """An entry of any size, as release 0.2 made it."""
    region = len(payload).to_bytes(4, "little") + payload
    region += bytes(-len(region) & 7)
    return [
        place(
            kind,
            ENVELOPE_BYTES + len(region),
            crc32c(region),
            count,
            1,
            index,
            1_700_000_000_000,
            0,
        ),
        region,
    ]


def damaged_by_old_release(folder: Path, *, is_replicated: bool) -> int:
    """A store with an opening snapshot and an entry of actions that are longer than 16 MiB. Returns
    the last sequence of its messages.
    """
    store = open_store(folder, CONFIG, ManualClock(), is_replicated=is_replicated)
    if is_replicated:
        store.append_barrier(1)
    queue = store.open_queue("subject", 0)
    store.append([intake(queue, [b"before"])])
    states = [[*queue.to_snapshot()[:5], windows(9_800), None]]
    actions = [Begin("subject", 0, "g", "", 1), *[late_settle()] * 5_000]
    store.messages.roll()
    for log, kind, payload, count in (
        (store.messages, Kind.SNAPSHOT, msgspec.msgpack.encode(states), 1),
        (store.actions, Kind.ACTIONS, encode_actions(actions), len(actions)),
    ):
        buffers = old_entry(kind, payload, count, store.index + 1)
        assert len(buffers[1]) > BATCH_BYTES_MAX
        log.append(buffers, sum(map(len, buffers)))
        store.index += 1
    store.append([intake(queue, [b"behind"], number=1)])
    last = queue.next_sequence
    store.close()
    return last


@pytest.mark.parametrize("is_replicated", [False, True])
def test_a_store_with_longer_entries_of_an_older_release_opens(
    tmp_path: Path, is_replicated: bool
) -> None:
    last = damaged_by_old_release(tmp_path / "m", is_replicated=is_replicated)
    store = open_store(tmp_path / "m", CONFIG, ManualClock(), is_replicated=is_replicated)
    queue = store.queue("subject", 0)
    assert queue is not None
    assert queue.next_sequence == last == 2
    assert queue.shares["g"].next_sequence == 1
    if is_replicated:
        slave = opened(tmp_path / "s", CONFIG)
        feed_all(store, slave, MIB)
        assert files(slave.folder) == files(store.folder)
        slave.close()
    roll_both(store)
    assert all(
        entry.envelope.total_bytes <= BATCH_BYTES_MAX
        for log in store.logs
        for entry in walk(log, log.bases[-1])
    )
    store.close()


def test_a_longer_batch_of_messages_is_still_refused() -> None:
    head = place(Kind.DATA, BATCH_BYTES_MAX + 8, 0, 0, 1, 1, 1, 0)
    with pytest.raises(CorruptBatch, match="cannot have"):
        parse_envelope(head)
