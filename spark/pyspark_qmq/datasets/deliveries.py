"""Deliveries and their outcomes, from a replay of a broker group's action log. Pure: takes entries, returns deliveries.

The replay uses the brokers' own code for shares and lanes, which reports the effect of each action (share_replay.py,
lane_replay.py). It loops over ranges, as the log does, never over messages.

Every message of a share has one event of (ack, expired, passed) in the end, and every message of a partition one of (done, park); more than
one only if an operator returned it. A log that begins with snapshots begins with the deliveries that were open then.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from pyspark_qmq.datasets.delivery_fate import Delivery, DeliveryFate, ShareKey
from pyspark_qmq.datasets.lane_replay import LaneReplay
from pyspark_qmq.datasets.share_replay import ShareReplay
from qmq.batch import Envelope, Kind
from qmq.errors import CorruptBatch, LogDamaged
from qmq.log.actions import AnyAction, DropQueue, Forget, LaneAction, ScheduleAction, decode_actions
from qmq.log.envelopes import unwrap
from qmq.log.lane_share import LaneShare
from qmq.log.share import Share


class Replay:
    """A broker group's action log, from its first entry on."""

    def __init__(self) -> None:
        self.shares: dict[ShareKey, ShareReplay] = {}
        self.lanes: dict[ShareKey, LaneReplay] = {}
        self.touched: set[ShareKey] = set()
        """The changes since the last look; the reader may clear it."""
        self._begins = True

    def entry(self, envelope: Envelope, region: bytes | memoryview) -> Iterator[Delivery]:
        """Apply the next entry and yield the deliveries that it ended. Consume the iterator before the next call.

        Raises LogDamaged if the entry does not continue the earlier ones, because entries between are missing.
        """
        try:
            if envelope.kind == Kind.SNAPSHOT:
                self._snapshot(bytes(region))
            elif envelope.kind == Kind.ACTIONS:
                self._begins = False
                for action in decode_actions(unwrap(bytes(region))):
                    if not isinstance(action, ScheduleAction):
                        yield from self._apply(action, envelope.append_time_ms)
        except (AssertionError, CorruptBatch, KeyError) as cause:
            raise LogDamaged(
                f"entry {envelope.index} of the action log does not fit the entries before it ({cause!r}): segments are missing or damaged"
            ) from cause

    def _apply(self, action: AnyAction, time_ms: int) -> Iterator[Delivery]:
        assert not isinstance(action, ScheduleAction), action
        key = ShareKey(action.subject, action.partition, action.group)
        if isinstance(action, Forget | DropQueue):
            return self._ended(action, time_ms)
        self.touched.add(key)
        if isinstance(action, LaneAction):
            lanes = self.lanes.get(key)
            if lanes is None:
                lanes = self.lanes[key] = LaneReplay(key)
            return lanes.apply(action, time_ms)
        share = self.shares.get(key)
        if share is None:
            share = self.shares[key] = ShareReplay(key)
        return share.apply(action, time_ms)

    def _ended(self, action: Forget | DropQueue, time_ms: int) -> Iterator[Delivery]:
        """A group was deleted on a queue, or the queue with all its groups: end their open deliveries."""
        for found in (self.shares, self.lanes):
            for key in [key for key in found if (key.subject, key.partition) == (action.subject, action.partition)]:
                if isinstance(action, DropQueue) or key.group == action.group:
                    self.touched.discard(key)
                    for each in found.pop(key).rest():
                        yield each._replace(settled_ms=time_ms, fate=DeliveryFate.RESET)

    def _snapshot(self, region: bytes) -> None:
        """Apply a snapshot. Only the one at the start of the log has new information."""
        if not self._begins:
            return
        for subject, partition, group, state, *kind in msgspec.msgpack.decode(unwrap(region), strict=False):
            key = ShareKey(subject, partition, group)
            self.touched.add(key)
            if kind:
                self.lanes[key] = LaneReplay(key, LaneShare.from_state(state))
            else:
                self.shares[key] = ShareReplay(key, Share.from_state(state))

    def rest(self) -> Iterator[Delivery]:
        """Deliveries that are open, waiting or parked at the end of the log."""
        for share in self.shares.values():
            yield from share.rest()
        for lanes in self.lanes.values():
            yield from lanes.rest()


def deliveries(entries: Iterable[tuple[Envelope, bytes | memoryview]]) -> Iterator[Delivery]:
    """All of a broker group's action log, then what is so where it ends. Raises as `Replay.entry`."""
    replay = Replay()
    for envelope, region in entries:
        yield from replay.entry(envelope, region)
    yield from replay.rest()
