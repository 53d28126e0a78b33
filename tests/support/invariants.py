"""What tests alone ask of the states of groups: their whole invariants, after each step, and all
steps that a group's frontier can make.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from qmq_ordering.lanes import Cuts, Finished, Frontier, Gate, advance
from qmq_ordering.routes import Route

from qmq.errors import check
from qmq.log.group_state import GroupState
from qmq.log.lane_state import GroupLaneState


def check_group(state: GroupState) -> None:
    """No message is in two places, and none is past `next_sequence`. Raises InvariantBroken."""
    spans = [(item.first, item.count) for item in state.requeued] + [
        (item.first, item.count) for item in state.dying
    ]
    numbers = [(item.number, item.count) for item in state.dying]
    check(
        all(a + n <= b for (a, n), (b, _) in pairwise(numbers)),
        "dead numbers that are not ascending",
    )
    check(all(a + n <= state.deaths for a, n in numbers), "a dead number that was never given")
    for holder in state.holders.values():
        check(
            holder.unacked == sum(item.count for item in holder.held),
            "another count than what is held",
        )
        pulls = [(item.pull, item.count) for item in holder.held]
        check(
            all(a + n <= b for (a, n), (b, _) in pairwise(pulls)),
            "pull sequences that are not ascending",
        )
        check(
            all(a + n <= holder.next_pull <= state.pulls for a, n in pulls),
            "a pull sequence that was never given",
        )
        spans += [(item.first, item.count) for item in holder.held]
    spans.sort()
    check(all(a + n <= b for (a, n), (b, _) in pairwise(spans)), "a message in two places")
    check(
        all(n > 0 and a + n <= state.next_sequence for a, n in spans),
        "an empty range, or one that was never handed out",
    )
    check(state.requeued == sorted(state.requeued), "what came back is out of order")


def check_lanes(state: GroupLaneState) -> None:
    """Progress tiles the range, and lanes do not overlap. Raises InvariantBroken."""
    check(
        all(a.lps.end == b.lps.first for a, b in pairwise(state.progress)),
        "progress that does not tile the range",
    )
    check(
        all(
            (a.done_before, a.done) != (b.done_before, b.done) for a, b in pairwise(state.progress)
        ),
        "neighbours that are not joined",
    )
    for each in state.progress:
        marks = [each.done_before, *[mark for span in each.done for mark in span]]
        check(all(a < b for a, b in pairwise(marks)), "done ranges that are not ascending")
    size = sum([each.size(key) for key, each in state.parked.items()])
    check(size == state.parked_bytes, f"a size of {state.parked_bytes}, and {size} are parked")
    spans = sorted(each.lps for each in state.holders)
    check(all(a.end <= b.first for a, b in pairwise(spans)), "lanes that overlap")
    check(
        all(each.token < state.next_token for each in state.holders),
        "a token that was never given",
    )


def advance_fully(
    frontier: Frontier,
    gate: Gate,
    routes: Mapping[int, Route],
    latest: int,
    finished: Finished,
    cuts: Cuts | None = None,
) -> list[Frontier]:
    """The frontier after each step; empty if nothing moves."""
    steps = [frontier]
    while (following := advance(steps[-1], gate, routes, latest, finished, cuts)) != steps[-1]:
        steps.append(following)
    return steps[1:]
