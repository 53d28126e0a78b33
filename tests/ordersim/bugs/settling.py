"""Bugs of settling: what counts as done, and for which group."""

from __future__ import annotations

from typing import Any

from ordersim.bugs.planting import changed, plant
from qmq.broker.lanes.lanes import Lanes
from qmq.client.consuming.ordered.lane import Cell, LaneCore, LaneState, _piece
from qmq.log.actions import LaneDone, LaneRelease
from qmq.log.lane_state import LaneHolder, LaneShare
from qmq.wire.frame_payloads import LaneVerdict

_holder, _release = LaneShare.holder, LaneShare.release
_begin, _delivered = LaneCore.begin, LaneCore.delivered
_FORGOTTEN: dict[int, dict[int, LaneHolder]] = {}


def _keep_void(self: LaneShare, action: Any) -> None:
    for each in self.holders:
        _FORGOTTEN.setdefault(id(self), {})[each.token] = each
    _release(self, action)


def _find_void(self: LaneShare, token: int) -> LaneHolder | None:
    return _holder(self, token) or _FORGOTTEN.get(id(self), {}).get(token)


def _do_not_tell(self: Lanes, queue: Any, group: str, token: int) -> None:
    return


plant(
    "let a zombie's verdicts count",
    (LaneShare, "holder", _find_void),
    (Lanes, "forget", _do_not_tell),
    changed(LaneRelease, _keep_void),
)


def _done_everywhere(self: LaneShare, action: Any) -> int:
    if self.holder(action.token) is None:
        return 0
    for each in self.progress:
        for first, last in action.ranges:
            each.add(first, last + 1)
    self._join()
    return len(action.ranges)


plant("count as done what is another lane's", changed(LaneDone, _done_everywhere))


def _settle_at_once(self: LaneCore, cell: Cell) -> bool:
    is_ours = _begin(self, cell)
    if is_ours:
        self._fresh.append(_piece(cell.first, cell.sequence, LaneVerdict.DONE, None))
    return is_ours


def _park_one(self: LaneCore, key: bytes) -> None:
    for cell in [each for each in self._cells.values() if each.key == key and each.state is LaneState.WORKING]:
        self._set_aside(cell)


def _forget_nothing(self: LaneCore) -> list[Cell]:
    return []


plant("settle a message when it is handed out", (LaneCore, "begin", _settle_at_once))
plant("park a message without what follows for its key", (LaneCore, "_park", _park_one))
plant("continue with what was held under a token that is void", (LaneCore, "lost", _forget_nothing))
