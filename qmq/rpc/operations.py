"""The permissions that each RPC needs, as a table: method -> operations on the resources of its request. Pure.

A method that is not in the table is refused while the rules are enforced, and a test fails for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from qmq.security.access_rules import EVERY, Need, Operation, ResourceKind, on_cluster, on_group, on_namespace, on_subject
from qmq.security.access_state import AccessState
from qmq.security.principal import APPLICATION
from qmq.security.quotas import need_of

O = Operation  # noqa: E741 - the table below is read by columns

Needs = Callable[[Any], tuple[Need, ...]]
"""Maps a request to its needs."""
NeedsNow = Callable[[Any, AccessState], tuple[Need, ...]]
"""Maps a request that names a record, and the current records, to its needs."""


class RpcRule(NamedTuple):
    """The permission that one method requires.

    is_change: whether it changes something; the audit log records changes.
    needs_now: the further permissions, which depend on the record that the request names.
    by_delayed_id: the operation on the subject of the delayed message whose id the request has.
    enough: maps what is needed to another need that is enough instead; then `lean` removes from the answer what that does not show.
    keeps: the answer's items that a principal may see without permission to describe the cluster; (the field, the item -> its needs).
    servers_only: no rule grants it.
    """

    needs: Needs = lambda _: ()
    is_change: bool = False
    needs_now: NeedsNow | None = None
    by_delayed_id: Operation | None = None
    keeps: tuple[str, Needs] | None = None
    servers_only: bool = False
    enough: Callable[[Any, Need], Need | None] | None = None
    lean: Callable[[Any], None] = lambda _: None
    is_lean: bool = False
    """Of one call: its caller has the other need only."""


def _subject(operation: Operation) -> Needs:
    return lambda request: (on_subject(operation, request.subject),)


def _subject_or_cluster(operation: Operation) -> Needs:
    """The needs of a request whose subject may be empty; it then concerns all subjects."""
    return lambda request: (on_subject(operation, request.subject) if request.subject else on_cluster(operation),)


def _group(operation: Operation) -> Needs:
    return lambda request: (on_group(operation, request.group),)


def _group_or_cluster(operation: Operation) -> Needs:
    return lambda request: (on_group(operation, request.group) if request.group else on_cluster(operation),)


def _cluster(operation: Operation) -> Needs:
    return lambda _: (on_cluster(operation),)


def _locate(request: Any) -> tuple[Need, ...]:
    return (on_subject(O.DESCRIBE, request.subject),)


def _deciding(request: Any, need: Need) -> Need | None:
    """Who may produce to a subject may cancel and move its delayed messages, so it may see which there are: all of a transaction that waits
    for its decision, and of others what CancelDelayed answers.
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
    named = rule.kind in (ResourceKind.SUBJECT.value, ResourceKind.GROUP.value, ResourceKind.NAMESPACE.value)
    return (on_namespace(rule.pattern.removesuffix(EVERY) if named else ""),)


def _test(request: Any) -> tuple[Need, ...]:
    return (on_namespace(request.name.removesuffix(EVERY) if request.kind != ResourceKind.CLUSTER.value else ""),)


def _known_rule(rule_id: str, state: AccessState) -> tuple[Need, ...]:
    """The need of a change to a rule. An unknown rule belongs to the cluster, so that others do not learn which rules exist."""
    known = state.rules.get(rule_id)
    return (on_cluster(O.ADMINISTER) if known is None else known.need,)


def _token_of(text: str) -> Need:
    """The need of a change to a token. A team administers the tokens of its applications; the cluster administers people's tokens."""
    kind, _, name = text.partition(":")
    return on_namespace(name if kind == APPLICATION else "")


def _known_tokens(request: Any, state: AccessState) -> tuple[Need, ...]:
    if not request.id:
        return (_token_of(request.principal),)
    known = state.tokens.get(request.id)
    return (on_cluster(O.ADMINISTER) if known is None else _token_of(str(known.principal)),)


def _known_quota(quota_id: str, state: AccessState) -> Need:
    """The need of a change to a quota. The cluster's quotas, also those for a namespace, are the cluster's to change."""
    known = state.quotas.get(quota_id)
    return known.need if known is not None and known.is_team else on_cluster(O.ADMINISTER)


def _namespace(request: Any) -> tuple[Need, ...]:
    return (on_namespace(request.namespace),)


META_RULES: Final[Mapping[str, RpcRule]] = {
    # subjects
    "Locate": RpcRule(_locate),  # creating a subject this way also needs `create`: see RpcGuard
    "Watch": RpcRule(keeps=("subjects", lambda name: (on_subject(O.DESCRIBE, name),))),  # every client watches; it learns no other names
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
    "ListSubjects": RpcRule(keeps=("subjects", lambda item: (on_subject(O.DESCRIBE, item.settings.name),))),
    # groups
    "DescribeGroups": RpcRule(_named_group, keeps=("groups", lambda item: (on_group(O.DESCRIBE, item.group),))),
    "ResetGroup": RpcRule(_consume, is_change=True),  # as in Kafka: a principal that may consume may choose the position
    "DeleteGroup": RpcRule(_group(O.DELETE), is_change=True),
    "SetGroupSettings": RpcRule(_group(O.CONFIGURE), is_change=True),
    "DescribeGroupSettings": RpcRule(_group_or_cluster(O.DESCRIBE)),
    "SetPause": RpcRule(_pause, is_change=True),
    "ListPauses": RpcRule(keeps=("pauses", lambda item: (on_group(O.DESCRIBE, item.group) if item.group else on_cluster(O.DESCRIBE),))),
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
    "SetReshardPolicy": RpcRule(lambda r: (on_subject(O.RESHARD, r.policy.subject),), is_change=True),
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
    "PutRule": RpcRule(_put_rule, is_change=True),  # the rule that it replaces must be the caller's, too: see AccessService
    "DeleteRule": RpcRule(is_change=True, needs_now=lambda r, state: _known_rule(r.id, state)),
    "SetAccessMode": RpcRule(_cluster(O.ADMINISTER), is_change=True),
    "TestAccess": RpcRule(_test),
    "ChangeRole": RpcRule(lambda r: (on_namespace(r.name),), is_change=True),
    "CreateToken": RpcRule(lambda r: (_token_of(r.principal),), is_change=True),
    "ListTokens": RpcRule(_namespace),
    "DeleteTokens": RpcRule(is_change=True, needs_now=_known_tokens),
    "PutQuota": RpcRule(lambda r: (need_of(r.quota.principal),), is_change=True),  # see AccessService, as for PutRule
    "DeleteQuota": RpcRule(is_change=True, needs_now=lambda r, state: (_known_quota(r.id, state),)),
    "ListQuotas": RpcRule(_namespace),
}
"""The rules for the metaserver's administration of access."""

_SERVER: Final = RpcRule(servers_only=True)
_OPERATE: Final = RpcRule(_cluster(O.OPERATE))
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
    "ReadLog": RpcRule(_cluster(O.BROWSE)),  # reads all messages of a broker group: `qmq spark` reads the action log with it
    **dict.fromkeys(("DeleteGroup", "DropSubject", "PurgeSubject", "Seal", "PlaceLanes", "InheritParked", "Unpark"), _SERVER),
    **dict.fromkeys(("FindMessage", "TraceMessage", "ReadSchedule", "DescribeSchedule"), _SERVER),
    **dict.fromkeys(("HoldWrites", "DescribeHold", "ReleaseWrites"), _SERVER),  # a backup shows the servers' token
    **dict.fromkeys(("CancelDelayed", "MoveDelayed", "ShowDelayed", "ListDelayed"), _SERVER),
}
"""The rules for the control ports of brokers and delay servers. Metaservers and replicas call these; users call a metaserver."""

RPC_RULES: Final[Mapping[str, RpcRule]] = {
    **{f"/qmq.v1.Meta/{name}": rule for name, rule in META_RULES.items()},
    **{f"/qmq.v1.Access/{name}": rule for name, rule in ACCESS_RULES.items()},
    **{f"/qmq.v1.BrokerControl/{name}": rule for name, rule in CONTROL_RULES.items()},
    **{f"/qmq.v1.DelayControl/{name}": rule for name, rule in CONTROL_RULES.items()},
}
"""All rules by the method's full name."""
