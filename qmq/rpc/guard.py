"""Authorises each call of a gRPC server: an interceptor.

The caller is identified by the call's token, or else by the connection's certificate. Changes
and refusals go to the audit log.

The permissions that each RPC needs are a table: method -> operations on the resources of its
request. A method that is not in the table is refused while the rules are enforced, and a test fails
for it.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextvars import ContextVar
from typing import Any, Final, NamedTuple

import grpc
from google.protobuf import text_format

from qmq.errors import Overloaded, QmqError
from qmq.rpc.channel import abort
from qmq.rpc.server import RequestBodies, late_stream, late_unary
from qmq.security.access import AccessControl, AccessState, Caller
from qmq.security.access_rules import (
    EVERY,
    Need,
    Operation,
    ResourceKind,
    on_cluster,
    on_group,
    on_namespace,
    on_subject,
)
from qmq.security.audit import AuditLog
from qmq.security.principal import (
    ANONYMOUS,
    APPLICATION,
    Principal,
    RpcPeer,
    RpcPeers,
    peer_address,
)
from qmq.security.quotas import RateMeter, need_of

O = Operation  # noqa: E741 - the table below is read by columns

Needs = Callable[[Any], tuple[Need, ...]]
"""Maps a request to its needs."""
NeedsNow = Callable[[Any, AccessState], tuple[Need, ...]]
"""Maps a request that names a record, and the current records, to its needs."""


class RpcRule(NamedTuple):
    """The permission that one method requires.

    is_change: whether it changes something; the audit log records changes. needs_now: the further
    permissions, which depend on the record that the request names. by_delayed_id: the operation on
    the subject of the delayed message whose id the request has. enough: maps what is needed to
    another need that is enough instead; then `lean` removes from the answer what that does not
    show. keeps: the answer's items that a principal may see without permission to describe the
    cluster: by field, the item -> its needs. servers_only: no rule grants it.
    """

    needs: Needs = lambda _: ()
    is_change: bool = False
    needs_now: NeedsNow | None = None
    by_delayed_id: Operation | None = None
    keeps: Mapping[str, Needs] | None = None
    servers_only: bool = False
    enough: Callable[[Any, Need], Need | None] | None = None
    lean: Callable[[Any], None] = lambda _: None
    is_lean: bool = False
    """Of one call: its caller has the other need only."""


def _subject(operation: Operation) -> Needs:
    return lambda request: (on_subject(operation, request.subject),)


def _subject_or_cluster(operation: Operation) -> Needs:
    """The needs of a request whose subject may be empty; it then concerns all subjects."""
    return lambda request: (
        on_subject(operation, request.subject) if request.subject else on_cluster(operation),
    )


def _group(operation: Operation) -> Needs:
    return lambda request: (on_group(operation, request.group),)


def _group_or_cluster(operation: Operation) -> Needs:
    return lambda request: (
        on_group(operation, request.group) if request.group else on_cluster(operation),
    )


def _cluster(operation: Operation) -> Needs:
    return lambda _: (on_cluster(operation),)


def _locate(request: Any) -> tuple[Need, ...]:
    return (on_subject(O.DESCRIBE, request.subject),)


def _deciding(request: Any, need: Need) -> Need | None:
    """Who may produce to a subject may cancel and move its delayed messages, so it may see which
    there are: all of a transaction that waits for its decision, and of others what CancelDelayed
    answers.
    """
    if need.kind is not ResourceKind.SUBJECT or not getattr(request, "is_half", True):
        return None
    return on_subject(O.PRODUCE, need.name)


def _without_body(answer: Any) -> None:
    if answer.state != "half":
        answer.ClearField("body")


def _consume(request: Any) -> tuple[Need, ...]:
    return on_subject(O.CONSUME, request.subject), on_group(O.CONSUME, request.group)


def _named_group(request: Any) -> tuple[Need, ...]:
    return (on_group(O.DESCRIBE, request.group),) if request.group else ()


def _pause(request: Any) -> tuple[Need, ...]:
    """The needs of a pause: a pause of a client stops all its consumption."""
    group = request.pause.group
    return (on_group(O.CONFIGURE, group) if group else on_cluster(O.OPERATE),)


def _put_rule(request: Any) -> tuple[Need, ...]:
    rule = request.rule
    named = rule.kind in (
        ResourceKind.SUBJECT.value,
        ResourceKind.GROUP.value,
        ResourceKind.NAMESPACE.value,
    )
    return (on_namespace(rule.pattern.removesuffix(EVERY) if named else ""),)


def _test(request: Any) -> tuple[Need, ...]:
    return (
        on_namespace(
            request.name.removesuffix(EVERY) if request.kind != ResourceKind.CLUSTER.value else ""
        ),
    )


def _known_rule(rule_id: str, state: AccessState) -> tuple[Need, ...]:
    """The need of a change to a rule. An unknown rule belongs to the cluster, so that others do not
    learn which rules exist.
    """
    known = state.rules.get(rule_id)
    return (on_cluster(O.ADMINISTER) if known is None else known.need,)


def _token_of(text: str) -> Need:
    """The need of a change to a token. A team administers the tokens of its applications; the
    cluster administers people's tokens.
    """
    kind, _, name = text.partition(":")
    return on_namespace(name if kind == APPLICATION else "")


def _known_tokens(request: Any, state: AccessState) -> tuple[Need, ...]:
    if not request.id:
        return (_token_of(request.principal),)
    known = state.tokens.get(request.id)
    return (on_cluster(O.ADMINISTER) if known is None else _token_of(str(known.principal)),)


def _known_quota(quota_id: str, state: AccessState) -> Need:
    """The need of a change to a quota. The cluster's quotas, also those for a namespace, are the
    cluster's to change.
    """
    known = state.quotas.get(quota_id)
    return known.need if known is not None and known.is_team else on_cluster(O.ADMINISTER)


def _namespace(request: Any) -> tuple[Need, ...]:
    return (on_namespace(request.namespace),)


META_RULES: Final[Mapping[str, RpcRule]] = {
    # subjects
    "Locate": RpcRule(_locate),  # creating a subject this way also needs `create`: see RpcGuard
    "Watch": RpcRule(
        keeps={"subjects": lambda name: (on_subject(O.DESCRIBE, name),)}
    ),  # every client watches; it learns no other names
    "CreateSubject": RpcRule(lambda r: (on_subject(O.CREATE, r.settings.name),), is_change=True),
    "PlaceSubject": RpcRule(_subject(O.CONFIGURE), is_change=True),
    "SetSubjectFlush": RpcRule(_subject(O.CONFIGURE), is_change=True),
    "AlterSubject": RpcRule(_subject(O.CONFIGURE), is_change=True),
    "SetSubjectSchema": RpcRule(_subject(O.CONFIGURE), is_change=True),
    "ListSubjectSchemas": RpcRule(_subject(O.DESCRIBE)),
    "DeleteSubjectSchemas": RpcRule(_subject(O.CONFIGURE), is_change=True),
    "DeleteSubject": RpcRule(_subject(O.DELETE), is_change=True),
    "PurgeSubject": RpcRule(_subject(O.DELETE), is_change=True),
    "DeleteDeadLetters": RpcRule(_subject(O.DELETE), is_change=True),
    "ListSubjects": RpcRule(
        keeps={"subjects": lambda item: (on_subject(O.DESCRIBE, item.settings.name),)}
    ),
    # groups
    "DescribeGroups": RpcRule(
        _named_group,
        keeps={
            "groups": lambda item: (on_group(O.DESCRIBE, item.group),),
            "readers": lambda item: (on_subject(O.DESCRIBE, item.subject),),
        },
    ),
    "ResetGroup": RpcRule(
        _consume, is_change=True
    ),  # as in Kafka: a principal that may consume may choose the position
    "DeleteGroup": RpcRule(_group(O.DELETE), is_change=True),
    "SetGroupSettings": RpcRule(_group(O.CONFIGURE), is_change=True),
    "DescribeGroupSettings": RpcRule(_group_or_cluster(O.DESCRIBE)),
    "SetPause": RpcRule(_pause, is_change=True),
    "ListPauses": RpcRule(
        keeps={
            "pauses": lambda item: (
                on_group(O.DESCRIBE, item.group) if item.group else on_cluster(O.DESCRIBE),
            ),
        }
    ),
    "DescribeDeadLetters": RpcRule(_group_or_cluster(O.DESCRIBE)),
    "DescribeParked": RpcRule(_group(O.DESCRIBE)),
    "Unpark": RpcRule(_group(O.CONFIGURE), is_change=True),
    "SyncMember": RpcRule(_consume),
    # messages
    "FindMessage": RpcRule(_subject(O.BROWSE)),
    "FindTime": RpcRule(_subject(O.DESCRIBE)),
    "TraceMessage": RpcRule(_subject(O.BROWSE)),
    "ShowDelayed": RpcRule(by_delayed_id=O.BROWSE, enough=_deciding, lean=_without_body),
    "CancelDelayed": RpcRule(by_delayed_id=O.PRODUCE, is_change=True),
    "MoveDelayed": RpcRule(by_delayed_id=O.PRODUCE, is_change=True),
    "ListDelayed": RpcRule(_subject_or_cluster(O.BROWSE), enough=_deciding),  # it shows no bodies
    "DescribeDelays": RpcRule(_cluster(O.DESCRIBE)),
    # routes
    "ChangeRoute": RpcRule(_subject(O.RESHARD), is_change=True),
    "DescribeRoute": RpcRule(_subject(O.DESCRIBE)),
    "RouteHistory": RpcRule(_subject(O.DESCRIBE)),
    "SetReshardPolicy": RpcRule(
        lambda r: (on_subject(O.RESHARD, r.policy.subject),), is_change=True
    ),
    "ExplainReshard": RpcRule(_subject(O.DESCRIBE)),
    # the cluster
    "DescribeCluster": RpcRule(_cluster(O.DESCRIBE)),
    "SetGroupMode": RpcRule(_cluster(O.OPERATE), is_change=True),
    "Transfer": RpcRule(_cluster(O.OPERATE), is_change=True),
    "ChangeReplicas": RpcRule(_cluster(O.OPERATE), is_change=True),
}
"""The rules for the metaserver's calls."""

ACCESS_RULES: Final[Mapping[str, RpcRule]] = {
    "WhoAmI": RpcRule(),
    "ListRules": RpcRule(_namespace),
    "PutRule": RpcRule(
        _put_rule, is_change=True
    ),  # the rule that it replaces must be the caller's, too: see AccessService
    "DeleteRule": RpcRule(is_change=True, needs_now=lambda r, state: _known_rule(r.id, state)),
    "SetAccessMode": RpcRule(_cluster(O.ADMINISTER), is_change=True),
    "TestAccess": RpcRule(_test),
    "ChangeRole": RpcRule(lambda r: (on_namespace(r.name),), is_change=True),
    "CreateToken": RpcRule(lambda r: (_token_of(r.principal),), is_change=True),
    "ListTokens": RpcRule(_namespace),
    "DeleteTokens": RpcRule(is_change=True, needs_now=_known_tokens),
    "PutQuota": RpcRule(
        lambda r: (need_of(r.quota.principal),), is_change=True
    ),  # see AccessService, as for PutRule
    "DeleteQuota": RpcRule(is_change=True, needs_now=lambda r, state: (_known_quota(r.id, state),)),
    "ListQuotas": RpcRule(_namespace),
}
"""The rules for the metaserver's administration of access."""

_SERVER: Final = RpcRule(servers_only=True)
_DESCRIBE: Final = RpcRule(_cluster(O.DESCRIBE))

CONTROL_RULES: Final[Mapping[str, RpcRule]] = {
    "DescribeReplica": _DESCRIBE,
    "DescribeQueues": _DESCRIBE,
    "DescribeGroups": _DESCRIBE,
    "DescribeLanes": _DESCRIBE,
    "DescribeParked": _DESCRIBE,
    "DescribeDelay": _DESCRIBE,
    "FindTime": _DESCRIBE,
    "ConfirmClock": RpcRule(_cluster(O.OPERATE), is_change=True),
    "Transfer": RpcRule(_cluster(O.OPERATE), is_change=True),
    "ChangeReplicas": RpcRule(_cluster(O.OPERATE), is_change=True),
    "ResetGroup": RpcRule(_consume, is_change=True),
    "ReadLog": RpcRule(
        _cluster(O.BROWSE)
    ),  # reads all messages of a broker group: `qmq spark` reads the action log with it
    **dict.fromkeys(
        (
            "DeleteGroup",
            "DropSubject",
            "PurgeSubject",
            "Seal",
            "PlaceLanes",
            "InheritParked",
            "Unpark",
        ),
        _SERVER,
    ),
    **dict.fromkeys(("FindMessage", "TraceMessage", "ReadSchedule", "DescribeSchedule"), _SERVER),
    **dict.fromkeys(
        ("HoldWrites", "DescribeHold", "ReleaseWrites"), _SERVER
    ),  # a backup shows the servers' token
    **dict.fromkeys(("CancelDelayed", "MoveDelayed", "ShowDelayed", "ListDelayed"), _SERVER),
}
"""The rules for the control ports of brokers and delay servers. Metaservers and replicas call
these; users call a metaserver.
"""

RPC_RULES: Final[Mapping[str, RpcRule]] = {
    **{f"/qmq.v1.Meta/{name}": rule for name, rule in META_RULES.items()},
    **{f"/qmq.v1.Access/{name}": rule for name, rule in ACCESS_RULES.items()},
    **{f"/qmq.v1.BrokerControl/{name}": rule for name, rule in CONTROL_RULES.items()},
    **{f"/qmq.v1.DelayControl/{name}": rule for name, rule in CONTROL_RULES.items()},
}
"""All rules by the method's full name."""


CALLER: Final[ContextVar[Caller]] = ContextVar("caller", default=Caller())  # noqa: B039 - a Caller does not change
"""The caller of the current call."""
WAIT_S_MAX: Final = 2.0
"""The longest wait of a call for its principal's quota; beyond that the call is refused."""
METERS_MAX: Final = 10_000
REQUEST_ID: Final = "x-request-id"
"""The metadata key with which a caller names its call; the audit log contains the name."""
REQUEST_ID_CHARS_MAX: Final = 64
_BEARER: Final = "Bearer "

KnowsSubject = Callable[[str], bool]
SubjectOfDelayed = Callable[[str], Awaitable[str]]
"""Maps the id of a delayed message to its subject. Raises QmqError."""


class RpcGuard(grpc.aio.ServerInterceptor):
    """`knows_subject` and `subject_of_delayed` are a metaserver's. `local_uid`: the only user that
    can open the server's socket in the file system, None where others can.
    """

    def __init__(
        self,
        access: AccessControl,
        knows_subject: KnowsSubject = lambda _: True,
        subject_of_delayed: SubjectOfDelayed | None = None,
        local_uid: Callable[[], int | None] = lambda: None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._access = access
        self._local_uid = local_uid
        self._knows_subject, self._subject_of_delayed = knows_subject, subject_of_delayed
        self._now_s = now_s
        self._meters: dict[Principal, RateMeter] = {}
        self._bodies = RequestBodies()
        self.peers: RpcPeers = {}
        """The peer of each connection that a relay accepted."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = str(handler_call_details.method)
        if handler.unary_unary is not None:
            return late_unary(handler, self._unary(method, handler.unary_unary))
        return late_stream(handler, self._stream(method, handler.unary_stream))

    def _unary(
        self, method: str, serve: Callable[[Any, Any], Awaitable[Any]]
    ) -> Callable[[Any], Awaitable[Any]]:
        async def guarded(context: Any) -> Any:
            try:
                caller, rule, request = await self._admit(method, context)
            except QmqError as failure:
                await abort(context, failure, method)
            answer = await self._served(method, request, context, caller, rule, serve)
            if rule.is_lean:
                rule.lean(answer)
            return self._kept(caller, rule, answer) if rule.keeps is not None else answer

        return guarded

    def _stream(
        self, method: str, serve: Callable[[Any, Any], AsyncIterator[Any]]
    ) -> Callable[[Any], AsyncIterator[Any]]:
        async def guarded(context: Any) -> AsyncIterator[Any]:
            try:
                caller, rule, request = await self._admit(method, context)
            except QmqError as failure:
                await abort(context, failure, method)
            async for each in serve(request, context):
                try:
                    self._access.check(caller)
                except QmqError as failure:
                    await abort(context, failure, method)
                if rule.keeps is None:
                    yield each
                    continue
                whole = type(each)()
                whole.CopyFrom(each)  # other callers get the same answer
                kept = self._kept(caller, rule, whole)
                if kept.ByteSize() or not each.ByteSize():
                    yield kept

        return guarded

    # --- before -----------------------------------------------------------------------------------

    async def _admit(self, method: str, context: Any) -> tuple[Caller, RpcRule, Any]:
        """Who calls, what that needs, and then the request."""
        caller = self._identify(context)._replace(request=_request_id(context))
        CALLER.set(caller)
        rule = RPC_RULES.get(method)
        request = await self._bodies.read(
            context, caller.address if caller.principal == ANONYMOUS else ""
        )
        if rule is None or rule.servers_only:
            peer = self._peer(context)
            self._access.require_server(
                caller,
                _short(method),
                peer.names if peer is not None and peer.is_encrypted else None,
            )
            return caller, rule or RpcRule(), request
        if self._access.is_on and not caller.principal.is_server:
            needs = await self._needs(method, request, rule)
            other = rule.enough(request, needs[0]) if rule.enough is not None else None
            if other is None or self._may(caller, needs[0]) or not self._may(caller, other):
                self._access.require(caller, _short(method), *needs)
            elif self._access.is_enforced:
                rule = rule._replace(is_lean=True)
        await self._slow_down(caller.principal)
        return caller, rule, request

    def _may(self, caller: Caller, need: Need) -> bool:
        self._access.check(caller)
        return self._access.decide(caller.principal, need).is_allowed

    async def _slow_down(self, principal: Principal) -> None:
        """Delay a principal that exceeds its request quota. Raises Overloaded if the wait would be
        too long.
        """
        quota = self._access.quota(principal)
        if quota is None or not quota.requests_per_s:
            return
        meter = self._meters.get(principal)
        if meter is None or meter.rate != quota.requests_per_s:
            if len(self._meters) >= METERS_MAX:
                self._meters.clear()
            meter = self._meters[principal] = RateMeter(quota.requests_per_s, self._now_s())
        owed_s = meter.owes(self._now_s())
        if owed_s > WAIT_S_MAX:
            failure = Overloaded(
                f"{principal} asks more often than its quota {quota.id!r} allows "
                f"({quota.requests_per_s} requests/s)"
            )
            failure.retry_after_ms = int(owed_s * 1000)
            raise failure
        await asyncio.sleep(meter.take(1, self._now_s()))

    def _identify(self, context: Any) -> Caller:
        metadata = {
            key: value
            for key, value in context.invocation_metadata() or ()
            if isinstance(value, str)
        }
        shown = metadata.get("authorization", "")
        token = shown[len(_BEARER) :] if shown.startswith(_BEARER) else ""
        address, peer = peer_address(context.peer(), self.peers), self._peer(context)
        if peer is not None:
            return self._access.identify(peer.names, token, address)
        uid = self._local_uid() if address == "unix" else None
        return self._access.identify(None, token, address, uid)

    def _peer(self, context: Any) -> RpcPeer | None:
        """The peer of a relayed connection."""
        return self.peers.get(context.peer().rpartition("/")[2])

    def refused(self, address: str, why: str) -> None:
        """Record that TLS refused a peer. Equal refusals are counted, because a stranger can repeat
        them without limit.
        """
        self._access.refused(Caller(address=address), "TLS handshake", why)

    async def _needs(self, method: str, request: Any, rule: RpcRule) -> tuple[Need, ...]:
        needs = rule.needs(request)
        if rule.needs_now is not None:
            needs = (*needs, *rule.needs_now(request, self._access.state))
        if (
            method.endswith("/Locate")
            and request.create_if_missing
            and not self._knows_subject(request.subject)
        ):
            needs = (*needs, on_subject(Operation.CREATE, request.subject))
        if rule.by_delayed_id is not None and self._subject_of_delayed is not None:
            try:
                needs = (
                    *needs,
                    on_subject(rule.by_delayed_id, await self._subject_of_delayed(request.id)),
                )
            except QmqError:
                needs = (
                    *needs,
                    on_cluster(Operation.DESCRIBE),
                )  # Callers without permission must not learn whether the message exists.
        return needs

    # --- behind -----------------------------------------------------------------------------------

    async def _served(
        self,
        method: str,
        request: Any,
        context: Any,
        caller: Caller,
        rule: RpcRule,
        serve: Callable[[Any, Any], Awaitable[Any]],
    ) -> Any:
        if not rule.is_change:
            return await serve(request, context)
        on, details = (
            _on(rule, request),
            text_format.MessageToString(request, as_one_line=True, as_utf8=True),
        )
        try:
            answer = await serve(request, context)
        except BaseException:
            audited(
                self._access.audit,
                caller,
                _short(method),
                on,
                "failed",
                details=details,
                error=str(context.details() or ""),
            )
            raise
        audited(self._access.audit, caller, _short(method), on, "done", details=details)
        return answer

    def _kept(self, caller: Caller, rule: RpcRule, answer: Any) -> Any:
        """The answer without the items that the caller may not see."""
        assert rule.keeps is not None
        if not self._access.is_enforced or caller.principal.is_server:
            return answer
        decide = self._access.decide
        if decide(caller.principal, on_cluster(Operation.DESCRIBE)).is_allowed:
            return answer
        for field, needs in rule.keeps.items():
            kept = [
                each
                for each in getattr(answer, field)
                if all(decide(caller.principal, need).is_allowed for need in needs(each))
            ]
            answer.ClearField(field)
            getattr(answer, field).extend(kept)
        return answer


def audited(
    audit: AuditLog, caller: Caller, action: str, on: str, result: str, **more: object
) -> None:
    """Write an administrative act to the audit log."""
    audit.write(
        principal=str(caller.principal),
        how=caller.how,
        address=caller.address,
        request=caller.request,
        action=action,
        on=on,
        result=result,
        **more,
    )


def _on(rule: RpcRule, request: Any) -> str:
    """The resource of a change."""
    needs = rule.needs(request)
    named = ", ".join(f"{each.kind.value} {each.name}".strip() for each in needs)
    return named or str(getattr(request, "id", ""))


def _request_id(context: Any) -> str:
    """The id that the caller gave the call, or else a new one."""
    named = next(
        (value for key, value in context.invocation_metadata() or () if key == REQUEST_ID), ""
    )
    is_sane = (
        isinstance(named, str) and 0 < len(named) <= REQUEST_ID_CHARS_MAX and named.isprintable()
    )
    return named if is_sane else secrets.token_hex(8)


def _short(method: str) -> str:
    return method.rpartition("/")[2]
