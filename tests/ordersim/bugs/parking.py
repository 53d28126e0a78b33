"""Bugs of parked keys: what is remembered of them, who is told, and what a replay gives back."""

from __future__ import annotations

from typing import Any

from ordersim.bugs.planting import changed, plant
from qmq.log import lane_state
from qmq.log.actions import LaneUnpark
from qmq.log.lane_state import LaneShare

_unpark = LaneShare.unpark


def _replay_without_the_last(self: LaneShare, action: Any) -> int:
    parked = self.parked.get(action.key)
    if action.replays and parked is not None and len(parked.sequences) > 1:
        parked.sequences.pop()
        self.parked_bytes -= lane_state._MESSAGE_BYTES
    return _unpark(self, action)


def _replay_and_keep_readers(self: LaneShare, action: Any) -> int:
    holders = self.holders
    found = _unpark(self, action)
    self.holders = holders
    return found


def _forget_key_and_not_its_size(self: LaneShare, key: bytes) -> Any:
    return self.parked.pop(key, None)


plant("leave the last message of a parked key out of its replay", changed(LaneUnpark, _replay_without_the_last))
plant("replay a key and let its reader read on", changed(LaneUnpark, _replay_and_keep_readers))
plant("count what is given back as parked for ever", (LaneShare, "_forget_key", _forget_key_and_not_its_size))
plant("tell a reader of no parked keys", (LaneShare, "parked_in", lambda *_: []))
