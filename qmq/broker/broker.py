"""The broker's turns: all requests that arrive in one round of the event loop are handled together.

    frames in -> PRODUCE: checked, staged
                 PULL, SETTLE, ATTACH: done immediately
    end of turn: one write to the message log, consumers woken,
                 one write to the action log, answers out, a flush begun if it is due

PULLs, and SETTLEs whose answers nobody waits for, are written with the next messages or other
actions, with the next tick at the latest. So a batch that is produced, delivered and acknowledged
takes the group one round of replication instead of three. A replica tells its group of the messages
and the actions of one turn together.

PRODUCE requests are checked when they arrive, and admitted and written together at the turn's end.
A turn runs at the end of the round of the event loop in which it was requested, or immediately if
only one connection sent frames recently: then no other frames would join, and another round of the
event loop costs as much as half of the turn (`BrokerTurn`).

An answer is sent only when its index is committed. The *committer* decides when that is: a single
node commits what is written or flushed, a replica what a majority of its group has. A producer that
asked for `acks=master` is answered when this broker has written its batch; one that asked for
`acks=flushed`, or sends to a subject that asks for it, when a majority has flushed it. A full disk
refuses messages at once; consumption continues, and the answers to SETTLE wait until their actions
are written.

A broker serves while it is its group's master (a node alone always is). Otherwise every request is
refused with NotMaster; when it stops being master, waiting requests get an error with unknown
outcome.

Besides the batches of producers it writes dead letters and command messages of queues to its
message log.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from qmq import limits
from qmq.broker.config import BrokerConfig
from qmq.broker.dispatch.dispatch import Dispatch
from qmq.broker.dispatch.lanes import Lanes
from qmq.broker.dispatch.sessions import Peer, PendingAnswer, PendingResponses
from qmq.broker.metrics import BrokerCounters, LoadMeters
from qmq.broker.parts import Admit, BrokerParts, ServingBroker
from qmq.broker.produce_checks import (
    Admission,
    BrokerSubjects,
    FindQueue,
    Key,
    LookUpSubject,
    QueueDestinations,
    may_pass_drain,
    read_batches,
)
from qmq.broker.reading.fetches import Fetching
from qmq.errors import (
    CallerError,
    DiskFull,
    InvalidArgument,
    NotMaster,
    Outcome,
    QmqError,
    ReadOnly,
    RouteConflict,
    Stopping,
)
from qmq.limits import UNWRITTEN_BYTES_MAX
from qmq.log.actions import ScheduleAction, StepAction
from qmq.log.checkpoint import CheckpointPlan, begin_checkpoint
from qmq.log.queue import Queue
from qmq.log.retention import purge
from qmq.log.store import Intake, Store
from qmq.process.event_loop import Clock
from qmq.process.files import refusal_of
from qmq.wire import frame as frames
from qmq.wire import frame_payloads as wire
from qmq.wire.frame import FrameKind
from qmq.wire.frame_payloads import Produced

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
        self,
        broker: ServingBroker,
        *,
        admit_first: Callable[[Store], Admit | None] | None,
        may_write: Callable[[], bool],
    ) -> None:
        """`admit_first` and `may_write` are those of `BrokerParts`."""
        self._broker = broker
        self._admit_first = admit_first
        self.may_write = may_write
        self.staged: list[StagedProduce] = []
        """The requests that wait for the end of the turn."""
        self.full: dict[Peer, None] = {}
        """Connections with answers to write."""
        self.leisurely: dict[Peer, None] = {}
        """Connections whose answers may wait for the next tick."""
        self.is_scheduled = False
        self._wants_turn = False
        self._is_receiving = False
        """Whether frames of a connection are being handled: the turn that they need is decided on
        behind them.
        """
        self.is_turning = False
        """Whether a turn is running: it does itself what is scheduled meanwhile."""
        self.count = 0
        """How many turns have begun."""
        self._sole_sender: object = None
        """The connection that alone brought what the last turn handled."""

    def schedule(self) -> None:
        """Schedule a turn for the end of this round of the event loop."""
        if not (self.is_scheduled or self._is_receiving or self.is_turning):
            self.is_scheduled = True
            self._broker.loop.call_soon(self._broker.turn)
        self._wants_turn = True

    def begin_frames(self) -> None:
        """The frames of one read are about to be handled; `end_frames` follows."""
        self._is_receiving, self._wants_turn = True, False

    def end_frames(self, sender: object) -> None:
        """The frames of one read are handled. If only this connection sent frames recently, the
        turn runs now; otherwise it waits for the other connections of this round.
        """
        self._is_receiving = False
        if not self._wants_turn:
            return
        if self.is_scheduled:
            self._sole_sender = None
        elif self._sole_sender is sender:
            self._broker.turn()
        else:
            self._sole_sender = sender
            self.schedule()

    def register_outbox(self, peer: Peer) -> None:
        """`peer` has answers to write at the end of the turn."""
        self.full[peer] = None
        if not self.is_turning:
            self.schedule()

    def flush_outboxes(self) -> None:
        """Write the answers of all connections."""
        full, self.full = self.full, {}
        for peer in full:
            peer.flush()

    def tick(self) -> bool:
        """Answers that could wait are due. Returns whether any answer is to be written."""
        self.full.update(self.leisurely)
        self.leisurely.clear()
        return bool(self.full)

    # --- producing --------------------------------------------------------------------------------

    def refuse_staged(self, failure: QmqError) -> None:
        """Answer all requests with an error: none of them is written."""
        staged, self.staged = self.staged, []
        for each in staged:
            self._broker.answer_error(each.peer, each.request_id, failure)

    def append_staged(self) -> None:
        """Write the staged batches, in writes of a size that a slave takes in one frame."""
        everything, self.staged = self.staged, []
        writes: Iterable[list[StagedProduce]] = (
            (everything,) if len(everything) == 1 else _writes_of(everything)
        )
        for staged in writes:
            batches = (
                staged[0].batches
                if len(staged) == 1
                else [batch for each in staged for batch in each.batches]
            )
            needs_admission = _needs_admission(batches)
            admit = (
                self._admission(needs_admission)
                if needs_admission or self._admit_first is not None
                else None
            )
            if admit is not None:
                staged = self._admitted(staged, admit)
                batches = [batch for each in staged for batch in each.batches]
                if not staged:
                    continue
            broker = self._broker
            store = broker.store
            try:
                results = store.append(batches, are_new=not needs_admission)
            except DiskFull as failure:
                for each in staged:
                    broker.answer_error(each.peer, each.request_id, failure)
                continue
            at, index, awaits_flush = 0, store.index, False
            answers: list[tuple[Peer, bytes]] = []
            for each in staged:
                produced = results[at : at + len(each.batches)]
                at += len(each.batches)
                answer = frames.frame(
                    FrameKind.PRODUCED, each.request_id, wire.pack_produced(produced)
                )
                if (each.is_fast or store.commits_at_once) and not each.awaits_flush:
                    answers.append((each.peer, answer))
                else:
                    awaits_flush = awaits_flush or each.awaits_flush
                    responses = broker.responses
                    waiting = responses.for_flush if each.awaits_flush else responses.for_commit
                    waiting.append(PendingAnswer(index, each.peer, each.request_id, answer))
            if awaits_flush:
                store.flush_wanted = index
                broker.committer.flush_wanted(index)
            # Consumers first: they wait for the messages.
            broker.written(
                [batches[0].queue] if len(batches) == 1 else [batch.queue for batch in batches]
            )
            for peer, answer in answers:
                peer.send(answer)

    def _admission(self, needs_admission: bool) -> Admit | None:
        """The check for each request of one write, in their order; None: all may be appended."""
        store = self._broker.store
        admit = Admission(store, self._has_right).admit if needs_admission else None
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
            except (
                QmqError,
                OSError,
            ) as cause:  # a duplicate is compared with the stored batch: reading that may fail
                self._broker.answer_error(each.peer, each.request_id, refusal_of(cause))
                continue
            self._broker.loads.note(each.batches)
            admitted.append(each)
        return admitted

    def _has_right(self, queue: Queue) -> bool:
        return (
            self.may_write()
            or not self._broker.subjects.find_queue(
                queue.id.subject.encode(), queue.id.partition
            ).needs_right
        )


def _writes_of(staged: list[StagedProduce]) -> Iterator[list[StagedProduce]]:
    """The requests of each write."""
    begin, size = 0, 0
    for end, each in enumerate(staged):
        if size > WRITE_BYTES_MAX:
            yield staged[begin:end]
            begin, size = end, 0
        for batch in each.batches:
            size += len(batch.region)
    yield staged[begin:]


def _needs_admission(batches: list[Intake]) -> bool:
    """Whether `Admission` must check the batches of one write. New batches to unordered subjects
    need no check.
    """
    for batch in batches:
        if batch.queue.is_ordered or batch.queue.find_duplicate(batch.header) is not None:
            return True
    if len(batches) < 2:
        return False
    keys: set[Key] = {
        (id(each.queue), each.header.producer_id, each.header.batch_sequence) for each in batches
    }
    return len(keys) < len(batches)


class Alone:
    """The committer of a single node."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def written(self, index: int) -> None:
        """Does nothing: with `Flush.SYNC` an entry is committed when it is flushed."""

    def stored(self, index: int) -> None:
        """A flushed entry is committed in any case."""
        self._broker.commit(index)
        self._broker.flushed(index)

    def flush_wanted(self, index: int) -> None:
        """Does nothing on a single node."""


log = logging.getLogger("qmq.broker")


MakeParts = Callable[["Broker"], BrokerParts]


class Broker:
    """One broker on one store, in one event loop. `qmq/node/broker_assembly.py` lists the parts of
    a running one.
    """

    def __init__(
        self,
        store: Store,
        look_up: LookUpSubject,
        clock: Clock,
        config: BrokerConfig,
        loop: asyncio.AbstractEventLoop,
        *,
        make_parts: MakeParts | None = None,
        is_serving: bool = True,
    ) -> None:
        """`make_parts` gets the broker, since most parts need it. It may keep a reference and read
        store, configuration, clock and loop, but must not call methods. Without `make_parts` the
        broker belongs to no group, and nothing is flushed.
        """
        self.store = store
        self.config = config
        self.clock = clock
        self.loop = loop
        parts = make_parts(self) if make_parts is not None else BrokerParts(Alone(self))
        self.committer = parts.committer
        self.fatal = parts.fatal
        self.report_damage = parts.report_damage
        self.accept_replica = parts.accept_replica
        self.routing = parts.routing
        self.rules = parts.rules
        self.access = parts.access
        self.has_consumers = parts.kind.has_consumers
        self._begin_work, self._end_work = parts.kind.begin_work, parts.kind.end_work
        self._find_destination = (
            parts.kind.find_destination or QueueDestinations(parts.routing).find
        )
        self._on_turn_end = parts.on_turn_end
        self.is_stopping = False
        self.is_serving = is_serving
        self.is_paused = False
        """The mastership is being handed over: no new request is begun."""
        self.is_read_only = False
        """Drained by an operator: no new messages."""
        self.master_address = ""
        """The master's address, if it is known and is not this broker's."""
        self.turns = BrokerTurn(self, admit_first=parts.kind.admission, may_write=parts.may_write)
        self.schedule = self.turns.schedule
        self.responses = PendingResponses()
        self.counters = BrokerCounters()
        if is_serving:
            self.counters.begin(store)
        self.look_up = look_up
        """Finds the settings of a subject; None if it is not known here."""
        self._flushed_index = 0
        """Committed, and flushed on a majority, up to this index."""
        self._is_action_log_full = False
        self._is_untold = False
        """Whether something was written that the committer does not know yet."""
        self.use_store(store)
        if is_serving:
            self._begin_work(store, self)

    # --- serving ----------------------------------------------------------------------------------

    def use_store(self, store: Store) -> None:
        """Use this store, and create the parts that serve from it again. Call it while the broker
        does not serve, and close the previous store afterwards.
        """
        self.store = store
        self.subjects = BrokerSubjects(
            store, self.look_up, self._find_destination, has_consumers=self.has_consumers
        )
        self.loads = LoadMeters(self.clock)
        """The loads of the partitions of ordered subjects."""
        self.dispatch = Dispatch(self)
        self.lanes = Lanes(self)
        self.fetching = Fetching(self)

    def serve(self, store: Store) -> None:
        """Begin to serve from this store, in which everything is committed."""
        self.counters.begin(store)
        self.use_store(store)
        self._flushed_index = 0
        self.is_serving, self.is_paused = True, False
        self._begin_work(store, self)

    def cluster_changed(
        self,
        *,
        is_read_only: bool,
        master_address: str | None = None,
        subjects: Collection[str] | None = None,
    ) -> None:
        """The coordination store changed: the settings of `subjects`, if they are given, and
        anything else. `master_address` None: the change says nothing about a master.
        """
        self.subjects.forget(subjects)
        self.is_read_only = is_read_only
        if master_address is not None:
            self.master_address = master_address

    def begin_stop(self) -> None:
        """Refuse further messages: the process is about to end."""
        self.is_stopping = True
        self.schedule()

    def pause(self) -> None:
        """Begin no new request; requests that were begun are finished."""
        self.is_paused = True
        self.turn()

    def resume(self) -> None:
        self.is_paused = False
        self.serve_waiting()

    def serve_waiting(self) -> None:
        """Serve waiting requests that can be served now."""
        if self.is_serving:
            self.dispatch.to_wake.update({id(state): state for state in self.dispatch.groups})
            self.lanes.wake_all()
            self.schedule()

    def retire(self) -> None:
        """Stop serving. Waiting requests fail: not stored if they were not written, else with
        unknown outcome.
        """
        if not self.is_serving:
            return
        self._end_work()
        self.is_serving = False
        self.counters.end(self.store)
        self.turns.refuse_staged(NotMaster(self._not_master()))
        for held in self.responses.abandon(self._unknown_here):
            self.answer_error(held.peer, held.request_id, self._unknown_here())
        self.dispatch.stop(NotMaster(self._not_master()))
        self.lanes.stop(NotMaster(self._not_master()))
        self.subjects.forget()

    def _not_master(self) -> str:
        where = (
            f"the master is at {self.master_address}"
            if self.master_address
            else "no other master is known yet, so try again"
        )
        return f"{self.config.name} is not its group's master; {where}"

    def _unknown_here(self) -> NotMaster:
        """The error for requests that may have been stored: this replica will not know."""
        return NotMaster(self._not_master(), outcome=Outcome.UNKNOWN)

    def require_serving(self) -> None:
        """Raises NotMaster."""
        if not self.is_serving or self.is_paused:
            raise NotMaster(self._not_master())

    def require_consumption(self) -> None:
        """Raises NotMaster; InvalidArgument on a broker that has no consumers."""
        if not self.has_consumers:
            raise InvalidArgument(
                "a delay group serves no consumers: attach to the subject's broker group"
            )
        self.require_serving()

    def require_action_room(self) -> None:
        """Raises DiskFull if too many actions of consumers wait for disk space."""
        if self.store.unwritten.encoded_bytes > UNWRITTEN_BYTES_MAX:
            raise DiskFull(
                f"{UNWRITTEN_BYTES_MAX} bytes of acknowledgements wait for room on the "
                "broker's disk: free some space, or shorten retention"
            )

    # --- producing --------------------------------------------------------------------------------

    def produce(
        self,
        peer: Peer,
        request_id: int,
        payload: memoryview,
        *,
        is_fast: bool = False,
        awaits_flush: bool = False,
        find_queue: FindQueue | None = None,
        admit: Admit | None = None,
    ) -> list[Intake]:
        """Check the batches of a PRODUCE, stage them and return them. Raises as `read_batches` and
        `admit`, and Stopping, NotMaster, ReadOnly.

        `find_queue` is the broker's own, or one that accepts fewer subjects.
        """
        self.require_serving()
        if self.is_stopping:
            raise Stopping("the broker is shutting down: send again to the new master")
        batches = read_batches(payload, find_queue or self.subjects.find_queue)
        if admit is not None:
            admit(batches)
        if self.is_read_only and not all(map(may_pass_drain, batches)):
            raise ReadOnly(
                f"the broker group of {self.config.name} is drained: send to another one, or "
                "resume it"
            )
        for batch in batches:
            awaits_flush = awaits_flush or batch.awaits_flush
        self.turns.staged.append(StagedProduce(peer, request_id, batches, is_fast, awaits_flush))
        self.schedule()
        return batches

    # --- the broker's own messages ----------------------------------------------------------------

    def append_own(self, batches: list[Intake]) -> list[Produced]:
        """Store batches that the broker itself makes; stored ones are recognised by their numbers.
        Await `committed` before answering, here and below. Raises DiskFull.
        """
        produced = self.store.append(batches)
        self._written_here([batch.queue for batch in batches])
        return produced

    def seal(self, queue: Queue, change_id: str, to_version: int) -> int:
        """Close a partition, once, and return the sequence of its command message. Raises
        RouteConflict if another change closed it, DiskFull.
        """
        sealed = queue.sealed
        if sealed is None:
            self.store.append_command(queue, change_id, to_version)
            log.info(
                "%s is sealed at %d by change %s", queue.id, queue.next_sequence - 1, change_id
            )
            self._written_here([queue])
            sealed = queue.sealed
        assert sealed is not None
        if sealed.change_id != change_id:
            raise RouteConflict(
                f"{queue.id} is already closed by change {sealed.change_id}, which leads to "
                f"version {sealed.to_version}"
            )
        return sealed.sequence

    def purge(self, queue: Queue) -> None:
        """Forget the messages of a queue. Raises DiskFull."""
        purge(self.store, queue)
        self._written_here([])

    def _written_here(self, queues: list[Queue]) -> None:
        """The broker itself wrote messages, outside of a turn."""
        self.written(queues)
        self.schedule()

    # --- the turn ---------------------------------------------------------------------------------

    def turn(self) -> None:
        """Write what was staged and done, wake consumers, send answers. Any failure that a client
        did not cause is fatal.
        """
        turns = self.turns
        turns.is_scheduled, turns.is_turning = False, True
        turns.count += 1
        must_write = bool(turns.staged) or self.is_stopping or self.is_paused
        try:
            if turns.staged:
                turns.append_staged()
            if self.dispatch.to_wake and self.is_serving:
                self.dispatch.wake_due()
            turns.flush_outboxes()
            unwritten = self.store.unwritten
            if unwritten.waits and (must_write or unwritten.is_due) and self.is_serving:
                self._write_actions()
                turns.flush_outboxes()
            if self._is_untold:
                self._tell_committer()
                turns.flush_outboxes()
            self._on_turn_end()
        except Exception as cause:
            self.fatal(cause)
        finally:
            turns.is_turning = False
        is_unwritten = self.store.unwritten.is_due and not self._is_action_log_full
        # what came up after its step of this turn needs another turn
        if (
            turns.staged
            or turns.full
            or (self.is_serving and (self.dispatch.to_wake or is_unwritten))
        ):
            self.schedule()

    def stored(self, index: int) -> None:
        """Everything up to `index` survives a power cut here: tell the committer, and answer."""
        turns = self.turns
        turns.is_turning = True  # the turn that follows does what this schedules
        try:
            self.committer.stored(index)
        finally:
            turns.is_turning = False
        self.turn()

    def act(self, action: ScheduleAction | StepAction) -> None:
        """Write the action with the next turn, after earlier ones. The actions of one turn are one
        entry: all or none. Raises NotMaster.
        """
        if not self.is_serving:
            raise NotMaster(self._not_master())
        self.store.act(action)
        self.schedule()

    async def committed(self, *, only_written: bool = False) -> None:
        """Returns when everything done so far, or written so far, is committed. Raises NotMaster if
        this replica will not learn that.
        """
        waiter: asyncio.Future[None] = self.loop.create_future()
        if self.store.unwritten.waits and not only_written:
            self.responses.wait(waiter, None)
            self.store.unwritten.hurry()
            self.schedule()
        else:
            self.responses.wait(waiter, self.store.index)
            self.responses.release(self.store.committed_index, self._flushed_index)
        await waiter

    @asynccontextmanager
    async def committed_read(self) -> AsyncIterator[None]:
        """A read whose result is given to others. When the block ends, with a result or a refusal,
        what it read is committed, so that no later master denies it. Raises NotMaster if the
        mastership was lost meanwhile: what was read may be undone.

        While a full disk keeps acknowledgements in memory, the block waits only for what is
        written.
        """
        store = self.store
        try:
            yield
        except CallerError:
            await self._until_committed(store)
            raise
        await self._until_committed(store)

    async def _until_committed(self, store: Store) -> None:
        if self.store is store:
            await self.committed(only_written=self._is_action_log_full)
        if self.store is not store:
            raise NotMaster(self._not_master())

    def _wake_queues(self, queues: list[Queue]) -> None:
        found = dict.fromkeys(queues) if len(queues) > 1 else queues
        if self.dispatch.groups.by_queue:
            self.dispatch.wake_queues(found)
        if self.lanes.by_queue:
            self.lanes.wake_queues(found)

    def _write_actions(self) -> None:
        try:
            self.store.write_actions()
        except DiskFull as failure:
            if not self._is_action_log_full:  # each turn tries again
                log.warning(
                    (
                        "writing the action log failed, acknowledgements stay in memory until "
                        "there is room: %s"
                    ),
                    failure,
                )
            self._is_action_log_full = True
            return
        self._actions_written()

    def _actions_written(self) -> None:
        self._is_action_log_full = False
        self.responses.written(self.store.index)
        if self.dispatch.dead_letters.fresh:
            self.dispatch.dead_letters.written(self.store.index)
        self.written([])

    def begin_checkpoint(self) -> CheckpointPlan | None:
        """Capture all derived state. A frame may have changed it since the last turn: that is
        written to the log first.

        None if it cannot be written because this replica is no longer master: the store is about to
        be reopened. Raises DiskFull.
        """
        must_write = self.store.unwritten.waits
        if must_write and not self.is_serving:
            return None
        plan = begin_checkpoint(self.store)
        if must_write:  # behind the capture, since consumers that this wakes are handed messages
            self._actions_written()
        return plan

    def written(self, queues: list[Queue]) -> None:
        """Messages to these queues, or actions, are in the log: tell the committer, at the end of
        the turn if others must have the entries before they are committed.
        """
        if self.store.commits_at_once:  # a node alone, whose committer would say the same
            if queues:
                self._wake_queues(queues)
            self.commit(self.store.index)
            return
        self._is_untold = True
        if not self.turns.is_turning:
            self._tell_committer()

    def _tell_committer(self) -> None:
        """If everything is committed already (a batch was sent twice), answers are released all the
        same.
        """
        self._is_untold = False
        store = self.store
        index = store.index
        is_committed = index <= store.committed_index
        if not is_committed:
            self.counters.wrote(index)
        self.committer.written(index)
        if is_committed:
            self.responses.release(store.committed_index, self._flushed_index)

    def commit(self, index: int) -> None:
        """Everything up to `index` is committed: consumers may see it, answers are sent."""
        grown = self.store.commit(index)
        if self.counters.uncommitted:
            self.counters.committed(index)
        if self.is_serving:
            if grown:
                self._wake_queues(grown)
            self.responses.release(self.store.committed_index, self._flushed_index)

    def flushed(self, index: int) -> None:
        """Everything up to `index` is committed and flushed on a majority: it survives a power cut
        of all replicas.
        """
        self._flushed_index = max(self._flushed_index, index)
        if self.is_serving:
            self.responses.release(self.store.committed_index, self._flushed_index)

    def answer_error(self, peer: Peer, request_id: int, failure: QmqError) -> None:
        """Answer a request with an error."""
        self.counters.refuse(failure)
        peer.send(frames.frame(FrameKind.ERROR, request_id, wire.pack_error(failure)))
        self.schedule()

    # --- time -------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Check leases, long polls, and answers that could wait."""
        if self.is_serving:
            self.dispatch.tick()
            self.lanes.tick()
        unwritten = self.store.unwritten
        unwritten.hurry()
        if self.turns.tick() or (
            self.is_serving and (self.responses.has_unwritten or unwritten.waits)
        ):
            self.schedule()

    def disconnected(self, peer: Peer) -> None:
        """The connection is closed."""
        self.dispatch.disconnected(peer)
        self.lanes.disconnected(peer)

    def writable(self, peer: Peer) -> None:
        """The connection can take answers again."""
        if self.is_serving:
            self.dispatch.writable(peer)
            self.lanes.writable(peer)
        self.schedule()
