"""The PRODUCE requests of a turn: checked when they arrive, admitted and written together at its end. Their answers wait for the commit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from qmq import limits
from qmq.broker.broker_parts import Admit
from qmq.broker.committer import Committer
from qmq.broker.load_meters import LoadMeters
from qmq.broker.ordered_writes import Admission, Key
from qmq.broker.serving_parts import ServingParts
from qmq.broker.sessions import HeldAnswer, Peer
from qmq.errors import DiskFull, QmqError
from qmq.file_descriptors import refusal_of
from qmq.log.queue import Queue
from qmq.log.store import Intake, Store
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


class StagedProduces:
    """Made when the broker begins to serve from a store."""

    def __init__(
        self,
        parts: ServingParts,
        committer: Committer,
        *,
        admit_first: Callable[[Store], Admit | None] | None,
        may_write: Callable[[], bool],
        tell_written: Callable[[list[Queue]], None],
    ) -> None:
        """`admit_first` and `may_write` are those of `BrokerParts`. `tell_written` is called with the queues of each write."""
        self._parts = parts
        self._committer = committer
        self._admit_first = admit_first
        self.may_write = may_write
        self._tell_written = tell_written
        self.staged: list[StagedProduce] = []
        """The requests that wait for the end of the turn."""
        self.loads = LoadMeters(parts.clock)
        """The loads of the partitions of ordered subjects."""

    def stage(self, peer: Peer, request_id: int, batches: list[Intake], *, is_fast: bool, awaits_flush: bool) -> None:
        """Write the batches at the end of the turn, and answer."""
        for batch in batches:
            awaits_flush = awaits_flush or batch.awaits_flush
        self.staged.append(StagedProduce(peer, request_id, batches, is_fast, awaits_flush))

    def refuse(self, failure: QmqError) -> None:
        """Answer all requests with an error: none of them is written."""
        staged, self.staged = self.staged, []
        for each in staged:
            self._parts.turns.answer_error(each.peer, each.request_id, failure)

    def append(self) -> None:
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
        store, responses = self._parts.store, self._parts.responses
        try:
            results = store.append(batches, are_new=not must_be_judged)
        except DiskFull as failure:
            for each in staged:
                self._parts.turns.answer_error(each.peer, each.request_id, failure)
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
            self._committer.flush_wanted(index)
        self._tell_written([batch.queue for batch in batches])  # consumers first: they wait for the messages
        for peer, answer in answers:
            peer.send(answer)

    def _admission(self, must_be_judged: bool) -> Admit | None:
        """The check for each request of one write, in their order; None: all may be appended."""
        store = self._parts.store
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
                self._parts.turns.answer_error(each.peer, each.request_id, refusal_of(cause))
                continue
            self.loads.note(each.batches)
            admitted.append(each)
        return admitted

    def _has_right(self, queue: Queue) -> bool:
        return self.may_write() or not self._parts.subjects.find_queue(queue.id.subject.encode(), queue.id.partition).needs_right


def _must_be_judged(batches: list[Intake]) -> bool:
    """Whether `Admission` must check the batches of one write. New batches to unordered subjects need no check."""
    for batch in batches:
        if batch.queue.is_ordered or batch.queue.find_duplicate(batch.header) is not None:
            return True
    if len(batches) < 2:
        return False
    keys: set[Key] = {(id(each.queue), each.header.producer_id, each.header.batch_sequence) for each in batches}
    return len(keys) < len(batches)
