"""Bugs of reading: grants, leases, tokens, and the choice of messages to hand out."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from ordersim.bugs.planting import plant
from qmq.broker.admin import BrokerAdmin
from qmq.broker.lanes import lanes
from qmq.broker.lanes.admin import LaneAdmin
from qmq.broker.lanes.lanes import Lanes
from qmq.client.consuming.ordered.keys import KeyQueue
from qmq.client.consuming.ordered.lane_reader import LaneReader
from qmq.log.actions import LaneBegin
from qmq.log.lane_state import LaneHolder, LaneShare

_attach, _find, _share = Lanes.attach, Lanes._find, Lanes.share
_next = KeyQueue.next
_finished = KeyQueue.finished


def _answer_at_once(self: Lanes, peer: Any, request_id: int, request: Any) -> None:
    unwritten = self._responses.unwritten
    waiting = len(unwritten)
    _attach(self, peer, request_id, request)
    if len(unwritten) > waiting:
        held = unwritten.pop()
        held.peer.send(held.answer)


def _without_others(holders: list[LaneHolder], request: Any) -> tuple[list[LaneHolder], list[LaneHolder]]:
    return [each for each in holders if each.consumer == request.consumer], []


def _take_over(holders: list[LaneHolder], _request: Any) -> tuple[list[LaneHolder], list[LaneHolder]]:
    """Any consumer that asks gets the lane; the holder before it is released in order, although its lease still ran."""
    return holders, []


async def _describe_early(self: LaneAdmin, request: Any) -> Any:
    return self._describe(request)


def _begin_at_end(self: Lanes, queue: Any, group: str, whole: Any) -> LaneShare:
    share = queue.lanes.get(group)
    if share is None or not share.progress:
        self._store.act(LaneBegin(queue.id.subject, queue.id.partition, group, "", *whole, queue.visible_sequence, 0))
    return _share(self, queue, group, whole)


def _open_anything(self: Lanes, request: Any, lps: Any) -> Any:
    found = self._routing.partition(request.subject, request.partition)
    if found is None:
        return _find(self, request, lps)
    return self._subjects.find_queue(request.subject.encode(), request.partition).queue, found.range


def _many_of_a_key(self: KeyQueue[Any, Any]) -> Any:
    found = _next(self)
    if found is not None:
        _finished(self, found[0])
        self._in_work.add(found[0])
    return found


def _finish_if_there(self: KeyQueue[Any, Any], key: bytes) -> None:
    if key in self._in_work:
        _finished(self, key)


plant("answer a grant before it is committed", (Lanes, "attach", _answer_at_once))
plant("grant a lane that overlaps another one", (lanes, "_divide", _without_others))
plant("take a lane over while its lease runs", (lanes, "_divide", _take_over))
plant(
    "report a lane finished before that is committed",
    (LaneAdmin, "describe", _describe_early),
    (BrokerAdmin, "committed_read", lambda _: nullcontext()),
)
plant("begin a target at its end", (Lanes, "share", _begin_at_end))
plant("hand out after the lease may be over", (LaneReader, "is_sure", lambda self: True))
plant("hand out several messages of a key at once", (KeyQueue, "next", _many_of_a_key), (KeyQueue, "finished", _finish_if_there))
