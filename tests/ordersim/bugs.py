"""Planted bugs: each one puts a mistake into the product's classes during a run, and the simulator
must find it.

The product itself has no switches for this. A bug that the simulator does not find shows a gap in
the simulator. `BUGS` has them by name.

Plants a bug: replaces methods of a class, or names of a module, during a run.

Bugs in changes of routes and in how groups advance.

Bugs in leases and fences.

Bugs of parked keys: what is remembered of them, who is told, and what a replay gives back.

Bugs of reading: grants, leases, tokens, and the choice of messages to hand out.

Bugs of settling: what counts as done, and for which group.

Bugs of writing: which batches a broker takes, and how a producer interprets its answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import qmq_ordering.lanes as advancing
from qmq_coordination.broker_groups import read_group
from qmq_coordination.coordination_store import Put, absent
from qmq_coordination.ordered_records import Fence, change_key, fence_key
from qmq_ordering.changes import PhaseEvent, step
from qmq_ordering.lanes import Frontier, FrontierPiece
from qmq_ordering.routes import FENCED

from qmq.broker.admin import BrokerAdmin
from qmq.broker.control import LaneAdmin
from qmq.broker.dispatch import lanes
from qmq.broker.dispatch.lanes import Lanes
from qmq.broker.produce_checks import Admission
from qmq.client.consuming.ordered.keys import KeyQueue
from qmq.client.consuming.ordered.lane import Cell, LaneCore, LaneState, _piece
from qmq.client.consuming.ordered.lane_reader import LaneReader
from qmq.client.producing.ordered.stream import OrderedBatch, Stream
from qmq.errors import CoordinationUnknown, RightLapsed, RouteChanged
from qmq.log import lane_state, queue
from qmq.log.actions import LaneBegin, LaneDone, LaneRelease, LaneUnpark
from qmq.log.lane_state import GroupLaneState, LaneHolder
from qmq.log.queue import Queue
from qmq.meta.ordered import changes, rounds
from qmq.meta.ordered.changes import RouteChanges, Sealing
from qmq.meta.ordered.controller import Controller
from qmq.meta.ordered.groups import Records
from qmq.meta.ordered.rounds import GroupRounds
from qmq.node.replica import status
from qmq.node.replica.status import WriteLease
from qmq.wire.frame_payloads import LaneVerdict

BUGS: dict[str, Callable[[], AbstractContextManager[None]]] = {}


def plant(name: str, *places: tuple[Any, Any, Any]) -> None:
    """A bug: what is replaced (where, name or key, by what)."""

    @contextmanager
    def planted() -> Iterator[None]:
        with ExitStack() as stack:
            for where, attribute, other in places:
                stack.enter_context(
                    patch.dict(where, {attribute: other})
                    if isinstance(where, dict)
                    else patch.object(where, attribute, other)
                )
            yield

    assert name not in BUGS
    BUGS[name] = planted


def changed(action: type[Any], change: Callable[..., Any]) -> tuple[Any, Any, Any]:
    """A place for `plant`: another function changes the state for this kind of action.

    The table itself changes: a master acts by the store's name for it, followers by the queue's.
    """
    part, _ = queue.CHANGES[action]
    return queue.CHANGES, action, (part, change)


# --- changes --------------------------------------------------------------------------------------


async def _publish_first(self: RouteChanges, subject: str, item: Any, change: Any) -> None:
    after = change
    for number in change.sources:
        after = step(after, PhaseEvent.SOURCE_SEALED, number=number, sequence=FENCED)
    after = step(after, PhaseEvent.ALL_SEALED, now_ms=self._now_ms())
    await self._store.txn([changes.unchanged(item)], [Put(item.key, after.encode())])


async def _prepare_blindly(self: RouteChanges, subject: str, latest: Any, change: Any) -> None:
    try:
        await self._store.txn([], [Put(change_key(subject, change.to_version), change.encode())])
    except CoordinationUnknown:
        return


class _AnyTime:
    """A store whose transactions do not compare."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def txn(self, _compares: Any, success: Any) -> Any:
        return await self._store.txn([], success)


def _blind(method: Callable[..., Any]) -> Any:
    async def blindly(self: RouteChanges, subject: str, item: Any, change: Any) -> None:
        store, self._store = self._store, _AnyTime(self._store)  # type: ignore[assignment]
        try:
            await method(self, subject, item, change)
        finally:
            self._store = store

    return blindly


plant("publish before the sources are sealed", (RouteChanges, "_seal", _publish_first))
plant(
    "prepare a change without comparing the latest version",
    (RouteChanges, "_put_prepared", _prepare_blindly),
)
plant("call a change sealed without comparing", (RouteChanges, "_seal", _blind(RouteChanges._seal)))
plant("publish without comparing", (RouteChanges, "_publish", _blind(RouteChanges._publish)))

# --- groups ---------------------------------------------------------------------------------------

_advance = advancing.advance
_is_finished = Queue.is_finished


def _on_first_source(
    frontier: Frontier, gate: Any, routes: Any, latest: int, finished: Any, cuts: Any = None
) -> Frontier:
    """As soon as one source of a change is finished, all sources count as finished."""

    def any_finished(number: int, lps: Any) -> bool:
        if finished(number, lps):
            return True
        versions = [
            version for version, route in routes.items() if route.partition(number) is not None
        ]
        before, after = routes[max(versions)], routes.get(max(versions) + 1)
        if after is None:
            return False
        here = {part.number for part in after.partitions}
        closed = [part for part in before.partitions if part.number not in here]
        return any(finished(part.number, part.range) for part in closed)

    return _advance(frontier, gate, routes, latest, any_finished, cuts)


def _by_any_range(
    frontier: Frontier, gate: Any, routes: Any, latest: int, finished: Any, cuts: Any = None
) -> Frontier:
    """A range opens when any range of its source is finished."""

    def some_finished(number: int, lps: Any) -> bool:
        return finished(number, lps) or any(
            each.end < 1 << 20 and finished(number, each) for each in cuts(number)
        )

    return _advance(frontier, gate, routes, latest, some_finished, cuts)


def _two_at_once(
    frontier: Frontier, gate: Any, routes: Any, latest: int, finished: Any, cuts: Any = None
) -> Frontier:
    after = _advance(frontier, gate, routes, latest, finished, cuts)
    if after == frontier or after.newest >= latest:
        return after
    return Frontier(
        tuple(
            advancing._joined(
                [FrontierPiece(each.range, min(each.version + 1, latest)) for each in after.pieces]
            )
        )
    )


def _missing_is_done(self: Queue, share: Any, lps: Any) -> bool:
    if self.sealed is not None and (share is None or not share.progress):
        return True
    return _is_finished(self, share, lps)


async def _put_blindly(self: Records, item: Any, record: Any) -> Any:
    try:
        done = await self.store.txn([], [Put(item.key, record.encode())])
    except CoordinationUnknown:
        return None
    return replace(item, value=record.encode(), mod_revision=done.revision)


plant(
    "advance when the first of several sources is finished", (rounds, "advance", _on_first_source)
)
plant("open a range when another one of its source is finished", (rounds, "advance", _by_any_range))
plant("skip a version", (rounds, "advance", _two_at_once))
plant("take progress that is missing for done", (Queue, "is_finished", _missing_is_done))
plant("put a frontier without comparing", (Records, "swap", _put_blindly))


async def _leave_parked(self: GroupRounds, looked: Any, after: Any) -> bool:
    return True


plant("leave parked keys behind when a group moves on", (GroupRounds, "_hand_on", _leave_parked))


async def _fence(
    self: Sealing, subject: str, part: Any, change: Any, record: Any, began_ms: int, *, looks: bool
) -> bool:
    key = fence_key(part.group, subject, part.number)
    if looks:
        if (
            self._now_ms() - began_ms < 1_000
            or "master" in (await read_group(self._store, part.group)).items
        ):
            return False
        await self._arrow("before fence")
    try:
        await self._store.txn(
            [absent(key)], [Put(key, Fence(change.id, change.to_version).encode())]
        )
    except CoordinationUnknown:
        return False
    return await self._store.get(key) is not None


async def _at_once(
    self: Sealing, subject: str, part: Any, change: Any, record: Any, began_ms: int
) -> bool:
    return await _fence(self, subject, part, change, record, began_ms, looks=False)


async def _without_comparing(
    self: Sealing, subject: str, part: Any, change: Any, record: Any, began_ms: int
) -> bool:
    return await _fence(self, subject, part, change, record, began_ms, looks=True)


async def _look_at_nothing(self: WriteLease) -> None:
    self._epoch, self._lease = self._confirmed[:2]
    self._until_ms = self._confirmed[2] + int(self._lease_ms() * (1 - status.MARGIN))


async def _lift_nothing(self: Controller) -> None:
    pass


plant("fence without waiting for the lease", (Sealing, "_is_fenced", _at_once))
plant("fence without comparing the master's key", (Sealing, "_is_fenced", _without_comparing))
plant("leave a fence in the store for ever", (Controller, "_lift_fences", _lift_nothing))
plant("remove a fence before its seal is known", (Fence, "is_needed", lambda *_: False))
plant("never end the right by the clock", (WriteLease, "__call__", lambda self: self._until_ms > 0))
plant("keep the right for longer than the lease", (status, "MARGIN", -0.5))
plant("do not list the fences under a new lease", (WriteLease, "_close_fenced", _look_at_nothing))


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


plant(
    "leave the last message of a parked key out of its replay",
    changed(LaneUnpark, _replay_without_the_last),
)
plant("replay a key and let its reader read on", changed(LaneUnpark, _replay_and_keep_readers))
plant(
    "count what is given back as parked for ever",
    (GroupLaneState, "_forget_key", _forget_key_and_not_its_size),
)
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


def _without_others(
    holders: list[LaneHolder], request: Any
) -> tuple[list[LaneHolder], list[LaneHolder]]:
    return [each for each in holders if each.consumer == request.consumer], []


def _take_over(
    holders: list[LaneHolder], _request: Any
) -> tuple[list[LaneHolder], list[LaneHolder]]:
    """Any consumer that asks gets the lane; the holder before it is released in order, although its
    lease still ran.
    """
    return holders, []


async def _describe_early(self: LaneAdmin, request: Any) -> Any:
    return self._describe(request)


def _begin_at_end(self: Lanes, queue: Any, group: str, whole: Any) -> GroupLaneState:
    share = queue.lanes.get(group)
    if share is None or not share.progress:
        self._store.act(
            LaneBegin(
                queue.id.subject, queue.id.partition, group, "", *whole, queue.visible_sequence, 0
            )
        )
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
plant(
    "hand out several messages of a key at once",
    (KeyQueue, "next", _many_of_a_key),
    (KeyQueue, "finished", _finish_if_there),
)


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
    for cell in [
        each for each in self._cells.values() if each.key == key and each.state is LaneState.WORKING
    ]:
        self._set_aside(cell)


def _forget_nothing(self: LaneCore) -> list[Cell]:
    return []


plant("settle a message when it is handed out", (LaneCore, "begin", _settle_at_once))
plant("park a message without what follows for its key", (LaneCore, "_park", _park_one))
plant("continue with what was held under a token that is void", (LaneCore, "lost", _forget_nothing))


# --- the broker -----------------------------------------------------------------------------------

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


async def _seal_early(
    self: LaneAdmin, subject: str, number: int, change_id: str, to_version: int
) -> int:
    return self._broker.seal(self._queue(subject, number), change_id, to_version)


plant(
    "take batches without looking for gaps in their numbers",
    (Admission, "_require", _no_gaps_looked_for),
)
plant("take batches behind the command message", (Admission, "_require", _never_sealed))
plant(
    "say of a batch that is stored that it is not, once sealed",
    (Admission, "_is_stored", _forgets_when_sealed),
)
plant("answer a seal before it is committed", (LaneAdmin, "seal", _seal_early))

# --- the producer ---------------------------------------------------------------------------------

_unsent_copy = OrderedBatch.unsent_copy
_leave = Stream.leave


def _anonymous(self: OrderedBatch, *, keep_ids: bool = False) -> OrderedBatch:
    return _unsent_copy(self)


def _leave_as_fenced(self: Stream, now: float, *, is_fenced: bool) -> None:
    _leave(self, now, is_fenced=True)


def _begin_as_somebody_else(self: Stream) -> None:
    self._is_renumbering = False
    self._producer_id, self._next_number = self._new_id(), 0


plant(
    "begin a new session as another producer", (Stream, "_begin_session", _begin_as_somebody_else)
)
plant(
    "take an unknown outcome for not stored",
    (OrderedBatch, "is_certain", property(lambda self: self.attempts > 0)),
)
plant(
    "send on before the fate of earlier batches is known",
    (Stream, "is_settled", property(lambda self: self.is_left)),
)
plant("send again under another message id", (OrderedBatch, "unsent_copy", _anonymous))
plant("give up waiting for a partition that is not fenced", (Stream, "leave", _leave_as_fenced))
