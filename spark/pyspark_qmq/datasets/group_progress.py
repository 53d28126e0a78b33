"""How far each group was, over time: the same replay, looked at once a second. Pure.

One row for each second in which a group did something on a queue: how it stood at that second's last entry. The newest row of a queue and
group is how it stands where the log ends. With the queue's end at that time (the messages' append times say it) this is the group's lag:

    of a share         end - next_sequence messages were never handed out, and `held` + `waiting` were and are not done
    of a partition     at most end - done_before are not done: lanes go their own ways, and the slowest of them counts
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from pyspark_qmq.datasets.deliveries import Replay
from pyspark_qmq.datasets.delivery_fate import ShareKey
from qmq.batch import Envelope

STEP_MS: Final = 1_000


class GroupStanding(NamedTuple):
    """How far one group is on one queue."""

    share: ShareKey
    time_ms: int
    done_before: int
    """Everything before this sequence is done."""
    next_sequence: int | None
    """The first message that nobody was handed yet; None on partitions of ordered subjects, where nothing remembers it."""
    held: int
    """Messages that consumers have."""
    waiting: int
    """Messages that came back, to be handed out again."""
    parked: int
    expired: int
    """Messages that retention took before they were done, ever, as far as the group heard of it."""
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
