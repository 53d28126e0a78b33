"""Authenticates peers and authorises their requests: one instance in each broker, delay server and
metaserver.

    TLS peer, token ──▶ `identify` ──▶ Caller
    Caller ──▶ `require(caller, need, ...)` ──▶ nothing, or AccessDenied

It decides from memory, by the view of the coordination store (`ClusterView`), and caches decisions
until the view changes. After a change, it calls the owners of connections back (`on_change`), which
check their connections again.

While the coordination store cannot be reached, the last known rules hold for `STALE_MS`. After that
everybody but servers and administrators is refused, because the rules may have changed. Before the
store was first read, only servers are served; others get an error that says to try again.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

from qmq.errors import AccessDenied, NotAuthenticated, Unavailable
from qmq.model import SubjectConfig
from qmq.security.access_rules import (
    AccessMode,
    AccessRule,
    Decision,
    Need,
    Operation,
    ResourceKind,
    RuleBook,
    decide,
    on_cluster,
)
from qmq.security.audit import AuditLog
from qmq.security.principal import ANONYMOUS, CertificateNames, Principal, PrincipalRule, local_user
from qmq.security.quotas import (
    CreatedSubjects,
    Quota,
    nearest,
    nearest_namespaces,
    nearest_of_subject,
)
from qmq.security.tokens import TokenRecord, check_token, id_of


@dataclass(slots=True)
class AccessState:
    """The access records of the coordination store; `qmq_coordination.access_records` keeps them up
    to date. `version` increases with each change.
    """

    version: int = 0
    mode: AccessMode = AccessMode.OFF
    rules: dict[str, AccessRule] = field(default_factory=dict)
    roles: dict[str, frozenset[str]] = field(default_factory=dict)
    """The members of each role, as principals."""
    tokens: dict[str, TokenRecord] = field(default_factory=dict)
    quotas: dict[str, Quota] = field(default_factory=dict)
    server_token: str = field(default="", repr=False)
    """The token that servers show each other. Everybody who can read the coordination store can act
    as a server.
    """
    unreadable: set[str] = field(default_factory=set)
    """Keys with unreadable values: they close the cluster."""

    @property
    def book(self) -> RuleBook:
        return RuleBook(self.rules, self.roles)


BY_URI: Final = PrincipalRule()
STALE_MS: Final = 300_000
"""For how long the last known rules apply while the coordination store cannot be reached: longer
than a restart of etcd, and not so long that a right that was taken stays.
"""


@dataclass(frozen=True, slots=True)
class JwtConfig:
    """An identity provider whose tokens the server accepts.

    issuer: what its tokens say in `iss`.
    keys: its public keys: a file (JWKS or PEM), or the https:// address of its JWKS.
    audience: what its tokens must say in `aud`.
    claim: which claim names the principal.
    email_domain: the domain whose email addresses name principals by the part before the @.
    """

    issuer: str
    keys: str
    audience: str = "qmq"
    claim: str = "sub"
    email_domain: str = ""


@dataclass(frozen=True, slots=True)
class AccessConfig:
    """The settings of a server at its start.

    admins: principals that may do everything, independent of the rules. rule: how certificates name
    principals. jwt: an identity provider, if its tokens are accepted. audit_subject: the subject to
    which the audit log is also sent; empty for none.
    """

    admins: frozenset[str] = frozenset()
    rule: PrincipalRule = BY_URI
    jwt: JwtConfig | None = None
    audit_subject: str = ""


_OWN_TOKEN: Final = "server token"  # noqa: S105 - how a caller is known
_LISTS: Final = ("ListRules", "ListTokens", "ListQuotas")
"""A namespace's administrator may make these calls for its own namespace."""
DECISIONS_MAX: Final = 50_000
"""The largest number of cached decisions. At this number the cache is emptied; a decision then
costs some µs again.
"""


class Caller(NamedTuple):
    """The principal at the other end of a connection, and how it was authenticated."""

    principal: Principal = ANONYMOUS
    how: str = "none"
    """certificate, token, jwt, server token, socket, none."""
    address: str = ""
    token_id: str = ""
    ends_ms: int = 0
    """The token's expiry in milliseconds since 1970; 0: never."""
    request: str = ""
    """The id of the current request."""


Verify = Callable[[str], tuple[Principal, int]]
"""Verifies a token that an identity provider signed: its principal, and its expiry in milliseconds
since 1970. Raises NotAuthenticated.
"""


class AccessView(Protocol):
    """The source of the rules: a `ClusterView`."""

    @property
    def access(self) -> AccessState: ...

    @property
    def revision(self) -> int:
        """The store's revision; 0 before the store was first read."""
        ...

    @property
    def silent_ms(self) -> int: ...

    def subject(self, name: str) -> SubjectConfig | None: ...

    def subjects(self, prefix: str = "") -> list[SubjectConfig]: ...


class OpenAccess:
    """Allows everything to everybody: for a broker that belongs to no cluster."""

    is_on = False
    is_enforced = False
    is_stale = False
    version = 0

    def identify(
        self, names: CertificateNames | None, token: str, address: str, uid: int | None = None
    ) -> Caller:
        return Caller(address=address)

    def renew(self, caller: Caller, token: str) -> Caller:
        return caller

    def require(self, caller: Caller, action: str, *needs: Need) -> None:
        return

    def require_replica(self, caller: Caller) -> None:
        return

    def refused(self, caller: Caller, action: str, on: str, why: str = "") -> None:
        return

    def check(self, caller: Caller) -> None:
        return

    def has_ended(self, caller: Caller) -> bool:
        return False

    has_quotas = False

    def quota(self, principal: Principal) -> Quota | None:
        return None

    def subject_quota(self, subject: str) -> Quota | None:
        return None

    def namespace_quotas(self, subject: str) -> tuple[Quota, ...]:
        return ()

    def created_with(self, subject: str) -> CreatedSubjects | None:
        return None

    def on_change(self, callback: Callable[[], None]) -> Callable[[], None]:
        return lambda: None


class AccessControl(OpenAccess):
    def __init__(
        self,
        source: AccessView,
        config: AccessConfig | None = None,
        *,
        audit: AuditLog | None = None,
        verify: Verify | None = None,
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        self._source, self.config = source, config or AccessConfig()
        self.audit = audit or AuditLog()
        self._verify, self._now_ms = verify, now_ms
        self._callbacks: dict[Callable[[], None], None] = {}
        self._decided: dict[tuple[Principal, Need], Decision] = {}
        self._rules: dict[Principal, list[AccessRule]] = {}
        self._decided_at = -1
        self._quotas: dict[Principal | str, Quota | None] = {}
        self._namespaces: dict[str, tuple[Quota, ...]] = {}
        self._quotas_at = -1
        self._created: dict[str, CreatedSubjects] = {}
        self._created_at = -1

    # --- the state --------------------------------------------------------------------------------

    @property
    def mode(self) -> AccessMode:
        return self._source.access.mode

    @property
    def is_on(self) -> bool:  # type: ignore[override]
        """True if the server checks access at all."""
        return self.mode is not AccessMode.OFF or self._source.revision == 0

    @property
    def is_enforced(self) -> bool:  # type: ignore[override]
        return self._source.access.mode is AccessMode.ENFORCE

    @property
    def is_stale(self) -> bool:  # type: ignore[override]
        """True if the coordination store has been unreachable for longer than `STALE_MS`."""
        return self.is_enforced and self._source.silent_ms > STALE_MS

    @property
    def version(self) -> int:  # type: ignore[override]
        """Increases with each change of the rules."""
        return self._source.access.version

    @property
    def state(self) -> AccessState:
        return self._source.access

    def on_change(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call back when rules, roles or tokens have changed.
        Call the returned function to stop.
        """
        self._callbacks[callback] = None
        return lambda: self._callbacks.pop(callback, None)

    def changed(self) -> None:
        """Call back every owner of connections, after rules, roles or tokens changed."""
        for callback in list(self._callbacks):
            callback()

    # --- who --------------------------------------------------------------------------------------

    def identify(
        self, names: CertificateNames | None, token: str, address: str, uid: int | None = None
    ) -> Caller:
        """Identify a peer by its token, or else by its certificate, or else by its user on this
        machine.

        Raises NotAuthenticated for an invalid token.
        """
        if token:
            try:
                return self._by_token(token, address)
            except NotAuthenticated as failure:
                self.audit.refuse(
                    principal=str(ANONYMOUS),
                    how="token",
                    address=address,
                    action="login",
                    on=id_of(token),
                    error=failure.message,
                )
                raise
        principal = self.config.rule.principal(names) if names is not None else None
        if principal is not None:
            return Caller(principal, "certificate", address)
        return (
            Caller(address=address) if uid is None else Caller(local_user(uid), "socket", address)
        )

    def _by_token(self, token: str, address: str) -> Caller:
        own = self._source.access.server_token
        if own and hmac.compare_digest(own.encode(), token.encode()):
            return Caller(Principal("node", "server"), _OWN_TOKEN, address)
        token_id = id_of(token)
        if token_id or self._verify is None:
            record = self._source.access.tokens.get(token_id)
            principal = check_token(token, record, self._now_ms())
            return Caller(
                principal, "token", address, token_id, record.ends_ms if record is not None else 0
            )
        principal, ends_ms = self._verify(token)
        return Caller(principal, "jwt", address, "", ends_ms)

    def renew(self, caller: Caller, token: str) -> Caller:
        """The same caller with a newer token. Raises NotAuthenticated, or AccessDenied if the token
        belongs to another principal.
        """
        newer = self.identify(None, token, caller.address)
        if newer.principal == caller.principal:
            return newer
        why = f"this connection is {caller.principal}'s: open another one for {newer.principal}"
        self.refused(caller, "REAUTH", str(newer.principal), why)
        raise AccessDenied(why)

    def has_ended(self, caller: Caller) -> bool:
        """True if the caller's token has expired."""
        return bool(caller.ends_ms) and self._now_ms() >= caller.ends_ms

    def check(self, caller: Caller) -> None:
        """Raises NotAuthenticated if the caller's token was revoked or has expired."""
        if self.has_ended(caller):
            raise NotAuthenticated("the token has expired: connect again with a new one")
        if caller.token_id and caller.token_id not in self._source.access.tokens:
            raise NotAuthenticated("the token was revoked")

    # --- how much ---------------------------------------------------------------------------------

    @property
    def has_quotas(self) -> bool:  # type: ignore[override]
        return bool(self._source.access.quotas)

    def quota(self, principal: Principal) -> Quota | None:
        """The limits of a principal in any access mode; None if there are none.
        Servers have none.
        """
        state = self._source.access
        if not state.quotas or principal.is_server:
            return None
        known = self._known_quotas()
        if principal not in known:
            known[principal] = nearest(
                state.quotas.values(), principal, state.book.roles_of(principal)
            )
        return known[principal]

    def subject_quota(self, subject: str) -> Quota | None:
        """The limits of a subject; None if there are none."""
        quotas = self._source.access.quotas
        if not quotas:
            return None
        known = self._known_quotas()
        if subject not in known:
            known[subject] = nearest_of_subject(quotas.values(), subject)
        return known[subject]

    def namespace_quotas(self, subject: str) -> tuple[Quota, ...]:
        """The limits of the namespaces that contain a subject: the cluster's, and the teams'."""
        quotas = self._source.access.quotas
        if not quotas:
            return ()
        self._known_quotas()
        known = self._namespaces
        if subject not in known:
            known[subject] = nearest_namespaces(quotas.values(), subject)
        return known[subject]

    def created_with(self, subject: str) -> CreatedSubjects | None:
        """All subjects of this subject's creator,
        if the creator's quota limits what these subjects hold.
        """
        config = self._source.subject(subject)
        if config is None or config.created_by in ("", str(ANONYMOUS)) or not self.has_quotas:
            return None
        quota = self.quota(Principal.parse(config.created_by))
        if quota is None or not (quota.groups or quota.delayed_messages):
            return None
        if self._created_at != self._source.revision:
            self._created, self._created_at = {}, self._source.revision
        if config.created_by not in self._created:
            names = frozenset(
                each.name
                for each in self._source.subjects()
                if each.created_by == config.created_by
            )
            self._created[config.created_by] = CreatedSubjects(config.created_by, quota, names)
        return self._created[config.created_by]

    def _known_quotas(self) -> dict[Principal | str, Quota | None]:
        version = self._source.access.version
        if self._quotas_at != version or len(self._quotas) + len(self._namespaces) > DECISIONS_MAX:
            self._quotas, self._namespaces, self._quotas_at = {}, {}, version
        return self._quotas

    # --- what -------------------------------------------------------------------------------------

    def require(self, caller: Caller, action: str, *needs: Need) -> None:
        """Allow an action, or raise AccessDenied, NotAuthenticated or Unavailable. In mode `watch`
        it is allowed and logged.
        """
        if not self.is_on or caller.principal.is_server:
            return
        self.check(caller)
        for need in needs:
            decision = self.decide(caller.principal, need)
            if not decision.is_allowed:
                self._refuse(caller, action, need, decision)

    def require_replica(self, caller: Caller) -> None:
        """Only a server may act as a replica: neither a rule nor `--admins` allows it.
        Raises AccessDenied.
        """
        if self.is_on and not caller.principal.is_server:
            self._refuse(
                caller,
                "REPLICA_HELLO",
                on_cluster(Operation.REPLICATE),
                Decision(False, by="no rule makes a server"),
            )

    def require_server(self, caller: Caller, action: str, names: CertificateNames | None) -> None:
        """Only a server may do this: no rule grants it. Raises AccessDenied.

        `names` are those of the peer's certificate, None without TLS. With TLS the certificate must
        be a server's, in every mode. A peer whose certificate has no role must also have the
        servers' token.
        """
        if (
            names is not None
            and not names.is_of_server
            and (not names.is_of_nobody or caller.how != _OWN_TOKEN)
        ):
            why = (
                f"{action} is for servers, and {caller.principal} shows no server's certificate: "
                "`qmq cert server` makes one"
            )
            self.refused(caller, action, "cluster", why)
            raise AccessDenied(why)
        if self.is_on and not caller.principal.is_server:
            self.require(caller, action, on_cluster(Operation.REPLICATE))

    def refused(self, caller: Caller, action: str, on: str, why: str = "") -> None:
        """Record a refusal that is not the decision of a rule."""
        self.audit.refuse(
            principal=str(caller.principal),
            how=caller.how,
            address=caller.address,
            action=action,
            on=on,
            error=why,
            request=caller.request,
        )

    def decide(self, principal: Principal, need: Need) -> Decision:
        """The current decision for a principal."""
        if principal.is_server:
            return Decision(True, by="a server")
        if str(principal) in self.config.admins:
            return Decision(True, by="--admins")
        state = self._source.access
        if self._source.revision == 0:
            raise Unavailable(
                "the rules are not known yet: the coordination store has not answered"
            )
        if state.unreadable:
            return Decision(False, by=f"unreadable: {min(state.unreadable)}")
        if self.is_stale:
            return Decision(False, by="the coordination store is away")
        if (
            need.operation is Operation.PRODUCE
            and need.name
            and need.name == self.config.audit_subject
        ):
            return Decision(False, by="only servers write the audit log")
        if self._decided_at != state.version or len(self._decided) > DECISIONS_MAX:
            self._decided, self._rules, self._decided_at = {}, {}, state.version
        found = self._decided.get((principal, need))
        if found is None:
            found = self._decided[principal, need] = decide(self._rules_for(principal), need)
        return found

    def _rules_for(self, principal: Principal) -> list[AccessRule]:
        found = self._rules.get(principal)
        if found is None:
            found = self._rules[principal] = self._source.access.book.rules_for(principal)
        return found

    def _refuse(self, caller: Caller, action: str, need: Need, decision: Decision) -> None:
        is_watching = self.mode is AccessMode.WATCH
        self.audit.refuse(
            principal=str(caller.principal),
            how=caller.how,
            address=caller.address,
            action=action,
            on=f"{need.kind.value} {need.name}".strip(),
            result="would be denied" if is_watching else "denied",
            operation=need.operation.value,
            request=caller.request,
            rule=decision.rule.id if decision.rule is not None else "",
        )
        if not is_watching:
            raise AccessDenied(self._why(caller, need, decision) + self._hint(caller, action))

    def _hint(self, caller: Caller, action: str) -> str:
        """A hint for a namespace's administrator who lists the rules,
        tokens or quotas of the whole cluster.
        """
        if action not in _LISTS:
            return ""
        own = (
            each
            for each in self._rules_for(caller.principal)
            if each.kind is ResourceKind.NAMESPACE and not each.is_deny
        )
        return "".join(
            f"; `--namespace {prefix}` lists what is below it"
            for prefix in sorted({each.pattern for each in own})[:1]
        )

    def _why(self, caller: Caller, need: Need, decision: Decision) -> str:
        state = self._source.access
        if need.operation is Operation.REPLICATE:
            return (
                f"{caller.principal} is no server: give the replica a certificate of "
                "`qmq cert server`"
            )
        if state.unreadable:
            return (
                "the cluster is closed: the coordination store holds something unreadable at "
                f"{min(state.unreadable)}"
            )
        if self.is_stale:
            return "the rules may be out of date: the coordination store has been away for too long"
        if decision.rule is not None:
            return f"{caller.principal} may not {need}: rule {decision.rule.id!r} denies it"
        if caller.principal == ANONYMOUS:
            return (
                f"an unknown caller may not {need}: show a certificate (QMQ_TLS_CERT, QMQ_TLS_KEY) "
                "or a token (QMQ_TOKEN_FILE)"
            )
        rule = f"{caller.principal} {need.operation.value} {need.kind.value} {need.name}"
        command = f"qmq acl allow {rule}".rstrip()
        implied = (
            "; a rule for any other operation on it allows that, too"
            if need.operation is Operation.DESCRIBE
            else ""
        )
        return f"{caller.principal} may not {need}: no rule allows it (`{command}`{implied})"
