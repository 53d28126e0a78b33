"""A metaserver's calls to brokers and delay groups over their control ports: to one replica, to a
group's master, or to the masters of many groups at the same time (`Brokers`); and the calls of
route changes and rounds to partitions' masters (`PartitionMasters`), with short deadlines, so that
a silent group does not delay others.

Every call has a deadline, and names the replica that it means (qmq/rpc/server_name.py). The master
comes from the view, which may lag: after NotMaster, or if the replica is gone, the store is read
once, and the new master is called. Errors name the group that did not answer.

One delay group is asked for a message by its id, all for lists. Dead-letter queues are described
over all broker groups: a dead letter is stored where its message died.

`find_every` finds the places of one message on all groups that may have it, `trace_message` gets
its trail from the group that has it.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeVar

import grpc
from qmq_coordination.broker_groups import MasterRecord, ReplicaRecord, group_key
from qmq_coordination.view import ClusterView

from qmq.delay.admin import ListMark, listing, mark_of, new_due_ms
from qmq.errors import (
    CallerError,
    CoordinationError,
    DeadlineExceeded,
    InvalidArgument,
    MessageNotFound,
    NotConnected,
    NotMaster,
    Outcome,
    QmqError,
    Unavailable,
    UnknownGroup,
    UnknownSubject,
    WrongServer,
)
from qmq.model import (
    OPERATORS,
    DelayedId,
    MessageId,
    check_name,
    dead_letter_subject,
    is_dead_letters,
)
from qmq.process.event_loop import time_of
from qmq.proto.v1 import control_pb2 as control
from qmq.proto.v1 import control_pb2_grpc, delay_pb2_grpc
from qmq.proto.v1 import delay_pb2 as delay_pb
from qmq.proto.v1 import meta_pb2 as pb
from qmq.rpc.channel import typed_error
from qmq.rpc.network import NETWORK, Network
from qmq.rpc.request_changes import note_change
from qmq.rpc.server_name import ServerName

BROKER_S: Final = 2.5
AGAIN_S: Final = 2.0
READ_S: Final = 1.0
"""Timeout for a query, for calling the next master, and for reading the store. Together they are
below the five seconds that clients give a metaserver, so that clients learn which group is silent.
"""
CHANGE_S: Final = 30.0
"""Timeout for handing over a mastership, or changing a group's replicas."""
SEAL_S: Final = 1.0
LANES_S: Final = 1.0
PLACE_S: Final = 2.5
"""Timeouts of calls to the masters of partitions."""

_T = TypeVar("_T")


@dataclass(slots=True)
class BrokerAnswers:
    """The answers of the masters of several groups, by group."""

    found: dict[str, Any] = field(default_factory=dict)
    absent: dict[str, QmqError] = field(default_factory=dict)
    """Groups that answered that they do not have the requested thing."""
    missing: dict[str, Unavailable] = field(default_factory=dict)
    """Groups that did not answer."""

    def complete(self) -> list[Any]:
        """All answers. Raises NotConnected if a group did not answer, and a group's error if no
        group has the requested thing.
        """
        self.require_all(
            f"not on {', '.join(self.absent)}" if self.absent and not self.found else ""
        )
        if not self.found and self.absent:
            raise next(iter(self.absent.values()))
        return list(self.found.values())

    @property
    def silent(self) -> dict[str, str]:
        """The groups that did not answer, with the reasons; `partial` leaves them out."""
        return {group: failure.message for group, failure in self.missing.items()}

    def partial(self) -> list[Any]:
        """The answers of the groups that answered. Raises as `complete`, but only if no group has
        the requested thing.
        """
        return list(self.found.values()) if self.found else self.complete()

    def require_all(self, so_far: str) -> None:
        """Raise NotConnected with the groups that did not answer.
        `so_far` is the result without them.
        """
        if self.missing:
            whole = "; ".join(failure.message for failure in self.missing.values())
            failure = next(iter(self.missing.values()))
            raise NotConnected(f"{so_far}{'; ' if so_far else ''}{whole}", outcome=failure.outcome)


class _ReplicaStubs(NamedTuple):
    """The connection to a replica's control port."""

    address: str
    channel: grpc.aio.Channel
    control: Any
    delay: Any


class Brokers:
    """The brokers of a view, and the connections to them."""

    def __init__(self, view: ClusterView, network: Network = NETWORK) -> None:
        self._view = view
        self._network = network
        self._connections: dict[tuple[str, str], _ReplicaStubs] = {}
        """The connections by group and replica."""

    async def ask(
        self,
        group: str,
        place: MasterRecord | ReplicaRecord,
        method: str,
        request: Any,
        timeout_s: float = BROKER_S,
    ) -> Any:
        """Call the control port of a group's replica. Raises the replica's typed error,
        NotConnected, WrongServer, DeadlineExceeded.
        """
        stubs = await self._connection(group, place)
        call: Callable[..., Awaitable[Any]] = getattr(
            stubs.control if hasattr(stubs.control, method) else stubs.delay, method
        )
        try:
            return await call(request, timeout=timeout_s)
        except grpc.RpcError as cause:
            raise typed_error(cause, place.control_address) from cause

    async def _connection(self, group: str, place: MasterRecord | ReplicaRecord) -> _ReplicaStubs:
        """The connection to a replica, at its latest address."""
        known = self._connections.get((group, place.replica))
        if known is not None and known.address == place.control_address:
            return known
        channel = self._network.channel(
            place.control_address, lambda: ServerName(self._view.cluster, group, place.replica)
        )
        self._connections[group, place.replica] = found = _ReplicaStubs(
            place.control_address,
            channel,
            control_pb2_grpc.BrokerControlStub(channel),
            delay_pb2_grpc.DelayControlStub(channel),
        )
        if known is not None:
            await known.channel.close()
        return found

    async def ask_master(
        self,
        group: str,
        method: str,
        request: Any,
        *,
        timeout_s: float = BROKER_S,
        is_change: bool = False,
        at_most_once: bool = False,
    ) -> Any:
        """Call a group's master. A change is repeated at another master only if the first one
        answered NotMaster or WrongServer; and with `at_most_once`, only if the first one has not
        begun it.

        If the first one may have begun the change, an error of the second has an unknown outcome.
        Raises NotConnected if there is no master, or it does not answer; else the master's typed
        error.
        """
        master = self._view.group(group).master
        if master is None:
            raise NotConnected(
                f"broker group {group!r} has no master at the moment: try again soon, or see "
                "`qmq cluster status`"
            )
        try:
            return await self._ask(group, master, method, request, timeout_s, is_change=is_change)
        except (NotMaster, NotConnected, DeadlineExceeded) as failure:
            newer = (
                await self._newer(group, failure)
                if isinstance(failure, NotMaster | WrongServer) or not is_change
                else None
            )
            was_begun = is_change and failure.outcome is Outcome.UNKNOWN
            if newer is None or _place(newer) == _place(master) or (was_begun and at_most_once):
                raise _silent(group, master, failure) from failure
        try:
            return await self._ask(
                group,
                newer,
                method,
                request,
                timeout_s if is_change else AGAIN_S,
                is_change=is_change,
            )
        except (NotMaster, NotConnected, DeadlineExceeded) as failure:
            silent = _silent(group, newer, failure)
            if was_begun:
                raise NotConnected(silent.message, outcome=Outcome.UNKNOWN) from failure
            raise silent from failure
        except QmqError as refusal:
            if was_begun:
                raise type(refusal)(refusal.message, outcome=Outcome.UNKNOWN) from refusal
            raise

    async def _ask(
        self,
        group: str,
        master: MasterRecord,
        method: str,
        request: Any,
        timeout_s: float,
        *,
        is_change: bool,
    ) -> Any:
        try:
            answer = await self.ask(group, master, method, request, timeout_s)
        except QmqError as failure:
            if is_change and failure.outcome is not Outcome.NOT_STORED:
                note_change()
            raise
        if is_change:
            note_change()
        return answer

    async def _newer(self, group: str, failure: Unavailable) -> MasterRecord | None:
        """The current master. After a deadline the watch has had time to update the view; else the
        store is read.
        """
        if not isinstance(failure, DeadlineExceeded):
            with suppress(CoordinationError, TimeoutError):
                async with asyncio.timeout(READ_S):
                    await self._view.fetch(group_key(group, "master"))
        return self._view.group(group).master

    async def ask_masters(
        self,
        groups: Iterable[str],
        method: str,
        request: Any,
        *,
        absent: tuple[type[QmqError], ...] = (),
        is_change: bool = False,
        at_most_once: bool = False,
    ) -> BrokerAnswers:
        """Call the masters of several groups at the same time. Errors of the kinds `absent` count
        as answers; others except Unavailable are raised.
        """
        names = list(groups)
        if not names:
            raise NotConnected(
                "no broker is registered: is one running, and can it reach the coordination store?"
            )
        asked = [
            self.ask_master(group, method, request, is_change=is_change, at_most_once=at_most_once)
            for group in names
        ]
        answers = BrokerAnswers()
        for group, answer in zip(
            names, await asyncio.gather(*asked, return_exceptions=True), strict=True
        ):
            if isinstance(answer, absent):
                answers.absent[group] = answer
            elif isinstance(answer, Unavailable):
                answers.missing[group] = answer
            elif isinstance(answer, BaseException):
                raise answer
            else:
                answers.found[group] = answer
        return answers

    async def close(self) -> None:
        for each in self._connections.values():
            await each.channel.close()


def _place(master: MasterRecord) -> tuple[str, str]:
    return master.replica, master.control_address


def _silent(group: str, master: MasterRecord, failure: Unavailable) -> NotConnected:
    return NotConnected(
        (
            f"broker group {group!r} does not answer (master {master.replica} at "
            f"{master.control_address}: {failure.message})"
        ),
        outcome=failure.outcome,
    )


class PartitionMasters:
    """Calls to the masters of broker groups about partitions. Each has a separate deadline, and
    raises NotConnected, NotMaster, DeadlineExceeded, or what the master answers. A broker answers
    when the data of its answer is committed.
    """

    def __init__(self, brokers: Brokers) -> None:
        self._brokers = brokers

    async def seal(
        self, broker_group: str, subject: str, partition: int, change_id: str, to_version: int
    ) -> int:
        """Close a partition. Returns the sequence of its command message, which is the same at
        every call, also at a second master. Raises RouteConflict if another change closed it, and
        DiskFull.
        """
        request = control.SealRequest(
            subject=subject, partition=partition, change_id=change_id, to_version=to_version
        )
        answer: control.SealResponse = await self._brokers.ask_master(
            broker_group, "Seal", request, timeout_s=SEAL_S
        )
        return answer.sequence

    async def probe(self, broker_group: str, subject: str, partition: int) -> None:
        """Check that the group's master answers and commits. A refusal is an answer, too."""
        try:
            await self.describe_lanes(
                broker_group, control.DescribeLanesRequest(subject=subject, partitions=[partition])
            )
        except CallerError:
            return

    async def describe_lanes(
        self, broker_group: str, request: control.DescribeLanesRequest
    ) -> control.DescribeLanesResponse:
        """See control.proto. Parked keys are asked for in pages."""
        asked = control.DescribeLanesRequest()
        asked.CopyFrom(request)
        if request.with_parked:
            asked.parked_after.SetInParent()
        found = page = await self._describe_lanes(broker_group, asked)
        statuses = {each.partition: each for each in found.partitions}
        while page.has_more_parked:
            asked.parked_after.CopyFrom(
                [key for each in page.partitions for key in each.parked][-1]
            )
            page = await self._describe_lanes(broker_group, asked)
            for each in page.partitions:
                if each.partition in statuses:
                    statuses[each.partition].parked.extend(each.parked)
        return found

    async def _describe_lanes(
        self, broker_group: str, request: control.DescribeLanesRequest
    ) -> control.DescribeLanesResponse:
        answer: control.DescribeLanesResponse = await self._brokers.ask_master(
            broker_group, "DescribeLanes", request, timeout_s=LANES_S
        )
        return answer

    async def place_lanes(self, broker_group: str, request: control.PlaceLanesRequest) -> None:
        """See control.proto. A move of a group is requested from a second master only if the first
        certainly did nothing.
        """
        await self._brokers.ask_master(
            broker_group, "PlaceLanes", request, timeout_s=PLACE_S, is_change=request.moves
        )

    async def inherit_parked(
        self, broker_group: str, request: control.InheritParkedRequest
    ) -> None:
        """See control.proto. Raises RouteConflict. Calling a second master is harmless: it parks
        the same keys.
        """
        await self._brokers.ask_master(broker_group, "InheritParked", request, timeout_s=LANES_S)

    async def forget_group(self, broker_group: str, request: control.DeleteGroupRequest) -> int:
        """Delete the group's state at one master. Returns the number of partitions that had state.
        Raises RouteConflict. Calling a second master is harmless: it has forgotten the group
        already.
        """
        answer: control.DeleteGroupResponse = await self._brokers.ask_master(
            broker_group, "DeleteGroup", request, timeout_s=PLACE_S
        )
        return answer.queues


async def at_once(asked: Iterable[Awaitable[_T]]) -> list[_T]:
    """Make all calls at the same time: a Gather for an event loop."""
    return list(await asyncio.gather(*asked))


class Delays:
    """Calls the delay groups."""

    def __init__(self, view: ClusterView, brokers: Brokers) -> None:
        self._view = view
        self._brokers = brokers

    def groups(self) -> list[str]:
        """All delay groups, in order."""
        return [state.name for state in self._view.groups() if state.delay is not None]

    async def one(self, method: str, request: Any) -> delay_pb.DelayedMessage:
        """Call the group that the request's id names.
        Raises InvalidArgument, the master's error, NotConnected.
        """
        group = DelayedId.parse(request.id).group
        if isinstance(request, delay_pb.MoveDelayedRequest):
            new_due_ms(request)
        if group not in self.groups():
            await self._read_store(self._view.fetch(group_key(group, "delay")))
        groups = await self._require_groups()
        if group not in groups:
            raise InvalidArgument(
                f"{request.id} belongs to delay group {group!r}, which does not exist; there "
                f"are {', '.join(groups)}"
            )
        found: delay_pb.DelayedMessage = await self._brokers.ask_master(
            group, method, request, is_change=method != "ShowDelayed"
        )
        return found

    async def subject_of(self, delayed_id: str) -> str:
        """The subject of a delayed message. Raises as `one`."""
        return (await self.one("ShowDelayed", delay_pb.ShowDelayedRequest(id=delayed_id))).subject

    async def listed(self, request: delay_pb.ListDelayedRequest) -> delay_pb.ListDelayedResponse:
        """The groups' lists as one, in the order of due times.

        `next` is the due time and the id behind which to continue, the same for every group.

        Groups that do not answer are named; their messages are missing. Raises InvalidName,
        InvalidArgument; NotConnected if all are.
        """
        most = listing(request).most
        asked = delay_pb.ListDelayedRequest()
        asked.CopyFrom(request)
        asked.messages_max = most
        answers = await self._brokers.ask_masters(
            await self._require_groups(), "ListDelayed", asked
        )
        page = merged(answers.partial(), most)
        page.silent.update(answers.silent)
        return page

    async def _require_groups(self) -> list[str]:
        """If no delay group is known, read the store: one may be new. Raises NotConnected."""
        if not self.groups():
            await self._read_store(self._view.refresh())
        groups = self.groups()
        if not groups:
            raise NotConnected("there is no delay group: start one with `qmq delay`")
        return groups

    async def _read_store(self, question: Coroutine[Any, Any, object]) -> None:
        """Read the store with a short timeout; if it fails, use what is known."""
        with suppress(CoordinationError, TimeoutError):
            async with asyncio.timeout(READ_S):
                await question

    async def describe(self) -> pb.DescribeDelaysResponse:
        """All groups, and which of them failed to answer.
        Raises NotConnected if there is no delay group.
        """
        groups = await self._require_groups()
        answers = await self._brokers.ask_masters(
            groups, "DescribeDelay", delay_pb.DescribeDelayRequest(), absent=(QmqError,)
        )
        silent = {group: failure.message for group, failure in answers.absent.items()}
        return pb.DescribeDelaysResponse(delays=list(answers.found.values()), silent=silent)


def merged(
    pages: Sequence[delay_pb.ListDelayedResponse], most: int
) -> delay_pb.ListDelayedResponse:
    """One page of several groups' pages. Pure.

    A group whose page is not its last may have more messages right after its mark: so nothing after
    the lowest of these marks is returned yet, since earlier messages might follow.
    """
    goes_on = [ListMark.parse(page.next) for page in pages if page.next]
    end = min(goes_on, default=None)
    known = list(heapq.merge(*[page.messages for page in pages], key=mark_of))
    shown = [message for message in known if end is None or mark_of(message) <= end]
    if len(shown) > most:
        return delay_pb.ListDelayedResponse(
            messages=shown[:most], next=str(mark_of(shown[most - 1]))
        )
    return delay_pb.ListDelayedResponse(messages=shown, next="" if end is None else str(end))


async def describe_dead_letters(
    brokers: Brokers, hosts: Sequence[str], group: str
) -> pb.DescribeDeadLettersResponse:
    """The dead-letter queues of one group, or of all if it is empty, ordered by group. Raises
    InvalidName; NotConnected if no broker group answers.
    """
    subject = dead_letter_subject(check_name("group", group)) if group else ""
    queues = await brokers.ask_masters(
        hosts, "DescribeQueues", control.DescribeQueuesRequest(subject=subject)
    )
    asked = control.DescribeGroupsRequest(subject=subject, group=OPERATORS)
    groups = await brokers.ask_masters(hosts, "DescribeGroups", asked, absent=(UnknownGroup,))
    looked = {
        (each.subject, each.broker_group): each
        for answer in groups.found.values()
        for each in answer.groups
    }
    found = [
        _described(queue, looked.get((queue.subject, queue.broker_group)))
        for answer in queues.partial()
        for queue in answer.queues
        if queue.broker_group not in groups.missing
        and is_dead_letters(queue.subject)
        and queue.next_sequence
        and (
            queue.next_sequence > queue.start_sequence
            or (queue.subject, queue.broker_group) in looked
        )
    ]
    found.sort(key=lambda each: (each.group, each.broker_group))
    return pb.DescribeDeadLettersResponse(queues=found, silent=queues.silent | groups.silent)


def _described(queue: control.Queue, looked: control.Group | None) -> pb.DeadLetterQueue:
    """Build the description of one queue.
    Dead letters that no operator has handled count as pending.
    """
    kept = queue.next_sequence - queue.start_sequence
    waiting = (
        kept if looked is None else min(looked.waiting + looked.unacked + looked.requeued, kept)
    )
    return pb.DeadLetterQueue(
        group=queue.subject.removeprefix(dead_letter_subject("")),
        broker_group=queue.broker_group,
        messages=kept,
        waiting=waiting,
        newest_ms=queue.last_append_ms,
        oldest_ago_ms=looked.lag_ms if looked is not None else queue.oldest_age_ms,
    )


@dataclass(frozen=True, slots=True)
class MetaTiming:
    """The intervals of a metaserver's background work; tests use shorter ones."""

    sweep_s: float = 2.0
    """For interrupted route changes, groups without polling consumers, and deletions."""
    reshard_s: float = 5.0
    """For the load of partitions of subjects that have a reshard policy."""


TIMING: Final = MetaTiming()


async def find_every(
    brokers: Brokers, hosts: Iterable[str], request: control.FindMessageRequest
) -> control.FindMessageResponse:
    """Find every place where a message is stored, the earliest first. The answer is incomplete if a
    group does not answer, or if only delay groups have the message and not everything could be
    searched. Raises NotConnected if no place is found and a group did not answer; MessageNotFound.
    """
    absent: tuple[type[QmqError], ...] = (MessageNotFound, UnknownSubject)
    answers = await brokers.ask_masters(hosts, "FindMessage", request, absent=absent)
    found = answers.found.values()
    places = [
        place
        for answer in found
        if answer.HasField("message")
        for place in (answer.message, *answer.others)
    ]
    is_cut = any(answer.is_incomplete for answer in found)
    if not places:
        answers.require_all(f"not on {', '.join(answers.absent)}" if answers.absent else "")
        raise _not_found(request, is_cut=is_cut)
    places.sort(
        key=lambda place: (place.append_time_ms, place.broker_group, place.subject, place.sequence)
    )
    is_incomplete = bool(answers.missing) or (is_cut and all(place.due_ms for place in places))
    return control.FindMessageResponse(
        message=places[0], others=places[1:], is_incomplete=is_incomplete
    )


def _not_found(request: control.FindMessageRequest, *, is_cut: bool) -> MessageNotFound:
    born = time_of(MessageId.parse(request.message_id).producer_id >> 20)
    more = (
        "Not everything was looked through: name its subject, or give its delayed id"
        if is_cut
        else "Retention may have taken it"
    )
    return MessageNotFound(
        f"no kept message of {request.subject or 'any subject'} has the id {request.message_id}, "
        f"whose producer began at {born:%Y-%m-%d %H:%M:%S} UTC. {more}"
    )


async def trace_message(
    brokers: Brokers, request: control.TraceMessageRequest
) -> control.TraceMessageResponse:
    """Ask the master of the group that has the message. Raises the master's error, NotConnected."""
    found: control.TraceMessageResponse = await brokers.ask_master(
        check_name("broker group", request.broker_group), "TraceMessage", request
    )
    return found
