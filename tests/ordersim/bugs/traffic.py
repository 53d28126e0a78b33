"""Bugs of parked keys: what is remembered of them, who is told, and what a replay gives back.

Bugs of reading: grants, leases, tokens, and the choice of messages to hand out.

Bugs of settling: what counts as done, and for which group.

Bugs of writing: which batches a broker takes, and how a producer interprets its answers.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from ordersim.bugs.planting import changed, plant
from qmq.broker.admin import BrokerAdmin
from qmq.broker.control import LaneAdmin
from qmq.broker.dispatch import lanes
from qmq.broker.dispatch.lanes import Lanes
from qmq.broker.produce_checks import Admission
from qmq.client.consuming.ordered.keys import KeyQueue
from qmq.client.consuming.ordered.lane import Cell, LaneCore, LaneState, _piece
from qmq.client.consuming.ordered.lane_reader import LaneReader
from qmq.client.producing.ordered.stream import OrderedBatch, Stream
from qmq.errors import RightLapsed, RouteChanged
from qmq.log import lane_state
from qmq.log.actions import LaneBegin, LaneDone, LaneRelease, LaneUnpark
from qmq.log.lane_state import GroupLaneState, LaneHolder
from qmq.wire.frame_payloads import LaneVerdict

_unpark = GroupLaneState.unpark


def _replay_without_the_last(self: GroupLaneState, action: Any) -> int:
    parked = self.parked.get(action.key)
    if action.replays and parked is not None and len(parked.sequences) > 1:
        parked.sequences.pop()
        self.parked_bytes -= lane_state._MESSAGE_BYTES
    return _unpark(self, action)


def _replay_and_keep_readers(self: GroupLaneState, action: Any) -> int:
    holders = self.holders
    found = _unpark(self, action)
    self.holders = holders
    return found


def _forget_key_and_not_its_size(self: GroupLaneState, key: bytes) -> Any:
    return self.parked.pop(key, None)


plant("leave the last message of a parked key out of its replay", changed(LaneUnpark, _replay_without_the_last))
plant("replay a key and let its reader read on", changed(LaneUnpark, _replay_and_keep_readers))
plant("count what is given back as parked for ever", (GroupLaneState, "_forget_key", _forget_key_and_not_its_size))
plant("tell a reader of no parked keys", (GroupLaneState, "parked_in", lambda *_: []))


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


def _begin_at_end(self: Lanes, queue: Any, group: str, whole: Any) -> GroupLaneState:
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


_holder, _release = GroupLaneState.holder, GroupLaneState.release
_begin, _delivered = LaneCore.begin, LaneCore.delivered
_FORGOTTEN: dict[int, dict[int, LaneHolder]] = {}


def _keep_void(self: GroupLaneState, action: Any) -> None:
    for each in self.holders:
        _FORGOTTEN.setdefault(id(self), {})[each.token] = each
    _release(self, action)


def _find_void(self: GroupLaneState, token: int) -> LaneHolder | None:
    return _holder(self, token) or _FORGOTTEN.get(id(self), {}).get(token)


def _do_not_tell(self: Lanes, queue: Any, group: str, token: int) -> None:
    return


plant(
    "let a zombie's verdicts count",
    (GroupLaneState, "holder", _find_void),
    (Lanes, "forget", _do_not_tell),
    changed(LaneRelease, _keep_void),
)


def _done_everywhere(self: GroupLaneState, action: Any) -> int:
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


# --- the broker ----------------------------------------------------------------------------------------------------------

_is_stored, _require = Admission._is_stored, Admission._require


def _no_gaps_looked_for(self: Admission, batch: Any, _newest: Any) -> None:
    if batch.queue.sealed is not None:
        raise RouteChanged("sealed")
    if not self._has_right(batch.queue):
        raise RightLapsed("no right")


def _never_sealed(self: Admission, batch: Any, newest: Any) -> None:
    sealed, batch.queue.sealed = batch.queue.sealed, None
    try:
        _require(self, batch, newest)
    finally:
        batch.queue.sealed = sealed


def _forgets_when_sealed(self: Admission, batch: Any, newest: Any) -> bool:
    return batch.queue.sealed is None and _is_stored(self, batch, newest)


async def _seal_early(self: LaneAdmin, subject: str, number: int, change_id: str, to_version: int) -> int:
    return self._broker.seal(self._queue(subject, number), change_id, to_version)


plant("take batches without looking for gaps in their numbers", (Admission, "_require", _no_gaps_looked_for))
plant("take batches behind the command message", (Admission, "_require", _never_sealed))
plant("say of a batch that is stored that it is not, once sealed", (Admission, "_is_stored", _forgets_when_sealed))
plant("answer a seal before it is committed", (LaneAdmin, "seal", _seal_early))

# --- the producer --------------------------------------------------------------------------------------------------------

_unsent_copy = OrderedBatch.unsent_copy
_leave = Stream.leave


def _anonymous(self: OrderedBatch, *, keep_ids: bool = False) -> OrderedBatch:
    return _unsent_copy(self)


def _leave_as_fenced(self: Stream, now: float, *, is_fenced: bool) -> None:
    _leave(self, now, is_fenced=True)


def _begin_as_somebody_else(self: Stream) -> None:
    self._is_renumbering = False
    self._producer_id, self._next_number = self._new_id(), 0


plant("begin a new session as another producer", (Stream, "_begin_session", _begin_as_somebody_else))
plant("take an unknown outcome for not stored", (OrderedBatch, "is_certain", property(lambda self: self.attempts > 0)))
plant("send on before the fate of earlier batches is known", (Stream, "is_settled", property(lambda self: self.is_left)))
plant("send again under another message id", (OrderedBatch, "unsent_copy", _anonymous))
plant("give up waiting for a partition that is not fenced", (Stream, "leave", _leave_as_fenced))
