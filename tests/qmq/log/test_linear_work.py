"""Work grows with what is asked, and not with its square: counted in lines of Python that run,
which are the same on every machine.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import FrameType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from qmq_ordering.routes import LpRange
from support import ManualClock, SmallDisk
from support.forms import examples
from support.invariants import check_group

from qmq.errors import DiskFull
from qmq.log.actions import (
    Begin,
    Join,
    LaneBegin,
    LaneDone,
    LaneFail,
    LaneGrant,
    LanePark,
    LaneUnpark,
    PullAction,
    Pulled,
    SettleAction,
)
from qmq.log.group_state import GroupState
from qmq.log.lane_state import FAILURES_MAX, GroupLaneState, LaneProgress
from qmq.log.log_config import LogConfig
from qmq.log.queue import PRODUCERS_MAX, Producers, apply_to
from qmq.log.recovery import open_store
from qmq.wire.frame_payloads import Produced, Verdict

LOG = str(Path(sys.modules[GroupLaneState.__module__].__file__ or "").parent)
NAMES = ("s", 1, "g")


def lines_of(work: Callable[[], object]) -> int:
    """The lines of the log's modules that run in `work`; a comprehension counts once for each
    item.
    """
    count = 0

    def traced(frame: FrameType, event: str, _argument: object) -> object:
        nonlocal count
        if not frame.f_code.co_filename.startswith(LOG):
            return None
        count += event in ("call", "line")
        return traced

    sys.settrace(traced)
    try:
        work()
    finally:
        sys.settrace(None)
    return count


def require_linear(lines: Callable[[int], int], small: int) -> None:
    """Eight times as much may take at most twelve times as many lines: the square would take
    sixty-four times as many.
    """
    few, many = lines(small), lines(8 * small)
    assert many <= 12 * few + 1_000, f"{few} lines for {small}, and {many} for eight times as many"


def lanes() -> tuple[GroupLaneState, int]:
    share = GroupLaneState()
    apply_to(share, LaneBegin(*NAMES, "", 0, 8, 0, 0))
    return share, apply_to(share, LaneGrant(*NAMES, "c", 0, 8, "i", 1_000))


def test_settling_ranges_beside_failures_is_linear() -> None:
    def lines(count: int) -> int:
        share, token = lanes()
        for at in range(min(count, FAILURES_MAX)):
            apply_to(share, LaneFail(*NAMES, "c", token, 2 * count + at, 1))
        done = LaneDone(*NAMES, "c", token, tuple([(2 * at, 2 * at) for at in range(count)]))
        return lines_of(lambda: apply_to(share, done))

    require_linear(lines, 250)


def test_replaying_a_long_parked_key_is_linear() -> None:
    def lines(count: int) -> int:
        share, token = lanes()
        for at in range(count):
            apply_to(share, LanePark(*NAMES, "c", token, 2 * at, 3, b"key"))
        return lines_of(lambda: apply_to(share, LaneUnpark(*NAMES, "", b"key", True)))

    require_linear(lines, 250)


def test_a_new_producer_in_a_full_queue_looks_at_no_other() -> None:
    producers = Producers()
    for number in range(PRODUCERS_MAX):
        producers.add(number, 0, Produced(number, number))
    producers.add(0, 1, Produced(PRODUCERS_MAX, PRODUCERS_MAX))
    assert (
        lines_of(lambda: producers.add(-1, 0, Produced(PRODUCERS_MAX + 1, PRODUCERS_MAX + 1))) < 100
    )
    assert 0 in producers.windows, "it wrote lately"
    assert 1 not in producers.windows, "it was silent for the longest time"


def test_a_verdict_looks_at_few_of_the_ranges_that_wait() -> None:
    share = GroupState()
    apply_to(share, Begin(*NAMES, "", 0))
    apply_to(share, Join(*NAMES, "c", "i", 1_000, -1))
    apply_to(share, PullAction(*NAMES, "c", (Pulled(0, 20_000, 1),)))
    nacks = tuple([(2 * at, 2 * at, int(Verdict.NACK), 5) for at in range(9_000)])
    apply_to(share, SettleAction(*NAMES, "c", 7, nacks))
    one = SettleAction(*NAMES, "c", 9, ((19_000, 19_000, int(Verdict.NACK), 5),))
    assert lines_of(lambda: apply_to(share, one)) < 300
    check_group(share)


def test_actions_that_wait_for_disk_space_are_encoded_once(tmp_path: Path) -> None:
    disk = SmallDisk(1 << 30)
    store = open_store(tmp_path, LogConfig(), ManualClock(), disk=disk)
    disk.left = 0

    def turn() -> None:
        store.act(Begin(*NAMES, "", 1))
        with pytest.raises(DiskFull):
            store.write_actions()

    few = lines_of(turn)
    for _ in range(2_000):
        store.act(Begin(*NAMES, "", 1))
    turn()
    assert lines_of(turn) <= few + 100
    disk.left = 1 << 30
    store.write_actions()
    assert not store.unwritten.waits
    store.close()


@settings(max_examples=examples(200), deadline=None)
@given(
    st.integers(0, 40),
    st.lists(st.tuples(st.integers(0, 300), st.integers(1, 6)), max_size=60),
    st.lists(st.tuples(st.integers(0, 300), st.integers(1, 6)), min_size=16, max_size=60),
    st.sets(st.integers(0, 300), max_size=80),
)
def test_many_spans_at_once_do_what_they_do_one_by_one(
    done_before: int,
    earlier: list[tuple[int, int]],
    spans: list[tuple[int, int]],
    removed: set[int],
) -> None:
    part, model = LaneProgress(LpRange(0, 8), done_before), set(range(done_before))
    for first, count in earlier:
        part.add(first, first + count)
        model |= set(range(first, first + count))
    part.add_spans(sorted([(first, first + count) for first, count in spans]))
    model |= {at for first, count in spans for at in range(first, first + count)}
    assert {at for at in range(400) if part.is_done(at)} == model
    assert set(part.done_in(100, 200)) == {(a, b) for a, b in part.done if a < 200 and b > 100}
    part.remove(sorted(removed))
    model -= removed
    assert {at for at in range(400) if part.is_done(at)} == model
    marks = [part.done_before, *[mark for span in part.done for mark in span]]
    assert all(a < b for a, b in pairwise(marks)), "ascending, and joined"
