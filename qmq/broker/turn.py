"""A turn of the broker: the PRODUCE requests in it, when it runs, and which connections write answers in it.

PRODUCE requests are checked when they arrive, and admitted and written together at the turn's end; their answers wait for the commit.

A turn runs at the end of the round of the event loop in which it was requested, or immediately if only one connection sent frames recently:
then no other frames would join, and another round of the event loop costs as much as half of the turn (`TurnSchedule`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from qmq import limits
from qmq.broker.dispatch.sessions import Flushable, HeldAnswer, Peer
from qmq.broker.lanes.ordered_writes import Admission, Key
from qmq.broker.parts import Admit, ServingBroker
from qmq.errors import DiskFull, QmqError
from qmq.log.queue import Queue
from qmq.log.store import Intake, Store
from qmq.process.files import refusal_of
from qmq.wire import frame as frames
from qmq.wire import frame_payloads as wire
from qmq.wire.frame import FrameKind

WRITE_BYTES_MAX: Final = 8 * limits.MIB
"""Larger batches of a turn are written by several writes."""


@dataclass(slots=True)
class StagedProduce:
    """A PRODUCE that waits for the end of the turn."""

    peer: Peer
    request_id: int
    batches: list[Intake]
    is_fast: bool
    """Whether the request is answered when this broker has written it (`acks=master`)."""
    awaits_flush: bool


class BrokerTurn:
    def __init__(
        self, broker: ServingBroker, *, admit_first: Callable[[Store], Admit | None] | None, may_write: Callable[[], bool]
    ) -> None:
        """`admit_first` and `may_write` are those of `BrokerParts`. `broker.turn` calls `begin` first, and `end`."""
        self._broker = broker
        self._admit_first = admit_first
        self.may_write = may_write
        self.staged: list[StagedProduce] = []
        """The requests that wait for the end of the turn."""
        self._full: dict[Flushable, None] = {}
        self.leisurely: dict[Flushable, None] = {}
        """Connections whose answers may wait for the next tick."""
        self._is_scheduled = self._wants_turn = False
        self._is_receiving = False
        """Whether frames of a connection are being handled: the turn that they need is decided on behind them."""
        self._is_turning = False
        """Whether a turn is running: it does itself what is scheduled meanwhile."""
        self.count = 0
        """How many turns have begun."""
        self._sole_sender: object = None
        """The connection that alone brought what the last turn handled."""

    def schedule(self) -> None:
        """Schedule a turn for the end of this round of the event loop."""
        if not (self._is_scheduled or self._is_receiving or self._is_turning):
            self._is_scheduled = True
            self._broker.loop.call_soon(self._broker.turn)
        self._wants_turn = True

    def begin(self) -> None:
        """The turn begins."""
        self._is_scheduled = False
        self._is_turning = True
        self.count += 1

    def end(self) -> None:
        """The turn has ended. Later requests need another turn."""
        self._is_turning = False

    @property
    def has_rest(self) -> bool:
        """Whether requests wait to be written, or answers to be sent."""
        return bool(self.staged or self._full)

    def begin_frames(self) -> None:
        """The frames of one read are about to be handled; `end_frames` follows."""
        self._is_receiving, self._wants_turn = True, False

    def end_frames(self, sender: object) -> None:
        """The frames of one read are handled. If only this connection sent frames recently, the turn runs now; otherwise it waits for the
        other connections of this round.
        """
        self._is_receiving = False
        if not self._wants_turn:
            return
        if self._is_scheduled:
            self._sole_sender = None
        elif self._sole_sender is sender:
            self._broker.turn()
        else:
            self._sole_sender = sender
            self.schedule()

    def register_outbox(self, outbox: Flushable) -> None:
        """`outbox` has answers to write at the end of the turn."""
        self._full[outbox] = None
        self.schedule()

    def flush_outboxes(self) -> None:
        """Write the answers of all connections."""
        full, self._full = self._full, {}
        for outbox in full:
            outbox.flush()

    def tick(self) -> bool:
        """Answers that could wait are due. Returns whether any answer is to be written."""
        self._full.update(self.leisurely)
        self.leisurely.clear()
        return bool(self._full)

    # --- producing -----------------------------------------------------------------------------------------------------

    def refuse_staged(self, failure: QmqError) -> None:
        """Answer all requests with an error: none of them is written."""
        staged, self.staged = self.staged, []
        for each in staged:
            self._broker.answer_error(each.peer, each.request_id, failure)

    def append_staged(self) -> None:
        """Write the staged batches, in writes of a size that a slave takes in one frame."""
        staged, self.staged = self.staged, []
        begin, size = 0, 0
        for end, each in enumerate(staged):
            if size > WRITE_BYTES_MAX:
                self._append_some(staged[begin:end])
                begin, size = end, 0
            for batch in each.batches:
                size += len(batch.region)
        self._append_some(staged[begin:] if begin else staged)

    def _append_some(self, staged: list[StagedProduce]) -> None:
        batches = staged[0].batches if len(staged) == 1 else [batch for each in staged for batch in each.batches]
        must_be_judged = _must_be_judged(batches)
        admit = self._admission(must_be_judged) if must_be_judged or self._admit_first is not None else None
        if admit is not None:
            staged = self._admitted(staged, admit)
            batches = [batch for each in staged for batch in each.batches]
            if not staged:
                return
        store, responses = self._broker.store, self._broker.responses
        try:
            results = store.append(batches, are_new=not must_be_judged)
        except DiskFull as failure:
            for each in staged:
                self._broker.answer_error(each.peer, each.request_id, failure)
            return
        at, index, awaits_flush = 0, store.index, False
        answers: list[tuple[Peer, bytes]] = []
        for each in staged:
            produced = results[at : at + len(each.batches)]
            at += len(each.batches)
            answer = frames.frame(FrameKind.PRODUCED, each.request_id, wire.pack_produced(produced))
            if (each.is_fast or store.commits_at_once) and not each.awaits_flush:
                answers.append((each.peer, answer))
            else:
                awaits_flush = awaits_flush or each.awaits_flush
                responses.hold(HeldAnswer(index, each.peer, each.request_id, answer), for_flush=each.awaits_flush)
        if awaits_flush:
            store.flush_wanted = index
            self._broker.committer.flush_wanted(index)
        self._broker.written([batch.queue for batch in batches])  # consumers first: they wait for the messages
        for peer, answer in answers:
            peer.send(answer)

    def _admission(self, must_be_judged: bool) -> Admit | None:
        """The check for each request of one write, in their order; None: all may be appended."""
        store = self._broker.store
        admit = Admission(store, self._has_right).admit if must_be_judged else None
        first = self._admit_first(store) if self._admit_first is not None else None
        if first is None or admit is None:
            return first or admit

        def both(request: list[Intake]) -> None:
            first(request)
            admit(request)

        return both

    def _admitted(self, staged: list[StagedProduce], admit: Admit) -> list[StagedProduce]:
        """The requests that may be appended; the others are answered with their error."""
        admitted: list[StagedProduce] = []
        for each in staged:
            try:
                admit(each.batches)
            except (QmqError, OSError) as cause:  # a duplicate is compared with the stored batch: reading that may fail
                self._broker.answer_error(each.peer, each.request_id, refusal_of(cause))
                continue
            self._broker.loads.note(each.batches)
            admitted.append(each)
        return admitted

    def _has_right(self, queue: Queue) -> bool:
        return self.may_write() or not self._broker.subjects.find_queue(queue.id.subject.encode(), queue.id.partition).needs_right


def _must_be_judged(batches: list[Intake]) -> bool:
    """Whether `Admission` must check the batches of one write. New batches to unordered subjects need no check."""
    for batch in batches:
        if batch.queue.is_ordered or batch.queue.find_duplicate(batch.header) is not None:
            return True
    if len(batches) < 2:
        return False
    keys: set[Key] = {(id(each.queue), each.header.producer_id, each.header.batch_sequence) for each in batches}
    return len(keys) < len(batches)
