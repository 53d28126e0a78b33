"""Calls to brokers over their control ports: to one replica, to a group's master, or to the masters of many groups at the same time
(`Brokers`); and the calls of route changes and rounds to partitions' masters (`PartitionMasters`), with short deadlines, so that a silent
group does not delay others.

Every call has a deadline, and names the replica that it means (qmq/server_name.py). The master comes from the view, which may lag: after
NotMaster, or if the replica is gone, the store is read once, and the new master is called. Errors name the group that did not answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeVar

import grpc
from qmq_coordination.broker_groups import MasterRecord, ReplicaRecord, group_key
from qmq_coordination.view import ClusterView

from qmq.errors import (
    CallerError,
    CoordinationError,
    DeadlineExceeded,
    NotConnected,
    NotMaster,
    Outcome,
    QmqError,
    Unavailable,
    WrongServer,
)
from qmq.network import NETWORK, Network
from qmq.proto.v1 import control_pb2 as control
from qmq.proto.v1 import control_pb2_grpc, delay_pb2_grpc
from qmq.request_changes import note_change
from qmq.rpc import typed_error
from qmq.server_name import ServerName

BROKER_S: Final = 2.5
AGAIN_S: Final = 2.0
LOOK_S: Final = 1.0
"""Timeout for a query, for calling the next master, and for reading the store. Together they are below the five seconds that clients give a
metaserver, so that clients learn which group is silent.
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
        """All answers. Raises NotConnected if a group did not answer, and a group's error if no group has the requested thing."""
        self.require_all(f"not on {', '.join(self.absent)}" if self.absent and not self.found else "")
        if not self.found and self.absent:
            raise next(iter(self.absent.values()))
        return list(self.found.values())

    @property
    def silent(self) -> dict[str, str]:
        """The groups that did not answer, with the reasons; `partial` leaves them out."""
        return {group: failure.message for group, failure in self.missing.items()}

    def partial(self) -> list[Any]:
        """The answers of the groups that answered. Raises as `complete`, but only if no group has the requested thing."""
        return list(self.found.values()) if self.found else self.complete()

    def require_all(self, so_far: str) -> None:
        """Raise NotConnected with the groups that did not answer. `so_far` is the result without them."""
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

    async def ask(self, group: str, place: MasterRecord | ReplicaRecord, method: str, request: Any, timeout_s: float = BROKER_S) -> Any:
        """Call the control port of a group's replica. Raises the replica's typed error, NotConnected, WrongServer, DeadlineExceeded."""
        stubs = await self._connection(group, place)
        call: Callable[..., Awaitable[Any]] = getattr(stubs.control if hasattr(stubs.control, method) else stubs.delay, method)
        try:
            return await call(request, timeout=timeout_s)
        except grpc.RpcError as cause:
            raise typed_error(cause, place.control_address) from cause

    async def _connection(self, group: str, place: MasterRecord | ReplicaRecord) -> _ReplicaStubs:
        """The connection to a replica, at its latest address."""
        known = self._connections.get((group, place.replica))
        if known is not None and known.address == place.control_address:
            return known
        channel = self._network.channel(place.control_address, lambda: ServerName(self._view.cluster, group, place.replica))
        self._connections[group, place.replica] = found = _ReplicaStubs(
            place.control_address, channel, control_pb2_grpc.BrokerControlStub(channel), delay_pb2_grpc.DelayControlStub(channel)
        )
        if known is not None:
            await known.channel.close()
        return found

    async def ask_master(
        self, group: str, method: str, request: Any, *, timeout_s: float = BROKER_S, is_change: bool = False, at_most_once: bool = False
    ) -> Any:
        """Call a group's master. A change is repeated at another master only if the first one answered NotMaster or WrongServer; and with
        `at_most_once`, only if the first one has not begun it.

        If the first one may have begun the change, an error of the second has an unknown outcome. Raises NotConnected if there is no
        master, or it does not answer; else the master's typed error.
        """
        master = self._view.group(group).master
        if master is None:
            raise NotConnected(f"broker group {group!r} has no master at the moment: try again soon, or see `qmq cluster status`")
        try:
            return await self._ask(group, master, method, request, timeout_s, is_change=is_change)
        except (NotMaster, NotConnected, DeadlineExceeded) as failure:
            newer = await self._newer(group, failure) if isinstance(failure, NotMaster | WrongServer) or not is_change else None
            was_begun = is_change and failure.outcome is Outcome.UNKNOWN
            if newer is None or _place(newer) == _place(master) or (was_begun and at_most_once):
                raise _silent(group, master, failure) from failure
        try:
            return await self._ask(group, newer, method, request, timeout_s if is_change else AGAIN_S, is_change=is_change)
        except (NotMaster, NotConnected, DeadlineExceeded) as failure:
            silent = _silent(group, newer, failure)
            if was_begun:
                raise NotConnected(silent.message, outcome=Outcome.UNKNOWN) from failure
            raise silent from failure
        except QmqError as refusal:
            if was_begun:
                raise type(refusal)(refusal.message, outcome=Outcome.UNKNOWN) from refusal
            raise

    async def _ask(self, group: str, master: MasterRecord, method: str, request: Any, timeout_s: float, *, is_change: bool) -> Any:
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
        """The current master. After a deadline the watch has had time to update the view; else the store is read."""
        if not isinstance(failure, DeadlineExceeded):
            with suppress(CoordinationError, TimeoutError):
                async with asyncio.timeout(LOOK_S):
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
        """Call the masters of several groups at the same time. Errors of the kinds `absent` count as answers; others except
        Unavailable are raised.
        """
        names = list(groups)
        if not names:
            raise NotConnected("no broker is registered: is one running, and can it reach the coordination store?")
        asked = [self.ask_master(group, method, request, is_change=is_change, at_most_once=at_most_once) for group in names]
        answers = BrokerAnswers()
        for group, answer in zip(names, await asyncio.gather(*asked, return_exceptions=True), strict=True):
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
        f"broker group {group!r} does not answer (master {master.replica} at {master.control_address}: {failure.message})",
        outcome=failure.outcome,
    )


class PartitionMasters:
    """Calls to the masters of partitions: a Sealer, a LaneReader and a GroupForgetter."""

    def __init__(self, brokers: Brokers) -> None:
        self._brokers = brokers

    async def seal(self, broker_group: str, subject: str, partition: int, change_id: str, to_version: int) -> int:
        """See Sealer. Asking a second master is harmless: it gives the same answer."""
        request = control.SealRequest(subject=subject, partition=partition, change_id=change_id, to_version=to_version)
        answer: control.SealResponse = await self._brokers.ask_master(broker_group, "Seal", request, timeout_s=SEAL_S)
        return answer.sequence

    async def probe(self, broker_group: str, subject: str, partition: int) -> None:
        """See Sealer. A refusal is an answer, too."""
        try:
            await self.describe_lanes(broker_group, control.DescribeLanesRequest(subject=subject, partitions=[partition]))
        except CallerError:
            return

    async def describe_lanes(self, broker_group: str, request: control.DescribeLanesRequest) -> control.DescribeLanesResponse:
        """See LaneReader. Parked keys are asked for in pages."""
        asked = control.DescribeLanesRequest()
        asked.CopyFrom(request)
        if request.with_parked:
            asked.parked_after.SetInParent()
        found = page = await self._describe_lanes(broker_group, asked)
        statuses = {each.partition: each for each in found.partitions}
        while page.has_more_parked:
            asked.parked_after.CopyFrom([key for each in page.partitions for key in each.parked][-1])
            page = await self._describe_lanes(broker_group, asked)
            for each in page.partitions:
                if each.partition in statuses:
                    statuses[each.partition].parked.extend(each.parked)
        return found

    async def _describe_lanes(self, broker_group: str, request: control.DescribeLanesRequest) -> control.DescribeLanesResponse:
        answer: control.DescribeLanesResponse = await self._brokers.ask_master(broker_group, "DescribeLanes", request, timeout_s=LANES_S)
        return answer

    async def place_lanes(self, broker_group: str, request: control.PlaceLanesRequest) -> None:
        """See LaneReader. A move of a group is requested from a second master only if the first certainly did nothing."""
        await self._brokers.ask_master(broker_group, "PlaceLanes", request, timeout_s=PLACE_S, is_change=request.moves)

    async def inherit_parked(self, broker_group: str, request: control.InheritParkedRequest) -> None:
        """See LaneReader. Calling a second master is harmless: it parks the same keys."""
        await self._brokers.ask_master(broker_group, "InheritParked", request, timeout_s=LANES_S)

    async def forget_group(self, broker_group: str, request: control.DeleteGroupRequest) -> int:
        """See GroupForgetter. Calling a second master is harmless: it has forgotten the group already."""
        answer: control.DeleteGroupResponse = await self._brokers.ask_master(broker_group, "DeleteGroup", request, timeout_s=PLACE_S)
        return answer.queues


async def at_once(asked: Iterable[Awaitable[_T]]) -> list[_T]:
    """Make all calls at the same time: a Gather for an event loop."""
    return list(await asyncio.gather(*asked))
