"""The metaserver's service for ordered subjects, without gRPC (which is in qmq/meta/service.py).

`Descriptions` describes a subject's routes, partitions and groups for operators: from the store and
the brokers. Brokers that do not answer are named.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

from qmq_coordination.ordered_records import (
    OrderedState,
    assignment_key,
    change_key,
    group_record_key,
)
from qmq_coordination.view import ClusterView
from qmq_ordering.changes import next_route
from qmq_ordering.hashing import logical_partition
from qmq_ordering.lanes import Assignment, Gate, GroupRecord
from qmq_ordering.routes import Change, PhysicalPartition, Route

from qmq import limits
from qmq.errors import (
    CallerError,
    DeadlineExceeded,
    InvalidArgument,
    Outcome,
    QmqError,
    RouteConflict,
    StaleDelivery,
    Stopping,
    UnknownGroup,
    UnknownPartition,
    UnknownSubject,
)
from qmq.meta.calls import Brokers, PartitionMasters
from qmq.meta.catalog import ClusterCatalog
from qmq.meta.description import change_of, lane_of, range_of, route_of
from qmq.meta.ordered.changes import Make, Plans, other_version
from qmq.meta.ordered.controller import Controller
from qmq.meta.ordered.groups import (
    DELETE,
    LEASE_MS_MIN,
    GroupMember,
    Start,
    require_room,
    require_same_condition,
    superseded,
)
from qmq.meta.ordered.placement import being_deleted
from qmq.meta.ordered.resharding import Resharding
from qmq.meta.ordered.rounds import EVERYTHING, GroupLaneProgress, mark_passed, with_unwritten
from qmq.model import SubjectConfig, check_name
from qmq.proto.v1 import control_pb2 as control
from qmq.proto.v1 import meta_pb2 as pb
from qmq.rpc.request_changes import note_change
from qmq.wire.parked_pages import first_page
from qmq.wire.subject_settings import settings_of


class Descriptions:
    """Describes routes, and changes nothing."""

    def __init__(self, view: ClusterView, masters: PartitionMasters) -> None:
        self._view = view
        self._masters = masters

    async def route(
        self, config: SubjectConfig, state: OrderedState, version: int
    ) -> pb.DescribeRouteResponse:
        """One version of the route (0: the latest), its partitions, and all groups.
        Raises InvalidArgument.
        """
        route = state.routes.get(version or state.latest)
        if route is None:
            raise InvalidArgument(
                f"subject {config.name!r} has no route version {version}: the latest is "
                f"{state.latest}"
            )
        silent: set[str] = set()
        names = sorted(state.groups)
        answers = await asyncio.gather(
            *[self._ask(config.name, state, group, silent) for group in ("", *names)]
        )
        groups = [
            self._group(state, name, state.groups[name], answer, is_all=not version)
            for name, answer in zip(names, answers[1:], strict=True)
        ]
        here = {part.number for part in route.partitions}
        return pb.DescribeRouteResponse(
            settings=settings_of(config),
            route=route_of(route, state.fenced),
            latest_version=state.latest,
            partitions=[each for each in answers[0] if each.partition in here],
            groups=groups,
            change=None if state.pending is None else change_of(state.pending),
            silent_groups=sorted(silent),
        )

    async def _ask(
        self, subject: str, state: OrderedState, group: str, silent: set[str]
    ) -> list[control.PartitionStatus]:
        """Ask for all partitions of all versions, with the progress of a group."""
        numbers: dict[str, set[int]] = {}
        for part in (part for route in state.routes.values() for part in route.partitions):
            numbers.setdefault(part.group, set()).add(part.number)
        requests = {
            name: control.DescribeLanesRequest(
                subject=subject, partitions=sorted(here), group=group, with_parked=True
            )
            for name, here in numbers.items()
        }
        answers = await asyncio.gather(
            *[self._ask_one(name, request, silent) for name, request in requests.items()]
        )
        return sorted(
            (each for answer in answers for each in answer.partitions),
            key=lambda each: each.partition,
        )

    async def _ask_one(
        self, name: str, request: control.DescribeLanesRequest, silent: set[str]
    ) -> control.DescribeLanesResponse:
        try:
            return with_unwritten(await self._masters.describe_lanes(name, request), request, name)
        except QmqError:
            silent.add(name)
            return control.DescribeLanesResponse()

    def _group(
        self,
        state: OrderedState,
        name: str,
        record: GroupRecord,
        statuses: Iterable[control.PartitionStatus],
        *,
        is_all: bool,
    ) -> pb.OrderedGroup:
        frontier, found = record.frontier, list(statuses)
        progress = GroupLaneProgress()
        progress.add(control.DescribeLanesResponse(partitions=found))
        newest = state.latest if is_all else frontier.newest
        wanted = _numbers(
            state.routes[version]
            for version in range(frontier.version, newest + 1)
            if version in state.routes
        )
        members = self._view.members(state.subject, name)
        lanes = self._view.assignment(state.subject, name).lanes
        ahead = _numbers(
            route for version, route in state.routes.items() if version >= frontier.version
        )
        parked_keys = len(
            {key.key for each in found for key in each.parked}
        )  # a key may be parked in several partitions
        for each in found:
            each.ClearField("parked")
        return pb.OrderedGroup(
            group=name,
            version=frontier.version,
            gate=record.gate.value,
            is_ready=record.is_ready,
            consumers=list(members),
            frontier=[
                pb.GroupRange(lps=range_of(piece.range), version=piece.version)
                for piece in frontier.pieces
            ],
            partitions=[each for each in found if each.partition in wanted],
            backlog=round(
                sum(
                    progress.backlog(each.partition, EVERYTHING)
                    for each in found
                    if each.partition in ahead
                )
            ),
            parked_keys=parked_keys,
            lanes=[lane_of(lane, owner) for lane, owner in lanes if owner in members],
            is_paused=self._view.delivery.is_paused(state.subject, name, "", ""),
        )


def _numbers(routes: Iterable[Route]) -> set[int]:
    return {part.number for route in routes for part in route.partitions}


CHANGE_WAIT_S: Final = 20.0
"""The time that ChangeRoute waits for the next route. It is longer than a master's lease and an
election. After it, the change continues in the background.
"""


class OrderedService:
    """See "Ordered subjects" in meta.proto."""

    def __init__(
        self,
        cluster: ClusterCatalog,
        view: ClusterView,
        brokers: Brokers,
        controller: Controller,
        masters: PartitionMasters,
        resharding: Resharding,
        *,
        change_wait_s: float = CHANGE_WAIT_S,
        consumers_max: int = limits.GROUP_CONSUMERS_MAX,
    ) -> None:
        self._cluster = cluster
        self._view = view
        self._brokers = brokers
        self._masters = masters
        self._controller = controller
        self._resharding = resharding
        self._plans = Plans(view, masters)
        self._descriptions = Descriptions(view, masters)
        self._change_wait_s = change_wait_s
        self._consumers_max = consumers_max

    async def _subject(self, name: str) -> tuple[SubjectConfig, OrderedState]:
        """Raises UnknownSubject, OrderMismatch, CoordinationError."""
        config = await self._cluster.subject(check_name("subject", name))
        return config, await self._cluster.ordered(config)

    # --- routes -----------------------------------------------------------------------------------

    async def change_route(self, request: pb.ChangeRouteRequest) -> pb.ChangeRouteResponse:
        """Plan, prepare and continue a change. A repeated request gets the change that the first
        one made.

        Raises RouteConflict, InvalidArgument, UnknownPartition, DeadlineExceeded, ...
        """
        config, _ = await self._subject(request.subject)
        state = await self._cluster.learn_route(config.name)
        route = state.routes[state.latest]
        # Looked for after the route was read: a change that made this route is found, and one that
        # is made later fails at `prepare`.
        change = await self._made_before(config.name, request)
        if change is None:
            # Before the plan, which would not find the older version's partitions. Without a dry
            # run, `prepare` compares with the store.
            if 0 < request.from_version < route.version or (
                request.dry_run and request.from_version > route.version
            ):
                raise other_version(config.name, route.version, request.from_version)
            change_id = (
                check_name("change_id", request.change_id)
                if request.change_id
                else self._controller.changes.new_id()
            )
            make = await self._plans.plan(request, config, route, change_id)
            planned = make(route)
            await self._cluster.require_writable(
                tuple(sorted({part.group for part in planned.targets}))
            )
            if request.dry_run:
                return pb.ChangeRouteResponse(
                    change=change_of(planned), route=route_of(next_route(route, planned))
                )
            change = await self._prepared(config.name, request, make, route)
        elif change.to_version != route.version + 1:
            route = await self._controller.changes.route(config.name, change.to_version - 1)
        published = await self._published(config.name, change)
        after = self._view.ordered(config.name)
        there = (
            after.routes.get(published.to_version) if after is not None else None
        ) or next_route(route, published)
        return pb.ChangeRouteResponse(change=change_of(published), route=route_of(there))

    async def _prepared(
        self, subject: str, request: pb.ChangeRouteRequest, make: Make, route: Route
    ) -> Change:
        """Prepare the change. If the same request was faster at another metaserver,
        that request's change.
        """
        try:
            # The plan was made for this version. If the version has changed, the caller plans
            # again.
            return await self._controller.changes.prepare(
                subject, make, from_version=request.from_version or route.version
            )
        except RouteConflict:
            change = await self._made_before(subject, request)
            if change is None:
                raise
            return change

    async def _made_before(self, subject: str, request: pb.ChangeRouteRequest) -> Change | None:
        """The change that the same request made before, or None."""
        if not request.change_id or not request.from_version or request.dry_run:
            return None
        found = await self._controller.changes.made(
            subject, request.from_version + 1, request.change_id
        )
        if found is not None:
            note_change()  # by an earlier try of this request
        return found

    async def _published(self, subject: str, change: Change) -> Change:
        """Wait for the next route until the caller's deadline."""
        task = self._controller.carry_on(subject, change.to_version)
        await asyncio.wait([task], timeout=self._change_wait_s)
        if task.done() and not task.cancelled():
            return task.result()
        what = (
            f"the {change.kind.value} of subject {subject!r} to version {change.to_version} is "
            "prepared, and continues by itself"
        )
        if task.done():
            raise Stopping(
                f"{what}; this metaserver is stopping: see `qmq route show {subject}`",
                outcome=Outcome.STORED,
            )
        await self._view.read_back(change_key(subject, change.to_version))
        raise DeadlineExceeded(
            (
                f"{what} as soon as its partitions' broker groups answer: do not ask for it "
                f"again, see `qmq route show {subject}`"
            ),
            outcome=Outcome.STORED,
        )

    async def describe_route(self, request: pb.DescribeRouteRequest) -> pb.DescribeRouteResponse:
        """Describe a route for operators. Raises UnknownSubject, OrderMismatch, InvalidArgument."""
        config, state = await self._subject(request.subject)
        return await self._descriptions.route(config, state, request.version)

    async def route_history(self, request: pb.RouteHistoryRequest) -> pb.RouteHistoryResponse:
        """All changes, the oldest first."""
        _, state = await self._subject(request.subject)
        return pb.RouteHistoryResponse(
            changes=[change_of(change) for _, change in sorted(state.changes.items())]
        )

    # --- consumers --------------------------------------------------------------------------------

    async def sync_member(self, request: pb.SyncMemberRequest) -> pb.SyncMemberResponse:
        """Renew a consumer's lease, and answer with its assignment as soon as that is new. Raises
        StaleDelivery if a newer incarnation uses its name; Overloaded if the group has the largest
        number of consumers; InvalidArgument if others select other messages.
        """
        config, _ = await self._subject(request.subject)
        name = GroupMember(
            config.name,
            check_name("group", request.group),
            check_name("consumer", request.consumer),
        )
        incarnation = check_name("incarnation", request.incarnation)
        pair = (name.subject, name.group)
        if request.leaves:
            await self._controller.members.leave(name, incarnation)
            self._controller.poke(pair)
            return pb.SyncMemberResponse()
        condition = request.condition if request.HasField("condition") else None
        require_room(name, self._view.members(*pair), self._consumers_max)
        require_same_condition(name, incarnation, condition, self._view.members(*pair))
        await self._require_group(pair, request)
        is_new = await self._controller.members.keep(
            name, incarnation, request.lease_ms, generation=request.generation, condition=condition
        )
        if is_new or request.finished or request.generation == 0:
            self._controller.poke(pair)
        await self._await_news(name, incarnation, request)
        found = self._view.assignment(*pair)
        if found.generation < request.generation:
            await self._view.read_back(assignment_key(*pair))
            found = self._view.assignment(*pair)
            await self._require_same_group(pair, request)
        return pb.SyncMemberResponse(
            generation=found.generation, lanes=[lane_of(lane) for lane in found.of(name.consumer)]
        )

    async def _require_group(self, pair: tuple[str, str], request: pb.SyncMemberRequest) -> None:
        """Create the group if it does not exist, with the requested gate."""
        gate = _gate(request.gate)
        record = self._record(pair)
        if record is None or record.start == DELETE:
            await self._require_same_group(pair, request)
        if record is None:
            await self._controller.placing.begin(
                *pair, Start.of_new(request.start), gate or Gate.LANES
            )
            await self._view.read_back(group_record_key(*pair))
            record = self._record(pair)
        if record is not None and record.start == DELETE:
            raise being_deleted(*pair)
        # Only a joining consumer sets the gate: two consumers that want different gates would
        # otherwise change it back and forth endlessly.
        if (
            record is not None
            and gate is not None
            and record.gate is not gate
            and request.generation == 0
        ):
            await self._controller.placing.set_gate(*pair, gate)
            await self._view.read_back(group_record_key(*pair))

    async def _require_same_group(
        self, pair: tuple[str, str], request: pb.SyncMemberRequest
    ) -> None:
        """Raise StaleDelivery if the consumer knows an assignment that the store does not have: its
        group was deleted, and another group of the same name may have begun. Raises
        CoordinationError.
        """
        store = self._controller.records.store
        found = await store.get(assignment_key(*pair))
        known = 0 if found is None else Assignment.decode(found.value).generation
        if request.generation > known:
            raise StaleDelivery(
                f"group {pair[1]!r} of subject {pair[0]!r} was deleted: close this consumer, "
                "and open a new one"
            )

    def _record(self, pair: tuple[str, str]) -> GroupRecord | None:
        state = self._view.ordered(pair[0])
        return None if state is None else state.groups.get(pair[1])

    async def _await_news(
        self, name: GroupMember, incarnation: str, request: pb.SyncMemberRequest
    ) -> None:
        """Wait for a change, at most for a third of the lease: the consumer's next request renews
        its lease.
        """
        pair = (name.subject, name.group)
        loop = asyncio.get_running_loop()
        until = loop.time() + min(request.wait_ms, max(request.lease_ms, LEASE_MS_MIN) // 3) / 1000
        is_news = asyncio.Event()
        while (
            self._view.assignment(*pair).generation <= request.generation
            and (left_s := until - loop.time()) > 0
        ):
            await self._controller.wait(pair, is_news, left_s)
            if self._controller.is_stopping:
                raise Stopping("this metaserver is stopping: ask another one")
            there = self._view.members(*pair).get(name.consumer)
            if there is not None and there.incarnation != incarnation:
                raise superseded(name)

    # --- moving groups ----------------------------------------------------------------------------

    async def reset_group(self, request: control.ResetGroupRequest) -> control.ResetGroupResponse:
        """Move a group over all versions. Moves nothing unless every broker group answers first.
        Raises UnknownGroup, InvalidArgument (sequences), NotConnected.
        """
        config, state = await self._subject(request.subject)
        start = Start.of_reset(request)
        pair = (config.name, check_name("group", request.group))
        await self._controller.records.record(*pair)
        before = await self._positions(*pair, state)
        appended = {
            each.partition: each.last_append_ms
            for each in (await self._positions(config.name, "", state)).values()
        }
        record = await self._controller.placing.reset(
            *pair, start, start.version(state.routes, appended)
        )
        await self._view.read_back(group_record_key(*pair))
        self._controller.poke(pair)
        after = await self._positions(*pair, state)
        reads = {
            part.number
            for version, route in state.routes.items()
            if version >= record.frontier.version
            for part in route.partitions
        }
        moved = [
            _moved(before.get(number, found), found)
            for number, found in sorted(after.items())
            if number in reads
        ]
        return control.ResetGroupResponse(moved=moved)

    async def delete_group(
        self, request: control.DeleteGroupRequest
    ) -> control.DeleteGroupResponse:
        """Delete a group's state in all versions, its parked keys included. A repeated call
        continues. Raises UnknownGroup, InvalidArgument (the group has consumers), NotConnected.
        """
        config, _ = await self._subject(request.subject)
        partitions = await self._controller.forgetting.delete(
            config.name, check_name("group", request.group)
        )
        await self._view.read_back()
        return control.DeleteGroupResponse(queues=partitions)

    async def _positions(
        self, subject: str, group: str, state: OrderedState
    ) -> dict[int, control.PartitionStatus]:
        """All partitions of all versions that brokers know; with a group, those of the brokers that
        know the group.
        """
        asked = control.DescribeLanesRequest(subject=subject, group=group)
        answers = await self._brokers.ask_masters(
            state.broker_groups, "DescribeLanes", asked, absent=(UnknownSubject, UnknownGroup)
        )
        answers.require_all("")
        return {
            each.partition: each for answer in answers.found.values() for each in answer.partitions
        }

    # --- parked keys ------------------------------------------------------------------------------

    async def describe_parked(
        self, request: control.DescribeParkedRequest
    ) -> control.DescribeParkedResponse:
        """The parked keys of all broker groups, and the groups that did not answer. Raises
        NotConnected if none answers.
        """
        _, state = await self._subject(request.subject)
        absent: tuple[type[QmqError], ...] = (UnknownSubject, UnknownGroup, UnknownPartition)
        answers = await self._brokers.ask_masters(
            state.broker_groups, "DescribeParked", request, absent=absent
        )
        if not answers.found and not answers.absent:
            answers.require_all("")
        keys = [key for answer in answers.found.values() for key in answer.keys]
        keys.sort(key=lambda key: (key.partition, key.first_sequence))
        record = state.groups.get(request.group)
        if record is not None:
            mark_passed(keys, record.frontier, state.routes, set(answers.silent))
        page = first_page(keys[: request.keys_max or None], limits.PARKED_LIST_BYTES)
        return control.DescribeParkedResponse(keys=page, silent=answers.silent)

    async def unpark(self, request: control.UnparkRequest) -> control.UnparkResponse:
        """Unpark at the partition's master, while the group's rounds are stopped: the group must
        not advance past the messages that are put back, read newer ones first, or count the key as
        parked in successors. Raises UnknownPartition, UnknownGroup, LaneNotOpen, NotConnected;
        InvalidArgument if older messages of the key are parked.
        """
        config, state = await self._subject(request.subject)
        part = state.partition(request.partition)
        if part is None:
            raise UnknownPartition(
                f"subject {config.name!r} has no partition {request.partition} in any "
                "version of its route"
            )
        pair = (config.name, check_name("group", request.group))
        await self._masters.probe(part.group, config.name, part.number)
        await self._require_oldest(request, state)
        lp = logical_partition(request.key, config.logical_partitions)
        held = control.UnparkRequest()
        held.CopyFrom(request)
        held.record_revision = await self._controller.placing.set_back(
            *pair, part, lp, self._controller.changes.new_id()
        )
        # If the broker's outcome is unknown, the broker may unpark later: the group stays stopped,
        # and the leader starts it again after a while.
        try:
            answer = await self._unpark(part, held)
        except CallerError:
            await self._controller.make_ready(pair)
            raise
        with suppress(QmqError):
            await self._controller.make_ready(pair)
        return answer

    async def _require_oldest(self, request: control.UnparkRequest, state: OrderedState) -> None:
        """Raise InvalidArgument if older messages of the key are parked: messages are parked and
        put back in the order of their partitions' numbers. Raises NotConnected if that cannot be
        known.
        """
        asked = control.DescribeParkedRequest(
            subject=request.subject, group=request.group, key=request.key
        )
        absent: tuple[type[QmqError], ...] = (UnknownSubject, UnknownGroup, UnknownPartition)
        answers = await self._brokers.ask_masters(
            state.broker_groups, "DescribeParked", asked, absent=absent
        )
        answers.require_all("nothing was given back")
        parked = [
            each
            for answer in answers.found.values()
            for each in answer.keys
            if each.key == request.key and each.messages
        ]
        oldest = min((each.partition for each in parked), default=request.partition)
        if oldest < request.partition:
            raise InvalidArgument(
                f"older messages of the key are parked in partition {oldest}, which comes first: "
                "`qmq dlq replay` replays all of them in order"
            )

    async def _unpark(
        self, part: PhysicalPartition, request: control.UnparkRequest
    ) -> control.UnparkResponse:
        answer: control.UnparkResponse = await self._brokers.ask_master(
            part.group, "Unpark", request, is_change=True
        )
        return answer

    # --- resharding by load -----------------------------------------------------------------------

    async def set_reshard_policy(self, request: pb.SetReshardPolicyRequest) -> pb.ReshardPolicy:
        """Replace a subject's policy; unset fields take their defaults. Raises InvalidArgument."""
        config, _ = await self._subject(request.policy.subject)
        return await self._resharding.set_policy(config.name, request.policy)

    async def explain_reshard(self, request: pb.ExplainReshardRequest) -> pb.ExplainReshardResponse:
        """The policy's decision now, and its reason."""
        config, state = await self._subject(request.subject)
        return await self._resharding.explain(config, state)


def _gate(text: str) -> Gate | None:
    if not text:
        return None
    try:
        return Gate(text)
    except ValueError:
        raise InvalidArgument(
            f"a group's gate is {' or '.join(each.value for each in Gate)}, not {text!r}"
        ) from None


def _moved(before: control.PartitionStatus, after: control.PartitionStatus) -> control.Moved:
    return control.Moved(
        partition=after.partition,
        broker_group=after.broker_group,
        from_sequence=_done_before(before),
        to_sequence=_done_before(after),
    )


def _done_before(status: control.PartitionStatus) -> int:
    return min((each.done_before for each in status.progress), default=status.start_sequence)
