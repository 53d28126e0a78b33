"""Decisions of the supervisor of shards, as docs/SHARDS.md describes them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from qmq.node.shards import PAUSES_MS, STEADY_MS, Restart, ShardState, ShardSupervision, StopAll


def serving(count: int) -> ShardSupervision:
    found = ShardSupervision(count)
    for shard in range(1, count + 1):
        found.ready(shard, 0)
    return found


def test_a_shard_that_never_served_ends_all_with_its_status() -> None:
    supervision = ShardSupervision(2)
    supervision.ready(1, 0)
    assert supervision.ended(2, 2, 5) == StopAll()
    assert supervision.ended(1, 0, 9) is None
    assert (supervision.is_over, supervision.exit_status) == (True, 2)


def test_a_shard_that_ends_unasked_before_it_served_has_failed() -> None:
    supervision = ShardSupervision(1)
    assert supervision.ended(1, 0, 5) == StopAll()
    assert (supervision.is_over, supervision.exit_status) == (True, 1)


def test_a_shard_that_served_starts_again_after_growing_pauses() -> None:
    supervision, pauses = serving(2), []
    for _ in range(7):
        decision = supervision.ended(2, -9, 10)
        assert isinstance(decision, Restart)
        pauses.append(decision.after_ms)
        assert supervision.started(2)
        supervision.ready(2, 10)
    assert pauses == [*PAUSES_MS, PAUSES_MS[-1], PAUSES_MS[-1]]
    assert supervision.ended(2, -9, 10 + STEADY_MS) == Restart(2, PAUSES_MS[0]), (
        "it had served for a minute"
    )
    assert supervision.state(1) is ShardState.SERVING


def test_a_shard_that_rests_does_not_start_once_all_are_to_stop() -> None:
    supervision = serving(2)
    supervision.ended(1, 70, 10)
    supervision.stop()
    assert not supervision.is_over
    assert not supervision.started(1)
    supervision.ended(2, 0, 20)
    assert (supervision.is_over, supervision.exit_status) == (True, 0)


def test_a_shard_that_does_not_stop_cleanly_is_in_the_exit_status() -> None:
    supervision = serving(3)
    supervision.stop()
    for shard, status in ((1, 0), (2, -9), (3, 1)):
        supervision.ended(shard, status, 5)
    assert supervision.exit_status == 128 + 9


@given(
    st.lists(
        st.tuples(st.sampled_from(["ready", "end", "start", "stop"]), st.integers(1, 3)),
        max_size=40,
    )
)
def test_supervision_is_over_once_all_shards_ended_after_a_stop(
    events: list[tuple[str, int]],
) -> None:
    supervision, now_ms = ShardSupervision(3), 0
    for event, shard in events:
        now_ms += 700
        state = supervision.state(shard)
        if event == "ready" and state is ShardState.STARTING:
            supervision.ready(shard, now_ms)
        elif event == "end" and state in (ShardState.STARTING, ShardState.SERVING):
            supervision.ended(shard, 1, now_ms)
        elif event == "start" and state is ShardState.RESTING:
            supervision.started(shard)
        elif event == "stop":
            supervision.stop()
    supervision.stop()
    for shard in (1, 2, 3):
        if supervision.state(shard) in (ShardState.STARTING, ShardState.SERVING):
            assert supervision.ended(shard, 0, now_ms) is None
    assert supervision.is_over
