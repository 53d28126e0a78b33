"""Administration of access: rules, roles, tokens, quotas and the mode. Each change is one
compare-and-swap in the coordination store.

The administrator of a namespace changes records below its prefix (qmq/rpc/guard.py says what a
request needs).

A caller cannot lock itself out: the service refuses a change of a rule, a role or the mode after
which the caller could not make the same change. Principals named by `--admins` always have
`administer`; while the mode is `off`, every caller has it.

A namespace has at most `NAMESPACE_RECORDS_MAX` rules, roles and tokens each, so that one team
leaves room for the others.

`follow_access` gives any server access control that follows the coordination store.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Final

from qmq_coordination.access_records import (
    MODE,
    ModeRecord,
    RoleRecord,
    decode_quota,
    decode_role,
    decode_rule,
    encode_mode,
    encode_quota,
    encode_role,
    encode_rule,
    encode_token,
    ensure_server_token,
    quota_key,
    role_key,
    rule_key,
    token_key,
)
from qmq_coordination.coordination_store import (
    CoordinationStore,
    Delete,
    KeyValue,
    Put,
    absent,
    unchanged,
)
from qmq_coordination.view import ClusterView, ViewChange

from qmq.errors import InvalidArgument, QmqError, QuotaExceeded, RouteConflict
from qmq.model import check_name
from qmq.process.event_loop import Clock, SystemClock
from qmq.proto.v1 import access_pb2 as pb
from qmq.proto.v1 import access_pb2_grpc
from qmq.rpc.channel import answering
from qmq.rpc.guard import CALLER
from qmq.rpc.network import Network, TokenNetwork
from qmq.security.access import AccessConfig, AccessControl, Caller, Verify
from qmq.security.access_rules import (
    RULES_MAX,
    AccessMode,
    AccessRule,
    Need,
    Operation,
    ResourceKind,
    RuleBook,
    on_cluster,
    on_namespace,
)
from qmq.security.audit import AuditLog
from qmq.security.principal import APPLICATION, Principal
from qmq.security.quotas import Quota
from qmq.security.tokens import TokenRecord, new_token

TRIES: Final = 10
TOKENS_MAX: Final = 10_000
NAMESPACE_RECORDS_MAX: Final = 1_000


class AccessService(access_pb2_grpc.AccessServicer):
    def __init__(
        self,
        store: CoordinationStore,
        access: AccessControl,
        clock: Clock,
        open_links: Callable[[], list[str]] = list,
    ) -> None:
        """`open_links` returns addresses of servers to which tokens must not be shown, because they
        would travel in plain text.
        """
        self._store, self._access, self._clock, self._open_links = store, access, clock, open_links

    # --- reading ----------------------------------------------------------------------------------

    @answering
    async def WhoAmI(self, request: pb.WhoAmIRequest) -> pb.WhoAmIResponse:
        caller, book = CALLER.get(), self._access.state.book
        return pb.WhoAmIResponse(
            principal=str(caller.principal),
            how=caller.how,
            roles=book.roles_of(caller.principal),
            mode=self._access.mode.value,
            ends_ms=caller.ends_ms,
            is_admin=self._may(caller, book, on_cluster(Operation.ADMINISTER)),
        )

    @answering
    async def ListRules(self, request: pb.ListRulesRequest) -> pb.ListRulesResponse:
        state, prefix = self._access.state, request.namespace
        return pb.ListRulesResponse(
            rules=[
                _rule_message(rule)
                for _, rule in sorted(state.rules.items())
                if rule.need.name.startswith(prefix)
            ],
            roles=[
                pb.Role(name=name, members=sorted(members))
                for name, members in sorted(state.roles.items())
                if name.startswith(prefix)
            ],
            mode=state.mode.value,
        )

    @answering
    async def TestAccess(self, request: pb.TestAccessRequest) -> pb.TestAccessResponse:
        principal = Principal.parse(request.principal)
        need = Need(operation_of(request.operation), kind_of(request.kind), request.name)
        if need.kind is ResourceKind.NAMESPACE and need.operation is not Operation.ADMINISTER:
            raise InvalidArgument(
                "a namespace has one operation, administer: ask about "
                f"{need.operation.value} on a subject or a group"
            )
        decision, book = self._access.decide(principal, need), self._access.state.book
        rule = None if decision.rule is None else _rule_message(decision.rule)
        return pb.TestAccessResponse(
            is_allowed=decision.is_allowed,
            rule=rule,
            roles=book.roles_of(principal),
            by=decision.by,
        )

    @answering
    async def ListTokens(self, request: pb.ListTokensRequest) -> pb.ListTokensResponse:
        return pb.ListTokensResponse(
            tokens=[
                _token_message(each)
                for _, each in sorted(self._access.state.tokens.items())
                if _is_below(each, request.namespace)
            ]
        )

    @answering
    async def ListQuotas(self, request: pb.ListQuotasRequest) -> pb.ListQuotasResponse:
        return pb.ListQuotasResponse(
            quotas=[
                _quota_message(each)
                for _, each in sorted(self._access.state.quotas.items())
                if each.is_below(request.namespace)
            ]
        )

    # --- rules and roles --------------------------------------------------------------------------

    @answering
    async def PutRule(self, request: pb.PutRuleRequest) -> pb.AccessRule:
        rule = self._rule_of(request.rule)
        state = self._access.state
        if len(state.rules) >= RULES_MAX and rule.id not in state.rules:
            raise InvalidArgument(
                f"there are already {RULES_MAX} rules, the limit: replace rules by patterns "
                "and roles"
            )
        self._require_room(
            "rules",
            rule.need.name,
            (each.need.name for name, each in state.rules.items() if name != rule.id),
        )
        self._require_way_back(RuleBook({**state.rules, rule.id: rule}, state.roles), rule.need)

        def changed(item: KeyValue | None) -> bytes:
            self._require_stored("PutRule", rule.id, item)
            return encode_rule(rule)

        await self._swap(rule_key(rule.id), changed)
        return _rule_message(rule)

    @answering
    async def DeleteRule(self, request: pb.DeleteRuleRequest) -> pb.DeleteRuleResponse:
        state = self._access.state
        known = state.rules.get(request.id)
        if known is None:
            raise InvalidArgument(f"there is no rule {request.id!r}: `qmq acl list` shows them")
        left = {name: each for name, each in state.rules.items() if name != request.id}
        self._require_way_back(RuleBook(left, state.roles), known.need)
        await self._swap(
            rule_key(request.id), lambda item: self._require_stored("DeleteRule", request.id, item)
        )
        return pb.DeleteRuleResponse()

    @answering
    async def ChangeRole(self, request: pb.ChangeRoleRequest) -> pb.Role:
        check_name("role", request.name)
        add, remove = (
            {str(Principal.parse(each)) for each in names}
            for names in (request.add, request.remove)
        )
        state, members = self._access.state, frozenset[str]()
        self._require_room(
            "roles", request.name, (name for name in state.roles if name != request.name)
        )
        changed_roles = {
            **state.roles,
            request.name: (state.roles.get(request.name, members) | add) - remove,
        }
        self._require_way_back(RuleBook(state.rules, changed_roles), on_namespace(request.name))

        def changed(item: KeyValue | None) -> bytes | None:
            nonlocal members
            known = frozenset() if item is None else decode_role(request.name, item.value).members
            members = (known | add) - remove
            return encode_role(RoleRecord(request.name, members)) if members else None

        await self._swap(role_key(request.name), changed)
        return pb.Role(name=request.name, members=sorted(members))

    @answering
    async def SetAccessMode(self, request: pb.SetAccessModeRequest) -> pb.SetAccessModeResponse:
        try:
            mode = AccessMode(request.mode)
        except ValueError:
            raise InvalidArgument(
                f"the mode is off, watch or enforce, not {request.mode!r}"
            ) from None
        state = self._access.state
        if mode is AccessMode.ENFORCE:
            self._require_way_back(state.book, on_cluster(Operation.ADMINISTER), mode)
            if addresses := self._open_links():
                raise InvalidArgument(
                    f"servers could not authenticate to {addresses[0]}: rules can be "
                    "enforced on one machine, or with TLS between machines"
                )
        await ensure_server_token(self._store)
        before, caller = state.mode, CALLER.get()
        record = ModeRecord(mode, str(caller.principal), self._clock.time_ms())
        await self._swap(MODE, lambda _: encode_mode(record))
        return pb.SetAccessModeResponse(mode_before=before.value)

    def _require_stored(self, action: str, rule_id: str, item: KeyValue | None) -> None:
        """Check that the caller may change the rule that is replaced. The guard used the view's
        rule, which may be older. Raises AccessDenied.
        """
        if item is None:
            return
        try:
            rule = decode_rule(rule_id, item.value)
        except (ValueError, TypeError, KeyError, AttributeError, QmqError):
            rule = None
        self._access.require(
            CALLER.get(), action, on_cluster(Operation.ADMINISTER) if rule is None else rule.need
        )

    def _require_room(self, what: str, name: str, names: Iterable[str]) -> None:
        """Raise QuotaExceeded if the widest namespace of the new record's name is full."""
        rules = self._access.state.rules.values()
        around = [
            each.pattern
            for each in rules
            if each.kind is ResourceKind.NAMESPACE and name.startswith(each.pattern)
        ]
        if around:
            widest = min(around, key=len)
            if sum([each.startswith(widest) for each in names]) >= NAMESPACE_RECORDS_MAX:
                raise QuotaExceeded(
                    f"namespace {widest} already has {NAMESPACE_RECORDS_MAX} {what}, the "
                    "limit: remove unused ones"
                )

    def _rule_of(self, message: pb.AccessRule) -> AccessRule:
        operations = frozenset(map(operation_of, message.operations))
        kind, pattern = kind_of(message.kind), message.pattern or "*"
        by, at_ms = str(CALLER.get().principal), self._clock.time_ms()
        name = message.id or _id_of(message, operations, pattern)
        return AccessRule(
            name, message.is_deny, message.principal, operations, kind, pattern, by, at_ms
        ).check()

    # --- tokens and quotas ------------------------------------------------------------------------

    @answering
    async def CreateToken(self, request: pb.CreateTokenRequest) -> pb.CreateTokenResponse:
        now_ms = self._clock.time_ms()
        if request.ends_ms and request.ends_ms <= now_ms:
            raise InvalidArgument(
                "a token's end must be in the future; give none for a token without an end"
            )
        if len(self._access.state.tokens) >= TOKENS_MAX:
            raise InvalidArgument(
                f"there are already {TOKENS_MAX} tokens, the limit: revoke unused tokens"
            )
        by, principal = str(CALLER.get().principal), Principal.parse(request.principal)
        self._require_room(
            "tokens",
            principal.name,
            (each.principal.name for each in self._access.state.tokens.values()),
        )
        made = new_token(principal, by=by, now_ms=now_ms, ends_ms=request.ends_ms)
        await self._swap(token_key(made.record.id), lambda _: encode_token(made.record))
        return pb.CreateTokenResponse(token=made.token, info=_token_message(made.record))

    @answering
    async def DeleteTokens(self, request: pb.DeleteTokensRequest) -> pb.DeleteTokensResponse:
        if bool(request.id) is bool(request.principal):
            raise InvalidArgument("name the token by its id or its principal")
        tokens = self._access.state.tokens.values()
        found = sorted(
            each.id
            for each in tokens
            if each.id == request.id or str(each.principal) == request.principal
        )
        if not found:
            raise InvalidArgument("there is no such token: `qmq user list` shows them")
        for each in found:
            await self._swap(token_key(each), lambda _: None)
        return pb.DeleteTokensResponse(ids=found)

    @answering
    async def PutQuota(self, request: pb.PutQuotaRequest) -> pb.AccessQuota:
        message, state = request.quota, self._access.state
        is_team = self._access.is_enforced and not self._may(
            CALLER.get(), state.book, on_cluster(Operation.ADMINISTER)
        )
        name = message.id or f"{'team' if is_team else 'quota'}-{_digest(message.principal)}"
        quota = Quota.of(
            check_name("quota", name), message.principal, dict(message.limits), is_team=is_team
        )
        if is_team:
            of_teams = (
                each.need.name
                for other, each in state.quotas.items()
                if each.is_team and other != name
            )
            self._require_room("quotas", quota.need.name, of_teams)

        def changed(item: KeyValue | None) -> bytes:
            self._require_stored_quota("PutQuota", name, item)
            return encode_quota(quota)

        await self._swap(quota_key(name), changed)
        return _quota_message(quota)

    @answering
    async def DeleteQuota(self, request: pb.DeleteQuotaRequest) -> pb.DeleteQuotaResponse:
        if request.id not in self._access.state.quotas:
            raise InvalidArgument(f"there is no quota {request.id!r}: `qmq quota list` shows them")
        await self._swap(
            quota_key(request.id),
            lambda item: self._require_stored_quota("DeleteQuota", request.id, item),
        )
        return pb.DeleteQuotaResponse()

    def _require_stored_quota(self, action: str, quota_id: str, item: KeyValue | None) -> None:
        """Check that the caller may change the quota that is replaced. Raises AccessDenied."""
        if item is None:
            return
        try:
            known = decode_quota(quota_id, item.value)
        except (ValueError, TypeError, KeyError, AttributeError, QmqError):
            known = None
        is_team = known is not None and known.is_team
        self._access.require(
            CALLER.get(),
            action,
            known.need if known is not None and is_team else on_cluster(Operation.ADMINISTER),
        )

    # --- how --------------------------------------------------------------------------------------

    def _may(self, caller: Caller, book: RuleBook, need: Need) -> bool:
        return (
            str(caller.principal) in self._access.config.admins
            or book.decide(caller.principal, need).is_allowed
        )

    def _require_way_back(self, book: RuleBook, need: Need, mode: AccessMode | None = None) -> None:
        """Raise InvalidArgument if the caller could not make this change again. The change needs
        the permission `need`.
        """
        caller = CALLER.get()
        if (mode or self._access.mode) is AccessMode.ENFORCE and not self._may(caller, book, need):
            where = f"{need.kind.value} {need.name}".strip()
            raise InvalidArgument(
                f"after this change {caller.principal} could no longer administer the {where}: "
                f"`qmq acl allow PRINCIPAL administer {where}` for yourself first, or start "
                "the servers with --admins PRINCIPAL"
            )

    async def _swap(self, key: str, changed: Callable[[KeyValue | None], bytes | None]) -> None:
        """Replace a value by compare-and-swap. Raises RouteConflict if others keep changing the
        same key, CoordinationError.
        """
        for _ in range(TRIES):
            item = await self._store.get(key)
            value = changed(item)
            if value is None and item is None:
                return
            condition = absent(key) if item is None else unchanged(item)
            if (
                await self._store.txn(
                    [condition], [Delete(key) if value is None else Put(key, value)]
                )
            ).succeeded:
                return
        raise RouteConflict(f"{key} changed at the same time: try again")


def operation_of(text: str) -> Operation:
    """Raises InvalidArgument."""
    try:
        return Operation(text)
    except ValueError:
        known = ", ".join(each.value for each in Operation if each is not Operation.REPLICATE)
        raise InvalidArgument(f"an operation is one of {known}, not {text!r}") from None


def kind_of(text: str) -> ResourceKind:
    """Raises InvalidArgument."""
    try:
        return ResourceKind(text)
    except ValueError:
        raise InvalidArgument(
            f"a resource is a subject, a group, a namespace or the cluster, not {text!r}"
        ) from None


def _id_of(message: pb.AccessRule, operations: frozenset[Operation], pattern: str) -> str:
    """The id of a rule. Equal rules have the same id, so a rule that is added twice exists once."""
    parts = (
        str(message.is_deny),
        message.principal,
        ",".join(sorted(each.value for each in operations)),
        message.kind,
        pattern,
    )
    return _digest("\n".join(parts))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _rule_message(rule: AccessRule) -> pb.AccessRule:
    return pb.AccessRule(
        id=rule.id,
        is_deny=rule.is_deny,
        principal=rule.principal,
        operations=sorted(each.value for each in rule.operations),
        kind=rule.kind.value,
        pattern=rule.pattern,
        by=rule.by,
        at_ms=rule.at_ms,
    )


def _token_message(record: TokenRecord) -> pb.TokenInfo:
    return pb.TokenInfo(
        id=record.id,
        principal=str(record.principal),
        ends_ms=record.ends_ms,
        by=record.by,
        at_ms=record.at_ms,
    )


def _is_below(record: TokenRecord, prefix: str) -> bool:
    return not prefix or (
        record.principal.kind == APPLICATION and record.principal.name.startswith(prefix)
    )


def _quota_message(quota: Quota) -> pb.AccessQuota:
    return pb.AccessQuota(
        id=quota.id, principal=quota.principal, limits=quota.limits(), is_team=quota.is_team
    )


def follow_access(
    view: ClusterView,
    config: AccessConfig | None = None,
    audit: AuditLog | None = None,
    clock: Clock | None = None,
) -> AccessControl:
    """Access control by a view, notified of each change. Raises InvalidArgument."""
    verify = None if config is None else _verify_of(config)
    access = AccessControl(
        view, config, audit=audit, verify=verify, now_ms=(clock or SystemClock()).time_ms
    )

    def changed(change: ViewChange) -> None:
        if change.access:
            access.changed()

    view.on_change(changed)
    return access


def _verify_of(config: AccessConfig) -> Verify | None:
    if config.jwt is None:
        return None
    try:
        from qmq.security.jwt_tokens import JwtVerifier
    except ImportError as cause:
        raise InvalidArgument(
            "tokens of an identity provider need PyJWT: pip install 'qmq[oidc]'"
        ) from cause
    return JwtVerifier(config.jwt).verify


def server_network(network: Network, view: ClusterView) -> Network:
    """A server's network, which sends the cluster's token to other servers."""
    return TokenNetwork(network, lambda: view.access.server_token, is_required=False)
