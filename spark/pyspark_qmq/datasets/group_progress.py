"""The progress of each group over time: the replay of the action log, sampled once a second. Pure.

There is one row for each second in which a group made progress on a queue: its state after that second's last entry. The newest row is the
state at the end of the log. Together with the queue's end at that time (known from the messages' append times) it gives the group's lag:

    for a share        end - next_sequence messages were never delivered; `held` + `waiting` were delivered but are not done
    for a partition    at most end - done_before messages are not done: lanes progress independently, and the slowest one counts
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from pyspark_qmq.datasets.deliveries import Replay
from pyspark_qmq.datasets.delivery_fate import ShareKey
from qmq.batch import Envelope

STEP_MS: Final = 1_000


class GroupStanding(NamedTuple):
    """The progress of one group on one queue."""

    share: ShareKey
    time_ms: int
    done_before: int
    """Everything before this sequence is done."""
    next_sequence: int | None
    """The first message that was not yet delivered; None for partitions of ordered subjects, where it is not recorded."""
    held: int
    """Messages held by consumers."""
    waiting: int
    """Messages that were returned and wait for another delivery."""
    parked: int
    expired: int
    """Messages that retention deleted before they were done, as far as the group has noticed."""
    consumers: int


def standings(entries: Iterable[tuple[Envelope, bytes | memoryview]]) -> Iterator[GroupStanding]:
    """Replay a broker group's action log. Raises as `Replay.entry`."""
    replay = Replay()
    second = last_ms = 0
    for envelope, region in entries:
        now = envelope.append_time_ms // STEP_MS
        if now != second:
            yield from _look(replay, last_ms)
            second = now
        last_ms = envelope.append_time_ms
        for _ in replay.entry(envelope, region):
            pass
    yield from _look(replay, last_ms)


def _look(replay: Replay, time_ms: int) -> Iterator[GroupStanding]:
    for key in sorted(replay.touched):
        found = _of_share(replay, key, time_ms) if key in replay.shares else _of_lanes(replay, key, time_ms)
        if found is not None:
            yield found
    replay.touched.clear()


def _of_share(replay: Replay, key: ShareKey, time_ms: int) -> GroupStanding:
    share = replay.shares[key].share
    return GroupStanding(
        key,
        time_ms,
        share.settled_before(),
        share.next_sequence,
        share.unacked(),
        share.waiting_again(),
        0,
        share.expired,
        len(share.holders),
    )


def _of_lanes(replay: Replay, key: ShareKey, time_ms: int) -> GroupStanding | None:
    share = replay.lanes[key].share
    if not share.progress:
        return None
    parked = sum(len(each.sequences) for each in share.parked.values())
    consumers = len({each.consumer for each in share.holders})
    return GroupStanding(key, time_ms, share.done_before(), None, 0, len(share.failures), parked, share.expired, consumers)
