"""Bugs of writing: which batches a broker takes, and how a producer interprets its answers."""

from __future__ import annotations

from typing import Any

from ordersim.bugs.planting import plant
from qmq.broker.lanes.admin import LaneAdmin
from qmq.broker.lanes.ordered_writes import Admission
from qmq.client.producing.ordered.batch import OrderedBatch
from qmq.client.producing.ordered.stream import Stream
from qmq.errors import RightLapsed, RouteChanged

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
