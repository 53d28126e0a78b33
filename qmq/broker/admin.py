"""Administration of one broker: what is stored and consumed, where a message is, moving and
deleting groups; its status in its broker group, and operators' changes of that. A node without
replicas is a group of one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Final, Protocol, TypeVar

from qmq.broker.broker import Broker
from qmq.broker.dispatch.sessions import QueueGroup
from qmq.broker.reading.fetches import before_mark
from qmq.broker.reading.history import FoundMessage, MessageHistory, MessageSearch
from qmq.broker.reading.readers import ReportedReader
from qmq.errors import (
    CorruptBatch,
    InvalidArgument,
    MessageNotFound,
    NotMaster,
    Overloaded,
    UnknownGroup,
    UnknownSubject,
)
from qmq.limits import MIB
from qmq.log.actions import LaneReset
from qmq.log.envelopes import damaged, walk
from qmq.log.queue import Queue
from qmq.log.reading import ColdRead
from qmq.log.recent_writes import ACTIONS, MESSAGES
from qmq.log.retention import drop
from qmq.log.store import Store
from qmq.model import GroupSettings, MessageId, check_group, check_name, is_dead_letters
from qmq.proto.v1 import control_pb2 as pb

log = logging.getLogger("qmq.broker")

_T = TypeVar("_T")

LOOKS_AT_ONCE: Final = 20
"""Queues, or groups of queues, handled before other tasks get a turn."""
READ_BYTES_MAX: Final = 4 * MIB
"""Bytes that one read of a log returns."""
DAMAGED_NAMES_MAX: Final = 5
NEAR_LOSS: Final = 10
"""A reader is near a loss if less than one of so many parts of what retention keeps is left."""


Target = pb.ResetGroupRequest | pb.LanePlace
"""A request whose `target` is the new start of a group."""


class BrokerAdmin:
    """Administration of one broker of a broker group."""

    def __init__(self, broker: Broker, broker_group: str) -> None:
        self._broker = broker
        self._group = broker_group
        self.finding = MessageSearch(broker)
        self.trails = MessageHistory(broker, broker_group)

    def committed_read(self) -> AbstractAsyncContextManager[None]:
        """See `Broker.committed_read`."""
        return self._broker.committed_read()

    @property
    def retries(self) -> GroupSettings:
        """The default retry settings of groups."""
        return self._broker.config.retries

    @property
    def _store(self) -> Store:
        """The broker's current store. Raises NotMaster if this replica is not
        the group's master.
        """
        self._broker.require_serving()
        return self._broker.store

    async def queues(self, subject: str) -> list[pb.Queue]:
        """The queues of a subject, or of all if it is empty."""
        return [
            self._describe_queue(queue) async for queue in self._unhurried(self._queues(subject))
        ]

    def storage(self) -> pb.StorageStatus:
        """This replica's disk, and what is not flushed. Every replica answers."""
        store = self._broker.store
        return pb.StorageStatus(
            disk_free_bytes=store.disk.free_bytes(store.folder),
            disk_reserved_bytes=store.config.disk_free_bytes_min,
            log_bytes=sum(each.end - each.start for each in store.logs),
            unflushed_bytes=sum(each.end - each.flushed for each in store.logs),
            unflushed_age_ms=0
            if store.is_flushed
            else store.unflushed.age_ms(store.clock.monotonic_ms()),
            damaged_objects=store.messages.damaged_objects()[:DAMAGED_NAMES_MAX],
        )

    def _describe_queue(self, queue: Queue) -> pb.Queue:
        return pb.Queue(
            subject=queue.id.subject,
            partition=queue.id.partition,
            broker_group=self._group,
            start_sequence=queue.start_sequence,
            next_sequence=queue.next_sequence,
            stored_bytes=stored_bytes(queue),
            last_append_ms=queue.last_append_ms,
            oldest_age_ms=lag_ms(queue, queue.start_sequence, self._broker.clock.time_ms()),
        )

    async def _unhurried(self, each: Iterable[_T]) -> AsyncIterator[_T]:
        """Let other tasks run from time to time, since each item may read a file. Raises NotMaster
        if the mastership was lost meanwhile.
        """
        store = self._store
        for count, one in enumerate(each, 1):
            yield one
            if count % LOOKS_AT_ONCE == 0:
                await asyncio.sleep(0)
                if self._store is not store:
                    raise NotMaster(
                        "this broker lost the mastership during the search: ask the new master"
                    )

    def _queues(self, subject: str) -> list[Queue]:
        found = [
            queue for queue in self._store.queues.values() if subject in ("", queue.id.subject)
        ]
        return sorted(found, key=lambda queue: queue.id)

    async def groups(self, subject: str, group: str) -> list[pb.Group]:
        """The progress of groups on a subject's queues. Raises UnknownGroup if a named group never
        consumed a named subject.
        """
        clients = self._broker.dispatch.groups.clients()
        found = [
            self._describe_group(state, clients)
            async for state in self._unhurried(self._states(subject, group))
        ]
        if not found and subject and group:
            raise UnknownGroup(f"group {group!r} has never consumed subject {subject!r}")
        return sorted(found, key=lambda each: (each.subject, each.partition, each.group))

    def _states(self, subject: str, group: str) -> list[QueueGroup]:
        return [
            state
            for state in self._broker.dispatch.groups
            if subject in ("", state.queue.id.subject) and group in ("", state.name)
        ]

    def _describe_group(self, state: QueueGroup, clients: dict[tuple[int, str], str]) -> pb.Group:
        queue, share = state.queue, state.share
        done, now_ms = share.settled_before(), self._broker.clock.time_ms()
        return pb.Group(
            subject=queue.id.subject,
            partition=queue.id.partition,
            broker_group=self._group,
            group=state.name,
            next_sequence=share.next_sequence,
            settled_before=done,
            waiting=max(queue.visible_sequence - max(share.next_sequence, queue.start_sequence), 0),
            unacked=share.unacked(),
            requeued=share.waiting_again(),
            lag_ms=lag_ms(queue, done, now_ms),
            expired=share.expired,
            consumers=[
                self._describe_consumer(state, name, clients.get((id(state), name), ""))
                for name in share.holders
            ],
            is_paused=self._broker.rules.is_paused(queue.id.subject, state.name, "", ""),
            dying=share.dying_messages(),
            filtered=state.filtered,
        )

    async def readers(self, subject: str) -> list[pb.Reader]:
        """The readers without a group of a subject, or of all if it is empty, by their reports."""
        found = [
            describe_reader(self._broker, self._group, *each)
            async for each in self._unhurried(reported_readers(self._broker))
            if subject in ("", each[0].id.subject)
        ]
        return sorted(found, key=lambda each: (each.subject, each.partition, each.reader))

    def _describe_consumer(self, state: QueueGroup, name: str, client: str) -> pb.Consumer:
        holder, now_ms = state.share.holders[name], self._broker.clock.monotonic_ms()
        return pb.Consumer(
            name=name,
            unacked=holder.unacked,
            seen_ms_ago=now_ms - state.seen_ms.get(name, now_ms),
            lease_ms=holder.lease_ms,
            client=client,
            is_paused=self._broker.rules.is_paused(
                state.queue.id.subject, state.name, name, client
            ),
        )

    async def reset(self, subject: str, group: str, target: Target) -> list[pb.Moved]:
        """Move a group on all the subject's queues, and wait for the commit. Raises UnknownSubject,
        UnknownGroup, InvalidArgument.
        """
        self._broker.require_serving()
        self._broker.subjects.settings(check_name("subject", subject))
        states = self._states(subject, check_group(group))
        if not states:
            raise UnknownGroup(
                f"group {group!r} has never consumed subject {subject!r}: there is nothing to move"
            )
        moved = []
        for state in states:
            sequence = resolve(state.queue, target)
            moved.append(self._moved(state.queue, state.share.next_sequence, sequence))
            self._broker.dispatch.reset(state, sequence)
        await self._broker.committed()
        return moved

    def _moved(self, queue: Queue, begin: int, end: int) -> pb.Moved:
        return pb.Moved(
            partition=queue.id.partition,
            broker_group=self._group,
            from_sequence=begin,
            to_sequence=end,
        )

    async def delete_group(self, subject: str, group: str) -> int:
        """Delete a group on all the subject's queues, or on none. Returns the number of queues it
        was on. Raises UnknownGroup, InvalidArgument, Overloaded.
        """
        self._broker.require_serving()
        states = self._states(check_name("subject", subject), check_group(group))
        if not states:
            raise UnknownGroup(
                f"group {group!r} has never consumed subject {subject!r}: there is nothing "
                "to delete"
            )
        consumers = sorted({name for state in states for name in state.share.holders})
        if consumers:
            raise InvalidArgument(
                f"group {group!r} has consumers on {subject!r}; stop them first: "
                f"{', '.join(consumers)}"
            )
        if any(state.share.dying for state in states):
            raise Overloaded(
                f"messages of group {group!r} are on their way to its dead-letter queue: try "
                "again soon"
            )
        for state in states:
            self._broker.dispatch.forget(state)
        self._broker.schedule()
        await self._broker.committed()
        return len(states)

    async def drop_subject(self, subject: str) -> int:
        """Delete everything stored for a deleted subject, or for a dead-letter queue. Returns the
        number of queues that had anything.

        Raises Overloaded if this broker does not know yet that the subject was deleted, so that
        more messages may come, or if a message is dying; DiskFull.
        """
        broker = self._broker
        broker.require_serving()
        check_name("subject", subject)
        if not is_dead_letters(subject) and broker.subjects.retention_settings(subject) is not None:
            raise Overloaded(
                f"{broker.config.name} does not know yet that subject {subject!r} was "
                "deleted: try again soon"
            )
        gone = UnknownSubject(f"subject {subject!r} was deleted")
        queues = [
            queue
            for queue in broker.store.queues.values()
            if queue.id.subject == subject and not queue.is_blank
        ]
        if any(state.share.dying for state in broker.dispatch.groups.of_queues(queues)):
            raise Overloaded(
                f"messages of {subject!r} are on their way to a dead-letter queue: try again soon"
            )
        if queues:
            broker.turn()  # write what is staged first
        for queue in queues:
            drop(broker.store, queue)
            broker.dispatch.drop_queue(queue, gone)
            broker.lanes.drop_queue(queue, gone)
            log.info("%s is dropped because its subject was deleted", queue.id)
            broker.schedule()
        await broker.committed()
        return len(queues)

    async def purge_subject(self, subject: str) -> tuple[int, int]:
        """Delete the messages of a subject, and move its groups behind them. Returns the numbers of
        queues and messages. Raises UnknownSubject; Overloaded if a message is dying; DiskFull.
        """
        broker = self._broker
        broker.require_serving()
        broker.subjects.settings(check_name("subject", subject))
        broker.turn()  # what was staged before is written before
        queues = [queue for queue in broker.store.queues.values() if queue.id.subject == subject]
        if any(state.share.dying for state in broker.dispatch.groups.of_queues(queues)):
            raise Overloaded(
                f"messages of {subject!r} are on their way to a dead-letter queue: try again soon"
            )
        found = [queue.next_sequence - queue.start_sequence for queue in queues]
        for queue, messages in zip(queues, found, strict=True):
            if messages:
                broker.purge(queue)
                log.info("%s is purged of %d messages", queue.id, messages)
            self._move_behind(queue)
        broker.schedule()
        await broker.committed()
        return sum(map(bool, found)), sum(found)

    def _move_behind(self, queue: Queue) -> None:
        """Move groups behind a purge. Their held messages and parked keys become void."""
        broker, start = self._broker, queue.start_sequence
        for state in list(broker.dispatch.groups.of_queue(queue)):
            if state.share.settled_before() < start:
                broker.dispatch.reset(state, start)
        for group, share in queue.lanes.items():
            if share.parked or any(each.done_before < start for each in share.progress):
                end = min(start, queue.sealed.sequence) if queue.sealed is not None else start
                ranges = [each.lps for each in share.progress]
                whole = min(each.first for each in ranges), max(each.end for each in ranges)
                tokens = [each.token for each in share.holders]
                broker.store.act(
                    LaneReset(queue.id.subject, queue.id.partition, group, "", *whole, end)
                )
                for token in tokens:
                    broker.lanes.forget(queue, group, token)

    async def find_time(self, subject: str, time_ms: int) -> list[pb.Moved]:
        """In each queue, the first message stored at or after a time. Raises UnknownSubject."""
        self._broker.subjects.settings(check_name("subject", subject))
        found = [
            (queue, at_time(queue, time_ms))
            async for queue in self._unhurried(self._queues(subject))
        ]
        return [self._moved(queue, sequence, sequence) for queue, sequence in found]

    async def find_message(self, subject: str, message_id: MessageId) -> FoundMessage:
        """Find a message by its id, through its producer's batch. Raises UnknownSubject,
        MessageNotFound, NotMaster, LogDamaged.
        """
        self._broker.subjects.settings(check_name("subject", subject))
        store = self._store
        for queue in self._queues(subject):
            async with aclosing(self.finding.of_producer(store, queue, message_id)) as places:
                async for found in places:
                    return found
        raise MessageNotFound(
            f"no kept message of {subject!r} has the id {message_id}: it was never stored, "
            "or retention deleted it"
        )

    def read_committed(self, log: int, position: int, bytes_max: int) -> tuple[int, bytes]:
        """Committed entries of a log from a position on, or from its beginning: (position, bytes as
        in the file).

        Returns at least one entry if there is one, and at most some MiB. Raises NotMaster,
        InvalidArgument, LogDamaged, ColdRead.
        """
        store = self._store
        if log not in (MESSAGES, ACTIONS):
            raise InvalidArgument(
                f"there is no log {log}: {MESSAGES} is the message log, {ACTIONS} the action log"
            )
        segments = store.logs[log]
        begin = max(position, segments.start)
        found: list[bytes] = []
        size = 0
        try:
            for entry in walk(segments, begin):
                if entry.envelope.index > store.committed_index or size >= min(
                    bytes_max, READ_BYTES_MAX
                ):
                    break
                found += (entry.head, entry.region)
                size += entry.envelope.total_bytes
        except ColdRead:
            if not found:
                raise
        except CorruptBatch as cause:
            if not found:
                raise damaged(segments, begin, cause, log) from cause
        return begin, b"".join(found)


def messages_end(queue: Queue) -> int:
    """The end of what consumers see of a queue, without its command message."""
    return (
        queue.visible_sequence
        if queue.sealed is None
        else min(queue.visible_sequence, queue.sealed.sequence)
    )


def lag_ms(queue: Queue, done_before: int, now_ms: int) -> int:
    """The age of the oldest message that is not done; 0 if all are done.
    Command messages do not count.
    """
    if (
        max(done_before, queue.start_sequence) >= messages_end(queue)
        or queue.index.count == queue.index.first
    ):
        return 0
    entry = queue.index.entry(queue.index.find_sequence(max(done_before, queue.start_sequence)))
    return max(now_ms - entry.append_time_ms, 0)


def reported_readers(broker: Broker) -> list[tuple[Queue, ReportedReader]]:
    """The readers of queues that hold something."""
    found = [
        (broker.store.queue(queue.subject, queue.partition), reader)
        for queue, reader in broker.fetching.readers.kept()
    ]
    return [(queue, reader) for queue, reader in found if queue is not None and not queue.is_blank]


def describe_reader(
    broker: Broker, broker_group: str, queue: Queue, reader: ReportedReader
) -> pb.Reader:
    """How a reader stands on a queue. Raises LogDamaged."""
    now_ms, start, end = broker.clock.monotonic_ms(), queue.start_sequence, messages_end(queue)
    oldest_ms = lag_ms(queue, reader.done, broker.clock.time_ms())
    waiting = max(end - max(reader.done, start), 0)
    missed = max(before_mark(queue, start) - reader.done, 0) if reader.done < start else 0
    kept_ms, is_size_limited = _retention_of(broker, queue)
    kept_read = min(max(reader.done - start, 0), max(end - start, 0))
    is_near = waiting > 0 and (
        oldest_ms * NEAR_LOSS > kept_ms * (NEAR_LOSS - 1)
        or (is_size_limited and kept_read * NEAR_LOSS < end - start)
    )
    return pb.Reader(
        subject=queue.id.subject,
        partition=queue.id.partition,
        broker_group=broker_group,
        reader=reader.name,
        done_before=reader.done,
        waiting=waiting,
        lag_ms=oldest_ms,
        messages_per_s=reader.messages_per_s(now_ms),
        committed_ms_ago=now_ms - reader.moved_ms,
        seen_ms_ago=now_ms - reader.seen_ms,
        is_silent=reader.is_silent(now_ms),
        lost=reader.lost + missed,
        kept_read=kept_read,
        loss_in_ms=max(kept_ms - oldest_ms, 0) if waiting else None,
        is_near_loss=is_near or missed > 0,
    )


def _retention_of(broker: Broker, queue: Queue) -> tuple[int, bool]:
    """(how long messages of the queue are kept, whether a limit of size deletes messages now, or
    nearly so).
    """
    store = broker.store
    settings = broker.subjects.retention_settings(queue.id.subject)
    kept_ms = (settings.retention_ms if settings is not None else None) or store.config.retention_ms
    limits = (
        (stored_bytes(queue), settings.retention_bytes if settings is not None else None),
        (store.messages.end - store.messages.start, store.config.retention_bytes),
    )
    is_limited = any(
        most is not None and size * NEAR_LOSS > most * (NEAR_LOSS - 1) for size, most in limits
    )
    return kept_ms, is_limited


def stored_bytes(queue: Queue) -> int:
    """Bytes in the message log of a queue's messages."""
    if queue.index.count == queue.index.first or queue.start_sequence >= queue.next_sequence:
        return 0
    first = queue.index.entry(queue.index.find_sequence(queue.start_sequence))
    return queue.cumulative_bytes - first.cumulative_bytes


def at_time(queue: Queue, time_ms: int) -> int:
    """The first message stored at or after a time."""
    number = queue.index.find_time(time_ms)
    return (
        queue.visible_sequence
        if number >= queue.index.count
        else max(queue.index.entry(number).base_sequence, queue.start_sequence)
    )


def resolve(queue: Queue, target: Target) -> int:
    """The sequence of a target in a queue. Raises InvalidArgument if it is outside the queue, or if
    there is no target.
    """
    start, end = queue.start_sequence, queue.visible_sequence
    kind = target.WhichOneof("target")
    if kind is None:
        raise InvalidArgument(
            "name the group's new position: earliest, latest, a time or a sequence"
        )
    if kind in ("earliest", "latest"):
        return start if kind == "earliest" else end
    if kind == "time_ms":
        return at_time(queue, target.time_ms)
    assert isinstance(target, pb.ResetGroupRequest)
    if not start <= target.sequence <= end:
        raise InvalidArgument(
            f"sequence {target.sequence} is outside {queue.id}, which holds {start} to {end - 1}"
        )
    return target.sequence


class GroupStatus(Protocol):
    """The replica's interface for the control port."""

    def describe(self) -> pb.ReplicaStatus:
        """The replica's status; the control port adds the rest."""
        ...

    async def transfer(self, to: str) -> pb.TransferResponse:
        """Hand the mastership over. Raises NotMaster, InvalidArgument, Unavailable."""
        ...

    async def change(self, *, add: str = "", remove: str = "") -> pb.ChangeReplicasResponse:
        """Add a replica to the group, or remove one.
        Raises NotMaster, InvalidArgument, Unavailable.
        """
        ...

    def read_log(self, log: int, position: int, bytes_max: int) -> bytes:
        """Whole entries of a log from a position on, their checksums checked.
        Raises LogDamaged, InvalidArgument.
        """
        ...

    async def hold(self, token: str, hold_ms: int) -> None:
        """Begin no new request for a time. Raises NotMaster, InvalidArgument, Unavailable."""
        ...

    async def held_logs(self, token: str) -> pb.HeldLogs:
        """The ends of the logs; everything before them is committed. Raises Unavailable if the hold
        has ended.
        """
        ...

    def release(self, token: str) -> None:
        """End a hold. Raises Unavailable if the hold had ended before."""
        ...


class SingleGroupStatus:
    """The status of a node that has no replicas."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def describe(self) -> pb.ReplicaStatus:
        store, name = self._broker.store, self._broker.config.name
        return pb.ReplicaStatus(
            replica=name,
            role="master",
            epoch=store.epoch,
            master=name,
            last_index=store.index,
            stored_index=store.flushed_index,
            commit_index=store.committed_index,
            message_position=store.messages.end,
            action_position=store.actions.end,
            is_whole=True,
            membership_version=1,
            voters=[name],
            is_serving=True,
        )

    async def transfer(self, to: str) -> pb.TransferResponse:
        """Raises InvalidArgument."""
        raise InvalidArgument("a `qmq dev` node has no other replica to transfer the mastership to")

    async def change(self, *, add: str = "", remove: str = "") -> pb.ChangeReplicasResponse:
        """Raises InvalidArgument."""
        raise InvalidArgument(
            "a `qmq dev` node cannot have replicas: start a cluster with `qmq broker` "
            "(docs/DEPLOY.md)"
        )

    def read_log(self, log: int, position: int, bytes_max: int) -> bytes:
        """Raises InvalidArgument."""
        raise InvalidArgument("this node has no replicas to read its log")

    async def hold(self, token: str, hold_ms: int) -> None:
        """Raises InvalidArgument."""
        raise InvalidArgument(
            "a `qmq dev` node cannot be backed up while it runs: stop it, and copy its folder"
        )

    async def held_logs(self, token: str) -> pb.HeldLogs:
        """Raises InvalidArgument."""
        raise InvalidArgument(
            "a `qmq dev` node cannot hold writes: only replicas of a broker group can"
        )

    def release(self, token: str) -> None:
        """Raises InvalidArgument."""
        raise InvalidArgument(
            "a `qmq dev` node cannot hold writes: only replicas of a broker group can"
        )
