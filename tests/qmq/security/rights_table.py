"""Which right each call of a metaserver, a broker and a delay server needs: the table, which
test_rights.py holds the servers to.

A row's `needs` is a list of choices: one right of each choice is enough, and without a choice all
other rights are not. Whoever has any right on a thing may describe it, so `describe` is the choice
of all of them.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import qmq
from qmq.broker.dispatch.lanes import FIRST_SESSION
from qmq.errors import (
    InvalidArgument,
    InvalidName,
    QmqError,
    UnknownConsumer,
    UnknownGroup,
    UnknownPartition,
    UnknownSubject,
)
from qmq.model import DEAD_LETTERS
from qmq.proto.v1 import access_pb2 as access
from qmq.proto.v1 import control_pb2 as control
from qmq.proto.v1 import delay_pb2 as delay
from qmq.proto.v1 import meta_pb2 as meta
from qmq.wire import frame_payloads as wire
from qmq.wire.batch import encode
from qmq.wire.batch_columns import Columns
from qmq.wire.frame import FrameKind
from qmq.wire.frame_payloads import Settlement, pack_settle

Right = tuple[str, str]
"""(kind of resource, operation)"""
Choice = frozenset[Right]

OPERATIONS: Final = {
    "subject": (
        "produce",
        "consume",
        "browse",
        "describe",
        "create",
        "delete",
        "configure",
        "reshard",
    ),
    "group": ("produce", "consume", "browse", "describe", "delete", "configure"),
    "cluster": ("browse", "describe", "operate", "administer"),
    "namespace": ("administer",),
}
ALL: Final = frozenset(
    (kind, each) for kind, operations in OPERATIONS.items() for each in operations
)
NAMESPACE: Final = "t."
"""All names that the principals have rights on begin with this."""


def any_of(*rights: str) -> Choice:
    """One of these rights, each as "kind operation"."""
    return frozenset(
        (kind, operation) for kind, _, operation in (each.partition(" ") for each in rights)
    )


def describing(*kinds: str) -> Choice:
    return frozenset((kind, each) for kind in kinds for each in OPERATIONS[kind])


CONSUMING: Final = (any_of("subject consume"), any_of("group consume"))
ADMINISTERS: Final = any_of("cluster administer")
ITS_ADMINISTRATOR: Final = any_of("cluster administer", "namespace administer")
OPERATES: Final = any_of("cluster operate")
SEES_CLUSTER: Final = describing("cluster")


class World:
    """The things that the requests are about, made by an administrator. Acts that use something up
    get a new one each time.
    """

    subject, ordered, group = "t.plain", "t.keys", "t.g"

    def __init__(self, mq: qmq.Client, broker_group: str) -> None:
        self.mq, self.broker_group = mq, broker_group
        self.message_id = ""
        self.route_version = 0
        self._number = itertools.count()

    async def make(self) -> None:
        """Create what is not used up."""
        await self.mq.metadata.create_subject(
            qmq.SubjectConfig(self.ordered, order=qmq.Order.STRICT, logical_partitions=64),
            partitions=1,
        )
        await self.mq.send(self.subject, b"body")
        consumer = self.mq.consumer(self.subject, group=self.group, start="earliest")
        self.message_id = str((await anext(consumer)).id)
        await consumer.close()
        ordered = self.mq.ordered_consumer(self.ordered, group=self.group)
        await self.mq.send(self.ordered, b"body", key="k")
        await (await anext(ordered)).ack_sync()
        await ordered.close()
        self.route_version = int(
            (await self.mq.metadata.describe_route(self.ordered)).route.version
        )

    def name(self) -> str:
        """A name that nothing has."""
        return f"{NAMESPACE}n{next(self._number)}"

    async def new_subject(self) -> str:
        name = self.name()
        await self.mq.metadata.create_subject(qmq.SubjectConfig(name))
        return name

    async def delayed(self) -> str:
        found = (await self.mq.send(self.subject, b"late", delay=timedelta(days=1))).delayed_id
        assert found is not None
        return str(found)

    async def rule(self) -> str:
        return str(
            (await self.mq.access.put_rule("app:else", ["produce"], "subject", self.name())).id
        )

    async def token(self) -> str:
        return str((await self.mq.access.create_token(f"app:{self.name()}")).info.id)

    async def quota(self) -> str:
        return str((await self.mq.access.put_quota(f"app:{self.name()}", {"subjects": 5})).id)

    def batch(self) -> bytes:
        envelope, region = encode(
            self.subject.encode(),
            Columns([b"x"]),
            producer_id=1 + next(self._number),
            batch_sequence=0,
            create_time_ms=1,
            flags=0,
        )
        return bytes(envelope) + bytes(region)

    def attach(self) -> bytes:
        return wire.Attach(
            self.subject, 0, self.group, self.name(), "i", -1, "earliest", 30_000, [], []
        ).pack()

    def lane_attach(self) -> bytes:
        return wire.LaneAttach(
            self.ordered, 1, self.group, self.name(), "i", 0, 64, 1, 0, 30_000
        ).pack()


Ask = Callable[[World], Any]
"""Makes the request of one call, or awaits it."""


@dataclass(frozen=True, slots=True)
class Row:
    """`needs` None: for servers only. `fails`: the error of a call that is allowed, at a server
    that cannot do it. `is_shown`: whether the answer has what the rights are for, where the answer
    leaves out what its caller may not see.
    """

    ask: Ask
    needs: tuple[Choice, ...] | None = ()
    fails: type[QmqError] | None = None
    is_shown: Callable[[Any], bool] | None = None


def row(
    name: str,
    ask: Ask,
    needs: tuple[Choice, ...] | None = (),
    fails: type[QmqError] | None = None,
    is_shown: Callable[[Any], bool] | None = None,
) -> tuple[str, Row]:
    return name, Row(ask, needs, fails, is_shown)


def servers(name: str, ask: Ask) -> tuple[str, Row]:
    return row(name, ask, None, QmqError)


async def fresh(made: Awaitable[Any], request: Callable[[Any], Any]) -> Any:
    """The request about something new."""
    return request(await made)


def on(kind: str, *operations: str) -> tuple[Choice, ...]:
    return tuple(any_of(f"{kind} {each}") for each in operations)


def named(message: type[Any], **fields: Any) -> Ask:
    return lambda w: message(subject=w.subject, **fields)


def in_group(message: type[Any], **fields: Any) -> Ask:
    return lambda w: message(subject=w.subject, group=w.group, **fields)


SCHEMA: Final = '{"type": "object", "properties": {"a": {"type": "integer"}}}'


def tomorrow_ms() -> int:
    return (time.time_ns() // 1_000_000) + 24 * 3_600_000


SEES_SUBJECT: Final = (describing("subject"),)
SEES_GROUP: Final = (describing("group"),)

META: Final[list[tuple[str, Row]]] = [
    row("Locate", named(meta.LocateRequest), SEES_SUBJECT),
    row(
        "Locate",
        lambda w: meta.LocateRequest(subject=w.name(), create_if_missing=True),
        on("subject", "create"),
    ),
    row("Watch", lambda _: meta.WatchRequest()),
    row(
        "CreateSubject",
        lambda w: meta.CreateSubjectRequest(settings=meta.SubjectSettings(name=w.name())),
        on("subject", "create"),
    ),
    row(
        "PlaceSubject",
        lambda w: meta.PlaceSubjectRequest(subject=w.subject, broker_groups=[w.broker_group]),
        on("subject", "configure"),
    ),
    row(
        "SetSubjectFlush",
        named(meta.SetSubjectFlushRequest, flush="sync"),
        on("subject", "configure"),
    ),
    row(
        "AlterSubject",
        named(meta.AlterSubjectRequest, retention_ms=3600000),
        on("subject", "configure"),
    ),
    row(
        "SetSubjectSchema",
        named(meta.SetSubjectSchemaRequest, format="json-schema", text=SCHEMA, dry_run=True),
        on("subject", "configure"),
    ),
    row("ListSubjectSchemas", named(meta.ListSubjectSchemasRequest), SEES_SUBJECT),
    row(
        "DeleteSubjectSchemas", named(meta.DeleteSubjectSchemasRequest), on("subject", "configure")
    ),
    row(
        "DeleteSubject",
        lambda w: fresh(w.new_subject(), lambda name: control.DropSubjectRequest(subject=name)),
        on("subject", "delete"),
    ),
    row(
        "PurgeSubject",
        lambda w: fresh(w.new_subject(), lambda name: control.DropSubjectRequest(subject=name)),
        on("subject", "delete"),
    ),
    row(
        "DeleteDeadLetters",
        lambda w: control.DropSubjectRequest(subject=DEAD_LETTERS + w.group),
        on("group", "delete"),
        UnknownSubject,
    ),
    row(
        "ListSubjects",
        lambda _: meta.ListSubjectsRequest(),
        (describing("subject", "cluster"),),
        is_shown=lambda a: bool(a.subjects),
    ),
    row("DescribeGroups", in_group(control.DescribeGroupsRequest), SEES_GROUP),
    row(
        "DescribeGroups",
        named(control.DescribeGroupsRequest),
        (describing("group", "cluster"),),
        is_shown=lambda a: bool(a.groups),
    ),
    row("ResetGroup", in_group(control.ResetGroupRequest, earliest=True), CONSUMING),
    row(
        "DeleteGroup",
        lambda w: control.DeleteGroupRequest(subject=w.subject, group=w.name()),
        on("group", "delete"),
        UnknownGroup,
    ),
    row(
        "SetGroupSettings",
        in_group(meta.SetGroupSettingsRequest, attempts_max=5),
        on("group", "configure"),
    ),
    row("DescribeGroupSettings", in_group(meta.DescribeGroupSettingsRequest), SEES_GROUP),
    row(
        "DescribeGroupSettings",
        lambda _: meta.DescribeGroupSettingsRequest(),
        (SEES_CLUSTER,),
        InvalidName,
    ),
    row(
        "SetPause",
        lambda w: meta.SetPauseRequest(
            pause=meta.Pause(kind="group", subject=w.subject, group=w.group), is_paused=True
        ),
        on("group", "configure"),
    ),
    row(
        "SetPause",
        lambda w: meta.SetPauseRequest(
            pause=meta.Pause(kind="client", name=w.name()), is_paused=True
        ),
        (OPERATES,),
    ),
    row(
        "ListPauses",
        lambda _: meta.ListPausesRequest(),
        (describing("group", "cluster"),),
        is_shown=lambda a: any(p.group for p in a.pauses),
    ),
    row(
        "ListPauses",
        lambda _: meta.ListPausesRequest(),
        (SEES_CLUSTER,),
        is_shown=lambda a: any(not p.group for p in a.pauses),
    ),
    row(
        "DescribeDeadLetters", lambda w: meta.DescribeDeadLettersRequest(group=w.group), SEES_GROUP
    ),
    row("DescribeDeadLetters", lambda _: meta.DescribeDeadLettersRequest(), (SEES_CLUSTER,)),
    row(
        "DescribeParked",
        lambda w: control.DescribeParkedRequest(subject=w.ordered, group=w.group),
        SEES_GROUP,
    ),
    row(
        "Unpark",
        lambda w: control.UnparkRequest(subject=w.ordered, group=w.group, key=b"k"),
        on("group", "configure"),
        UnknownPartition,
    ),
    row(
        "SyncMember",
        lambda w: meta.SyncMemberRequest(
            subject=w.ordered,
            group=w.group,
            consumer=w.name(),
            incarnation="i",
            lease_ms=1000,
            start="earliest",
            leaves=True,
        ),
        CONSUMING,
    ),
    row(
        "FindMessage",
        lambda w: control.FindMessageRequest(subject=w.subject, message_id=w.message_id),
        on("subject", "browse"),
    ),
    row("FindTime", named(control.FindTimeRequest, time_ms=1), SEES_SUBJECT),
    row(
        "TraceMessage",
        lambda w: control.TraceMessageRequest(subject=w.subject, broker_group=w.broker_group),
        on("subject", "browse"),
    ),
    row(
        "ShowDelayed",
        lambda w: fresh(w.delayed(), lambda i: delay.ShowDelayedRequest(id=i)),
        (any_of("subject produce", "subject browse"),),
    ),
    row(
        "ShowDelayed",
        lambda w: fresh(w.delayed(), lambda i: delay.ShowDelayedRequest(id=i)),
        on("subject", "browse"),
        is_shown=lambda a: bool(a.body),
    ),
    row(
        "CancelDelayed",
        lambda w: fresh(w.delayed(), lambda i: delay.CancelDelayedRequest(id=i)),
        on("subject", "produce"),
    ),
    row(
        "MoveDelayed",
        lambda w: fresh(
            w.delayed(), lambda i: delay.MoveDelayedRequest(id=i, due_ms=tomorrow_ms())
        ),
        on("subject", "produce"),
    ),
    row("ListDelayed", named(delay.ListDelayedRequest, messages_max=1), on("subject", "browse")),
    row(
        "ListDelayed",
        named(delay.ListDelayedRequest, messages_max=1, is_half=True),
        (any_of("subject produce", "subject browse"),),
    ),
    row("ListDelayed", lambda _: delay.ListDelayedRequest(messages_max=1), on("cluster", "browse")),
    row("DescribeDelays", lambda _: meta.DescribeDelaysRequest(), (SEES_CLUSTER,)),
    row(
        "ChangeRoute",
        lambda w: meta.ChangeRouteRequest(
            subject=w.ordered,
            from_version=w.route_version,
            split=meta.SplitOperation(partition=1, parts=2),
            dry_run=True,
        ),
        on("subject", "reshard"),
    ),
    row("DescribeRoute", lambda w: meta.DescribeRouteRequest(subject=w.ordered), SEES_SUBJECT),
    row("RouteHistory", lambda w: meta.RouteHistoryRequest(subject=w.ordered), SEES_SUBJECT),
    row(
        "SetReshardPolicy",
        lambda w: meta.SetReshardPolicyRequest(policy=meta.ReshardPolicy(subject=w.ordered)),
        on("subject", "reshard"),
    ),
    row("ExplainReshard", lambda w: meta.ExplainReshardRequest(subject=w.ordered), SEES_SUBJECT),
    row("DescribeCluster", lambda _: meta.DescribeClusterRequest(), (SEES_CLUSTER,)),
    row(
        "SetGroupMode",
        lambda w: meta.SetGroupModeRequest(broker_group=w.broker_group, mode="read-write"),
        (OPERATES,),
    ),
    row(
        "Transfer",
        lambda w: meta.GroupTransferRequest(broker_group=w.broker_group, to="nobody"),
        (OPERATES,),
        InvalidArgument,
    ),
    row(
        "ChangeReplicas",
        lambda w: meta.GroupChangeReplicasRequest(
            broker_group=w.broker_group, change=control.ChangeReplicasRequest(remove="nobody")
        ),
        (OPERATES,),
        InvalidArgument,
    ),
]


def rule_on(pattern: str, kind: str = "subject") -> Any:
    return access.AccessRule(
        principal="app:else", operations=["produce"], kind=kind, pattern=pattern
    )


ACCESS: Final[list[tuple[str, Row]]] = [
    row("WhoAmI", lambda _: access.WhoAmIRequest()),
    row("ListRules", lambda _: access.ListRulesRequest(), (ADMINISTERS,)),
    row("ListRules", lambda _: access.ListRulesRequest(namespace=NAMESPACE), (ITS_ADMINISTRATOR,)),
    row("PutRule", lambda w: access.PutRuleRequest(rule=rule_on(w.name())), (ITS_ADMINISTRATOR,)),
    row("PutRule", lambda _: access.PutRuleRequest(rule=rule_on("*")), (ADMINISTERS,)),
    row(
        "DeleteRule",
        lambda w: fresh(w.rule(), lambda i: access.DeleteRuleRequest(id=i)),
        (ITS_ADMINISTRATOR,),
    ),
    row("SetAccessMode", lambda _: access.SetAccessModeRequest(mode="enforce"), (ADMINISTERS,)),
    row(
        "TestAccess",
        lambda w: access.TestAccessRequest(
            principal="app:else", operation="produce", kind="subject", name=w.subject
        ),
        (ITS_ADMINISTRATOR,),
    ),
    row(
        "TestAccess",
        lambda _: access.TestAccessRequest(
            principal="app:else", operation="operate", kind="cluster"
        ),
        (ADMINISTERS,),
    ),
    row(
        "ChangeRole",
        lambda w: access.ChangeRoleRequest(name=w.name(), add=["app:else"]),
        (ITS_ADMINISTRATOR,),
    ),
    row(
        "ChangeRole",
        lambda _: access.ChangeRoleRequest(name="other", add=["app:else"]),
        (ADMINISTERS,),
    ),
    row(
        "CreateToken",
        lambda w: access.CreateTokenRequest(principal=f"app:{w.name()}"),
        (ITS_ADMINISTRATOR,),
    ),
    row(
        "CreateToken",
        lambda w: access.CreateTokenRequest(principal=f"op:{w.name()}"),
        (ADMINISTERS,),
    ),
    row("ListTokens", lambda _: access.ListTokensRequest(), (ADMINISTERS,)),
    row(
        "ListTokens", lambda _: access.ListTokensRequest(namespace=NAMESPACE), (ITS_ADMINISTRATOR,)
    ),
    row(
        "DeleteTokens",
        lambda w: fresh(w.token(), lambda i: access.DeleteTokensRequest(id=i)),
        (ITS_ADMINISTRATOR,),
    ),
    row(
        "PutQuota",
        lambda w: access.PutQuotaRequest(
            quota=access.AccessQuota(principal=f"app:{w.name()}", limits={"subjects": 5})
        ),
        (ITS_ADMINISTRATOR,),
    ),
    row(
        "PutQuota",
        lambda _: access.PutQuotaRequest(
            quota=access.AccessQuota(principal="app:else", limits={"subjects": 5})
        ),
        (ADMINISTERS,),
    ),
    row(
        "DeleteQuota",
        lambda w: fresh(w.quota(), lambda i: access.DeleteQuotaRequest(id=i)),
        (ADMINISTERS,),
    ),
    row("ListQuotas", lambda _: access.ListQuotasRequest(), (ADMINISTERS,)),
    row(
        "ListQuotas", lambda _: access.ListQuotasRequest(namespace=NAMESPACE), (ITS_ADMINISTRATOR,)
    ),
]

BROKER: Final[list[tuple[str, Row]]] = [
    row("DescribeQueues", lambda _: control.DescribeQueuesRequest(), (SEES_CLUSTER,)),
    row("DescribeGroups", lambda _: control.DescribeGroupsRequest(), (SEES_CLUSTER,)),
    row("DescribeReplica", lambda _: control.DescribeReplicaRequest(), (SEES_CLUSTER,)),
    row(
        "DescribeLanes", lambda w: control.DescribeLanesRequest(subject=w.ordered), (SEES_CLUSTER,)
    ),
    row(
        "DescribeParked",
        lambda w: control.DescribeParkedRequest(subject=w.ordered, group=w.group),
        (SEES_CLUSTER,),
    ),
    row("FindTime", named(control.FindTimeRequest, time_ms=1), (SEES_CLUSTER,)),
    row("ConfirmClock", lambda _: control.ConfirmClockRequest(time_ms=1), (OPERATES,), QmqError),
    row("Transfer", lambda _: control.TransferRequest(to="nobody"), (OPERATES,), QmqError),
    row(
        "ChangeReplicas",
        lambda _: control.ChangeReplicasRequest(remove="nobody"),
        (OPERATES,),
        QmqError,
    ),
    row("ResetGroup", in_group(control.ResetGroupRequest, earliest=True), CONSUMING, UnknownGroup),
    row(
        "ReadLog",
        lambda _: control.ReadLogRequest(bytes_max=100),
        on("cluster", "browse"),
        InvalidArgument,
    ),
    servers("DeleteGroup", in_group(control.DeleteGroupRequest)),
    servers("DropSubject", lambda w: control.DropSubjectRequest(subject=w.name())),
    servers("PurgeSubject", lambda w: control.DropSubjectRequest(subject=w.name())),
    servers(
        "FindMessage",
        lambda w: control.FindMessageRequest(subject=w.subject, message_id=w.message_id),
    ),
    servers(
        "TraceMessage",
        lambda w: control.TraceMessageRequest(subject=w.subject, broker_group=w.broker_group),
    ),
    servers("HoldWrites", lambda _: control.HoldWritesRequest(token="t", hold_ms=1)),
    servers("DescribeHold", lambda _: control.DescribeHoldRequest(token="t")),
    servers("ReleaseWrites", lambda _: control.ReleaseWritesRequest(token="t")),
    servers("Seal", lambda w: control.SealRequest(subject=w.name(), change_id="c", to_version=2)),
    servers("PlaceLanes", lambda w: control.PlaceLanesRequest(subject=w.name(), group=w.group)),
    servers(
        "InheritParked", lambda w: control.InheritParkedRequest(subject=w.name(), group=w.group)
    ),
    servers("Unpark", lambda w: control.UnparkRequest(subject=w.name(), group=w.group)),
]

DELAY: Final[list[tuple[str, Row]]] = [
    row("DescribeDelay", lambda _: delay.DescribeDelayRequest(), (SEES_CLUSTER,)),
    servers(
        "CancelDelayed", lambda w: fresh(w.delayed(), lambda i: delay.CancelDelayedRequest(id=i))
    ),
    servers(
        "MoveDelayed",
        lambda w: fresh(
            w.delayed(), lambda i: delay.MoveDelayedRequest(id=i, due_ms=tomorrow_ms())
        ),
    ),
    servers("ShowDelayed", lambda w: fresh(w.delayed(), lambda i: delay.ShowDelayedRequest(id=i))),
    servers("ListDelayed", named(delay.ListDelayedRequest, messages_max=1)),
    servers("DescribeSchedule", lambda _: delay.DescribeScheduleRequest()),
    servers("ReadSchedule", lambda _: delay.ReadScheduleRequest(file="missing", bytes_max=10)),
]

CALLS: Final = {
    "qmq.v1.Meta": META,
    "qmq.v1.Access": ACCESS,
    "qmq.v1.BrokerControl": BROKER,
    "qmq.v1.DelayControl": DELAY,
}
"""The rows of each service. A delay server's control port serves both of the last two."""

PRODUCES: Final = on("subject", "produce")
FRAMES: Final[list[tuple[FrameKind, Row]]] = [
    (FrameKind.PRODUCE, Row(World.batch, PRODUCES)),
    (FrameKind.PRODUCE_FAST, Row(World.batch, PRODUCES)),
    (FrameKind.PRODUCE_FLUSHED, Row(World.batch, PRODUCES)),
    (FrameKind.FIND, Row(lambda w: wire.Find(w.subject, 0, "0" * 16, 1, 1).pack(), PRODUCES)),
    (
        FrameKind.FETCH,
        Row(
            lambda w: wire.Fetch(w.subject, 0, 0, 9, 0, 1000, [], [], [], 0).pack(),
            on("subject", "browse"),
        ),
    ),
    (FrameKind.ATTACH, Row(World.attach, CONSUMING)),
    (FrameKind.LANE_ATTACH, Row(World.lane_attach, CONSUMING)),
    # These belong to a session, which only its own connection has: nobody else reaches it, with any
    # rights.
    (FrameKind.PULL, Row(lambda _: wire.pack_pull(wire.Pull(1, 1, 1, 1)), (), UnknownConsumer)),
    (
        FrameKind.SETTLE,
        Row(lambda _: pack_settle(1, [Settlement(0, 0, 0, 0)]), (), UnknownConsumer),
    ),
    (FrameKind.HEARTBEAT, Row(lambda _: wire.pack_session(1), (), UnknownConsumer)),
    (FrameKind.DETACH, Row(lambda _: wire.pack_detach(1), (), UnknownConsumer)),
    (
        FrameKind.LANE_PULL,
        Row(
            lambda _: wire.pack_lane_pull(wire.LanePull(FIRST_SESSION, 1, 1, 1, 1, 1)),
            (),
            UnknownConsumer,
        ),
    ),
    (
        FrameKind.LANE_SETTLE,
        Row(lambda _: wire.pack_lane_settle(FIRST_SESSION, 1, []), (), UnknownConsumer),
    ),
]


ANSWERS = {
    FrameKind.WELCOME,
    FrameKind.PRODUCED,
    FrameKind.ATTACHED,
    FrameKind.MESSAGES,
    FrameKind.FETCHED,
    FrameKind.OK,
    FrameKind.ERROR,
    FrameKind.SETTLED,
    FrameKind.LANE_ATTACHED,
    FrameKind.LANE_MESSAGES,
    FrameKind.FOUND,
}
