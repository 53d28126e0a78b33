"""Bugs of answers, elections and replicas: what is answered before a majority has it, what one
replica alone knows, and what a new master throws away.
"""

from __future__ import annotations

from typing import Any

from qmq_replication.core import Replica
from qmq_replication.leader import Leader

from campaign.bugs.storing import replacing
from campaign.values import Bug
from qmq.broker import broker
from qmq.broker.broker import Broker, StagedProduce
from qmq.broker.dispatch.sessions import PendingResponses
from qmq.log import checkpoint
from qmq.log.queue import Queue
from qmq.log.store import Store

_lead = Replica.lead
_written = Broker.written
_actions_written = PendingResponses.written
_stored = Store._stored
_begin_checkpoint = checkpoint.begin_checkpoint


def _lead_from_the_commit(self: Replica) -> None:
    """What this replica does not know to be committed, the last master may have answered."""
    if self.state.commit < self.state.history.last_index:
        self.truncate(self.state.commit)
    _lead(self)


def _answer_what_is_written(self: Broker, queues: list[Queue]) -> None:
    waiting = self.responses.for_commit
    while waiting:
        held = waiting.popleft()
        held.peer.send(held.answer)
    _written(self, queues)


def _answer_settlements(self: PendingResponses, index: int) -> None:
    for held in self.unwritten:
        held.peer.send(held.answer)
    self.unwritten = []
    _actions_written(self, index)


def _show_at_once(self: Store, entries: Any, buffers: list[bytes], first: int) -> None:
    _stored(self, entries, buffers, first)
    for queue, *_ in entries:
        queue.visible_sequence = queue.next_sequence


def _add_without_number(self: Queue, entry: Any) -> None:
    """The master does not come here when it takes a batch: `note` counts it."""
    self.index.append(entry)
    self.next_sequence = entry.base_sequence + entry.count
    self.cumulative_bytes = entry.cumulative_bytes + entry.total_bytes
    self.last_append_ms = entry.append_time_ms


def _stage_for_commit(
    peer: Any, request_id: int, batches: Any, is_fast: bool, awaits_flush: bool
) -> StagedProduce:
    return StagedProduce(peer, request_id, batches, is_fast, False)


def _without_the_last_queue(store: Store) -> Any:
    plan = _begin_checkpoint(store)
    if plan.queues:
        plan.queues.pop()
    return plan


BUGS = (
    Bug(
        name="cut-at-election",
        what="a new master cuts what it does not know to be committed",
        plant=replacing((Replica, "lead", _lead_from_the_commit)),
        found_by="watched-kill-all",
        finds=("commit_stays", "no_loss", "stable_positions", "stored_once"),
    ),
    Bug(
        name="answer-written",
        what="producers are answered when the master alone has the batch",
        plant=replacing((Broker, "written", _answer_what_is_written)),
        found_by="log-partition-master",
        finds=("no_loss", "stable_positions", "read_in_order"),
    ),
    Bug(
        name="settle-uncommitted",
        what="acknowledgements of consumers are answered before they are committed",
        plant=replacing((PendingResponses, "written", _answer_settlements)),
        found_by="queue-partition-master",
        finds=("acked_stays_done",),
    ),
    Bug(
        name="show-uncommitted",
        what="consumers get messages that no majority has",
        plant=replacing((Store, "_stored", _show_at_once)),
        found_by="log-partition-master",
        finds=("stable_positions", "stored_once", "read_in_order", "no_phantom"),
    ),
    Bug(
        name="followers-forget-numbers",
        what="only the master that took a batch remembers its producer's number",
        plant=replacing((Queue, "add", _add_without_number)),
        found_by="log-partition-oneway-back",
        finds=("stored_once",),
    ),
    Bug(
        name="flush-not-awaited",
        what="acks=flushed is answered like acks=quorum",
        plant=replacing((broker, "StagedProduce", _stage_for_commit)),
        found_by="log-power-all-flushed",
        finds=("no_loss", "stable_positions"),
    ),
    Bug(
        name="checkpoint-without-a-queue",
        what="a checkpoint leaves out the last queue",
        plant=replacing(
            (checkpoint, "begin_checkpoint", _without_the_last_queue),
            (broker, "begin_checkpoint", _without_the_last_queue),
        ),
        found_by="log-restart-all",
        finds=("no_loss", "stable_positions", "stored_once", "read_in_order"),
    ),
    Bug(
        name="never-step-down",
        what="a master that hears no majority continues to serve",
        plant=replacing((Leader, "has_quorum", lambda self: True)),
        found_by="watched-partition-from-etcd-and-partition-master",
        finds=("one_master",),
    ),
)
