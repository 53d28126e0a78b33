"""Access rules and their evaluation. Pure (docs/ACCESS.md).

    allow  app:billing   produce, consume   subject  billing.*
    allow  role:support  browse, describe   subject  *
    deny   app:legacy    *                  subject  payments.*

A rule names a principal, operations, a kind of resource and a pattern. A pattern is a name, a
prefix before one `*`, or `*` alone; a principal may be given as a pattern of that form too, or as
`role:NAME`.

* A rule that denies wins over every rule that allows, in any order.
* An operation that no rule allows is denied.
* Servers (`node:`, `meta:`) may do everything, because they form the cluster. No rule grants that
  to others.
* A principal that is allowed any operation on a resource may also describe it, unless that is
  denied: a producer must be able to find its subject.

A team administers its own namespace, which is a prefix of names:

    allow  op:bob   administer   namespace  payments.

* The rule allows changes of rules about subjects and groups whose names, or whole patterns, are
  below the prefix, and of roles and tokens of applications with such names. The team cannot change
  a rule with a wider pattern, so an operation that the cluster denies by `*` stays denied.
* A principal that may administer the cluster may administer every namespace.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, NamedTuple

from qmq.errors import InvalidArgument, InvalidName
from qmq.model import base_group, check_name, is_dead_letters
from qmq.security.principal import KINDS, Principal

EVERY: Final = "*"
ROLE: Final = "role:"
RULES_MAX: Final = 10_000
PATTERN_CHARS_MAX: Final = 200


class Operation(Enum):
    """An operation that a rule allows or denies."""

    PRODUCE = "produce"
    """Send to a subject, with or without delay; cancel or move delayed messages."""
    CONSUME = "consume"
    """Receive, settle, and reset the group. Consuming needs it on the subject and on the group."""
    BROWSE = "browse"
    """Read without a group: fetch, find, show bodies, Spark."""
    DESCRIBE = "describe"
    """See settings, routes, lag, states; no bodies."""
    CREATE = "create"
    DELETE = "delete"
    CONFIGURE = "configure"
    """Change settings; pause, replay and purge of a group."""
    RESHARD = "reshard"
    """Split, merge and move partitions."""
    OPERATE = "operate"
    """Drain, hand over masterships, change replicas."""
    ADMINISTER = "administer"
    """Change rules, roles, tokens and quotas; on a namespace, those of its own."""
    REPLICATE = "replicate"
    """Act as a server. No rule grants this: only a certificate or the cluster's own token does."""


class ResourceKind(Enum):
    """The kind of a resource."""

    SUBJECT = "subject"
    GROUP = "group"
    CLUSTER = "cluster"
    NAMESPACE = "namespace"
    """All names with a prefix. `administer` is the only operation on a namespace."""


class AccessMode(Enum):
    """Whether rules are enforced."""

    OFF = "off"
    """Everybody may do everything."""
    WATCH = "watch"
    """Everybody may do everything; operations that the rules would refuse are recorded."""
    ENFORCE = "enforce"


class Need(NamedTuple):
    """An operation on one resource. The cluster's name is empty."""

    operation: Operation
    kind: ResourceKind
    name: str = ""

    def __str__(self) -> str:
        return f"{self.operation.value} on {self.kind.value}{' ' + self.name if self.name else ''}"


def on_subject(operation: Operation, subject: str) -> Need:
    """The need of an operation on a subject. For a dead-letter queue, the resource is the group."""
    if is_dead_letters(subject):
        return Need(operation, ResourceKind.GROUP, base_group(subject.split("%", 2)[2]))
    return Need(operation, ResourceKind.SUBJECT, subject)


def on_group(operation: Operation, group: str) -> Need:
    """The need of an operation on a group. For a consumer of a broadcast group, the resource is the
    broadcast group.
    """
    return Need(operation, ResourceKind.GROUP, base_group(group))


def on_cluster(operation: Operation) -> Need:
    return Need(operation, ResourceKind.CLUSTER)


def on_namespace(prefix: str) -> Need:
    """The need to administer all names with the prefix; without a prefix, the cluster."""
    return (
        Need(Operation.ADMINISTER, ResourceKind.NAMESPACE, prefix)
        if prefix
        else on_cluster(Operation.ADMINISTER)
    )


@dataclass(frozen=True, slots=True)
class AccessRule:
    """One rule. The module's docstring describes `principal` and `pattern`;
    empty `operations` mean all.
    """

    id: str
    is_deny: bool
    principal: str
    operations: frozenset[Operation]
    kind: ResourceKind
    pattern: str = EVERY
    by: str = ""
    at_ms: int = 0

    def check(self) -> AccessRule:
        """Return the rule if it is valid. Raises InvalidArgument, InvalidName."""
        check_name("rule", self.id)
        check_principal_pattern(self.principal)
        if self.kind is ResourceKind.NAMESPACE:
            self._check_namespace()
        else:
            check_pattern(self.kind.value, self.pattern)
        if Operation.REPLICATE in self.operations:
            raise InvalidArgument(
                "a rule cannot make a principal a server: a certificate does (`qmq cert server`)"
            )
        if self.kind is ResourceKind.CLUSTER and self.pattern != EVERY:
            raise InvalidArgument("there is one cluster: leave its name out")
        return self

    def _check_namespace(self) -> None:
        check_name("namespace", self.pattern)
        if self.operations != {Operation.ADMINISTER}:
            raise InvalidArgument(
                "a namespace has one operation, administer: allow others on its subjects "
                f"and groups ('{self.pattern}*'), as two rules"
            )

    def covers(self, need: Need) -> bool:
        """True if the rule concerns this operation on this resource."""
        if self.operations and need.operation not in self.operations:
            return False
        if need.kind is ResourceKind.NAMESPACE:
            return self.kind is ResourceKind.CLUSTER or (
                self.kind is need.kind and self._overlaps(need.name)
            )
        return need.kind is self.kind and matches(self.pattern, need.name)

    def _overlaps(self, prefix: str) -> bool:
        """True if a namespace's rule concerns the prefix: an allow rule covers prefixes below its
        own, a deny rule also wider ones.
        """
        return prefix.startswith(self.pattern) or (self.is_deny and self.pattern.startswith(prefix))

    @property
    def need(self) -> Need:
        """The need of a change to this rule."""
        return on_namespace(
            "" if self.kind is ResourceKind.CLUSTER else self.pattern.removesuffix(EVERY)
        )

    def __str__(self) -> str:
        operations = ",".join(sorted(each.value for each in self.operations)) or EVERY
        where = (
            self.kind.value
            if self.kind is ResourceKind.CLUSTER
            else f"{self.kind.value} {self.pattern}"
        )
        return (
            f"{self.id}: {'deny' if self.is_deny else 'allow'} {self.principal} {operations} "
            f"{where}"
        )


def matches(pattern: str, name: str) -> bool:
    """True if the name matches the pattern."""
    return name.startswith(pattern[:-1]) if pattern.endswith(EVERY) else name == pattern


def check_pattern(kind: str, pattern: str) -> None:
    """Raises InvalidArgument, InvalidName."""
    prefix = pattern[:-1] if pattern.endswith(EVERY) else pattern
    if EVERY in prefix or not pattern or len(pattern) > PATTERN_CHARS_MAX:
        raise InvalidArgument(
            f"a {kind} is a name, a prefix before one '*', or '*', not {pattern!r}"
        )
    if prefix:
        try:
            check_name(kind, prefix)
        except InvalidName as cause:
            raise InvalidName(f"{cause.message} (before a '*' too)") from None


def check_principal_pattern(text: str) -> None:
    """Raises InvalidArgument, InvalidName."""
    if text == EVERY:
        return
    if text.startswith(ROLE):
        check_name("role", text[len(ROLE) :])
        return
    kind, separator, name = text.partition(":")
    if not separator or kind not in KINDS:
        raise InvalidArgument(
            f"a rule is for KIND:NAME with a kind of {', '.join(KINDS)}, for role:NAME, or "
            f"for '*', not {text!r}"
        )
    check_pattern("principal", name)


class Decision(NamedTuple):
    """A decision, and the rule that made it; None: no rule allows the operation, or the decision
    did not need a rule.
    """

    is_allowed: bool
    rule: AccessRule | None = None
    by: str = ""
    """The reason of a decision that did not need a rule."""


@dataclass(slots=True)
class RuleBook:
    """All rules and roles. `roles` maps each role to its members, as principals."""

    rules: Mapping[str, AccessRule] = field(default_factory=dict)
    roles: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def roles_of(self, principal: Principal) -> list[str]:
        return sorted(name for name, members in self.roles.items() if str(principal) in members)

    def rules_for(self, principal: Principal) -> list[AccessRule]:
        """The rules for a principal: by name, by pattern or by role."""
        text, roles = str(principal), {ROLE + each for each in self.roles_of(principal)}
        return [
            each
            for each in self.rules.values()
            if each.principal in roles or matches(each.principal, text)
        ]

    def decide(self, principal: Principal, need: Need) -> Decision:
        if principal.is_server:
            return Decision(True)
        return decide(self.rules_for(principal), need)


def decide(rules: Iterable[AccessRule], need: Need) -> Decision:
    """Decide a need by a principal's rules."""
    if need.operation is Operation.REPLICATE:
        return Decision(False)
    allowing: AccessRule | None = None
    for rule in rules:
        if rule.is_deny:
            if rule.covers(need):
                return Decision(False, rule)
        elif allowing is None and (rule.covers(need) or _lets_describe(rule, need)):
            allowing = rule
    return Decision(allowing is not None, allowing)


def _lets_describe(rule: AccessRule, need: Need) -> bool:
    return (
        need.operation is Operation.DESCRIBE
        and rule.kind is need.kind
        and matches(rule.pattern, need.name)
    )
