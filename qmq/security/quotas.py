"""Quotas of principals and subjects: limits, and the meter that computes how long to wait. Pure.

    produce_bytes_per_s     bytes of batches a second that it sends to one broker
    produce_messages_per_s  messages a second that it sends to one broker
    fetch_bytes_per_s       bytes a second that it receives from one broker
    fetch_messages_per_s    messages a second that it receives from one broker
    inflight_bytes          bytes of batches that it sent to one broker and that are not answered
                            yet
    connections             at one broker
    requests_per_s          changes and questions a second at one metaserver
    subjects                existing subjects that it created; of `subject:PREFIX*`: those that fit
                            the pattern, of all creators

`subject:NAME` in a principal's place limits all producers of a subject together, and all its
consumers together: bytes and messages; `subject:PREFIX*` limits each of these subjects.
`namespace:PREFIX` limits all producers of all subjects with that prefix together: bytes and
messages, nothing else. All of these apply in addition to the principal's quota. Two limits count
what subjects hold:

    groups                  how many groups consume the subject
    delayed_messages        of the subject, that one delay group still has to deliver

In a principal's quota these two count over all subjects that the principal created, no matter which
principals consume or send.

A quota names a principal, a pattern (`app:*`) or a role, as rules do. The most specific one
applies: the principal's own, then a role's, then the longest pattern, then `*`. Each broker counts
separately.

The administrator of a namespace sets quotas for its own subjects, applications and narrower
namespaces (`is_team`). They apply in addition to the cluster's: for each limit, the smaller one of
the nearest cluster's quota and the nearest team's quota. So a team cannot avoid the cluster's
quota.

A sender over its rate is not refused: the broker stops reading from its connections until the
excess is used up, as Kafka mutes a channel. Clients need not know about quotas; TCP slows them
down.

A meter is a bucket that fills with the rate and holds one second. A batch is never cut, so it may
bring the bucket below zero. The pause is the time until the bucket is at zero again.

Example: 1 MB/s, and a batch of 3 MB comes to a full bucket: it is at -2 MB, and nothing is read for
2 s.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, NamedTuple

from qmq.errors import InvalidArgument, QuotaExceeded
from qmq.model import check_name
from qmq.security.access_rules import (
    EVERY,
    ROLE,
    Need,
    check_pattern,
    check_principal_pattern,
    matches,
    on_namespace,
)
from qmq.security.principal import APPLICATION, Principal

LIMIT_MAX: Final = 1 << 50
SUBJECT: Final = "subject:"
OF_NAMESPACES: Final = ("produce_bytes_per_s", "produce_messages_per_s")
NAMESPACE: Final = "namespace:"


@dataclass(frozen=True, slots=True)
class Quota:
    """Limits of one principal or of a pattern of principals. 0: no limit. `is_team`: set by a
    namespace's administrator.
    """

    id: str
    principal: str
    produce_bytes_per_s: int = 0
    produce_messages_per_s: int = 0
    fetch_bytes_per_s: int = 0
    fetch_messages_per_s: int = 0
    inflight_bytes: int = 0
    connections: int = 0
    requests_per_s: int = 0
    subjects: int = 0
    groups: int = 0
    delayed_messages: int = 0
    is_team: bool = False

    @classmethod
    def of(
        cls, quota_id: str, principal: str, limits: Mapping[str, int], *, is_team: bool = False
    ) -> Quota:
        """The quota with these limits by name. Unknown names belong to a newer release and are
        ignored. Raises InvalidArgument, InvalidName.
        """
        if principal.startswith(SUBJECT):
            check_pattern("subject", principal[len(SUBJECT) :])
        elif principal.startswith(NAMESPACE):
            check_name("namespace", principal[len(NAMESPACE) :])
        else:
            check_principal_pattern(principal)
        known = {name: limits[name] for name in LIMITS if name in limits}
        for name, value in known.items():
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= LIMIT_MAX:
                raise InvalidArgument(
                    f"{name} is a number from 0 (no limit) to {LIMIT_MAX}, not {value!r}"
                )
        alien = [name for name, value in known.items() if value and name not in OF_NAMESPACES]
        if principal.startswith(NAMESPACE) and alien:
            raise InvalidArgument(
                f"{alien[0]} is not a limit of a namespace, which has "
                f"{' and '.join(OF_NAMESPACES)}; set others for {SUBJECT}PREFIX* or a role"
            )
        return cls(quota_id, principal, **known, is_team=is_team)

    @property
    def need(self) -> Need:
        """The need of a change to a quota of this kind."""
        return need_of(self.principal)

    def is_below(self, prefix: str) -> bool:
        """Whether the quota is for a name with this prefix."""
        return not prefix or self.principal.partition(":")[2].startswith(prefix)

    def limits(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in LIMITS}


LIMITS: Final = tuple(
    each.name for each in fields(Quota) if each.name not in ("id", "principal", "is_team")
)


def need_of(principal: str) -> Need:
    """The permission that a change to this quota needs:
    to administer a namespace, or the cluster.
    """
    kind, _, name = principal.partition(":")
    return on_namespace(
        name.removesuffix(EVERY)
        if kind + ":" in (SUBJECT, NAMESPACE) or kind == APPLICATION
        else ""
    )


def nearest(quotas: Iterable[Quota], principal: Principal, roles: Iterable[str]) -> Quota | None:
    """The limits that apply to a principal; None if there are none."""
    return _smallest(_nearest(quotas, str(principal), {ROLE + each for each in roles}))


def require_room_for(quotas: Iterable[Quota], subject: str, subjects: Collection[str]) -> None:
    """Raises QuotaExceeded if one more subject may not be created."""
    for quota in _of_subject(quotas, subject):
        if not quota.subjects:
            continue
        pattern = quota.principal[len(SUBJECT) :]
        count = sum([matches(pattern, each) for each in subjects])
        if count >= quota.subjects:
            raise QuotaExceeded(
                f"{count} subjects fit {pattern!r}, the most that quota {quota.id!r} allows: "
                "delete one, or raise the quota"
            )


def require_room_of(quota: Quota | None, principal: Principal, created_by: Iterable[str]) -> None:
    """`created_by`: the creators of all subjects. Raises QuotaExceeded if the principal may not
    create one more.
    """
    if quota is not None and quota.subjects:
        count = sum([each == str(principal) for each in created_by])
        if count >= quota.subjects:
            raise QuotaExceeded(
                f"{principal} has created {count} subjects, the most that quota {quota.id!r} "
                "allows: delete one, or raise the quota"
            )


def nearest_of_subject(quotas: Iterable[Quota], subject: str) -> Quota | None:
    """The limits of a subject; None if there are none."""
    return _smallest(_of_subject(quotas, subject))


def nearest_namespaces(quotas: Iterable[Quota], subject: str) -> tuple[Quota, ...]:
    """The quota of the smallest namespace that a subject is in: the cluster's, and the teams'."""
    found = [
        each
        for each in quotas
        if each.principal.startswith(NAMESPACE)
        and subject.startswith(each.principal[len(NAMESPACE) :])
    ]
    return _of_both(found, lambda each: (len(each.principal), each.id))


def _of_subject(quotas: Iterable[Quota], subject: str) -> tuple[Quota, ...]:
    return _nearest(
        (each for each in quotas if each.principal.startswith(SUBJECT)), SUBJECT + subject, set()
    )


def _nearest(quotas: Iterable[Quota], text: str, named: set[str]) -> tuple[Quota, ...]:
    found = [each for each in quotas if each.principal in named or matches(each.principal, text)]
    return _of_both(found, lambda each: _nearness(each, text))


def _of_both(quotas: list[Quota], nearness: Callable[[Quota], Any]) -> tuple[Quota, ...]:
    """The nearest of the cluster's quotas and the nearest of the teams' quotas,
    as far as they exist.
    """
    nearest_two = (
        max([each for each in quotas if each.is_team is is_team], key=nearness, default=None)
        for is_team in (False, True)
    )
    return tuple(each for each in nearest_two if each is not None)


def _smallest(quotas: tuple[Quota, ...]) -> Quota | None:
    """One quota with the smaller of each limit."""
    if len(quotas) < 2:
        return quotas[0] if quotas else None
    own, teams = (each.limits() for each in quotas)
    limits: dict[str, Any] = {
        name: min(filter(None, (own[name], teams[name])), default=0) for name in LIMITS
    }
    return Quota(" and ".join(each.id for each in quotas), quotas[0].principal, **limits)


def _nearness(quota: Quota, text: str) -> tuple[int, int, str]:
    if quota.principal == text:
        return 3, 0, quota.id
    if quota.principal.startswith(ROLE):
        return 2, 0, quota.id
    return (1, len(quota.principal), quota.id) if quota.principal != EVERY else (0, 0, quota.id)


class CreatedSubjects(NamedTuple):
    """The quota of a principal, and all subjects that it created."""

    principal: str
    quota: Quota
    subjects: frozenset[str]


class RateMeter:
    """One rate of one principal."""

    __slots__ = ("_at_s", "_level", "rate")

    def __init__(self, rate: int, now_s: float) -> None:
        self.rate = rate
        self._level = float(rate)
        self._at_s = now_s

    def owes(self, now_s: float) -> float:
        """The time in seconds until an amount may be taken again."""
        return max(0.0, -self._level / self.rate - (now_s - self._at_s))

    def take(self, amount: int, now_s: float) -> float:
        """Count an amount. Returns the time in seconds until the next amount may be taken."""
        self._level = min(self.rate, self._level + (now_s - self._at_s) * self.rate) - amount
        self._at_s = now_s
        return max(0.0, -self._level / self.rate)
