"""How much a principal may use: limits, and the meter that says how long to wait. Pure.

    produce_bytes_per_s     bytes of batches a second that it sends to one broker
    produce_messages_per_s  messages a second that it sends to one broker
    fetch_bytes_per_s       bytes a second that it receives from one broker
    inflight_bytes          bytes of batches that it sent to one broker and that are not answered yet
    connections             at one broker
    requests_per_s          changes and questions a second at one metaserver
    subjects                that it created and that still exist; of `subject:PREFIX*`: that fit the pattern, whoever created them

`subject:NAME` in a principal's place limits what a subject takes, from all producers together: bytes and messages; `subject:PREFIX*` limits
each of these subjects. `namespace:PREFIX` limits what all subjects whose names begin so take together, from all producers: bytes and
messages, nothing else. All of these hold beside the principal's. Some limits are of subjects only:

    groups                  how many groups may consume each subject
    delayed_messages        of each subject, that one delay group still has to deliver

A quota names a principal, a pattern (`app:*`) or a role, as rules do. The nearest holds: the principal's own, then a role's, then the
longest pattern, then `*`. Each limit counts at each broker by itself.

A sender over its rate is not refused: the broker reads on from its connections when what was owed has passed, as Kafka mutes a channel. So
a client needs to know nothing of quotas, and TCP slows it down.

A meter is a bucket that fills with the rate and holds one second. What is taken may bring the bucket below zero: a batch is never cut. The
pause is what it takes until the bucket is at zero again.

Example: 1 MB/s, and a batch of 3 MB comes to a full bucket: it is at -2 MB, and nothing is read for 2 s.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Final

from qmq.errors import InvalidArgument, QuotaExceeded
from qmq.model import check_name
from qmq.security.access_rules import EVERY, ROLE, check_pattern, check_principal_pattern, matches
from qmq.security.principal import Principal

LIMIT_MAX: Final = 1 << 50
OF_SUBJECTS: Final = ("groups", "delayed_messages")
SUBJECT: Final = "subject:"
OF_NAMESPACES: Final = ("produce_bytes_per_s", "produce_messages_per_s")
NAMESPACE: Final = "namespace:"


@dataclass(frozen=True, slots=True)
class Quota:
    """Limits of one principal or of a pattern of principals. 0: no limit."""

    id: str
    principal: str
    produce_bytes_per_s: int = 0
    produce_messages_per_s: int = 0
    fetch_bytes_per_s: int = 0
    inflight_bytes: int = 0
    connections: int = 0
    requests_per_s: int = 0
    subjects: int = 0
    groups: int = 0
    delayed_messages: int = 0

    @classmethod
    def of(cls, quota_id: str, principal: str, limits: Mapping[str, int]) -> Quota:
        """Of limits by name; unknown names are a newer release's. Raises InvalidArgument, InvalidName."""
        if principal.startswith(SUBJECT):
            check_pattern("subject", principal[len(SUBJECT) :])
        elif principal.startswith(NAMESPACE):
            check_name("namespace", principal[len(NAMESPACE) :])
        else:
            check_principal_pattern(principal)
        known = {name: limits[name] for name in LIMITS if name in limits}
        for name, value in known.items():
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= LIMIT_MAX:
                raise InvalidArgument(f"{name} is a number from 0 (no limit) to {LIMIT_MAX}, not {value!r}")
        ill = [name for name in OF_SUBJECTS if known.get(name) and not principal.startswith(SUBJECT)]
        if ill:
            raise InvalidArgument(f"{ill[0]} is a limit of subjects: set it for subject:NAME or 'subject:PREFIX*', not for {principal}")
        alien = [name for name, value in known.items() if value and name not in OF_NAMESPACES]
        if principal.startswith(NAMESPACE) and alien:
            raise InvalidArgument(
                f"{alien[0]} is no limit of a namespace: that has {' and '.join(OF_NAMESPACES)}; set others for {SUBJECT}PREFIX* or a role"
            )
        return cls(quota_id, principal, **known)

    def is_below(self, prefix: str) -> bool:
        """Whether it is for something whose name begins so."""
        return not prefix or self.principal.partition(":")[2].startswith(prefix)

    def limits(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in LIMITS}


LIMITS: Final = tuple(each.name for each in fields(Quota) if each.name not in ("id", "principal"))


def nearest(quotas: Iterable[Quota], principal: Principal, roles: Iterable[str]) -> Quota | None:
    """The quota that applies to a principal; None if there is none."""
    return _nearest(quotas, str(principal), {ROLE + each for each in roles})


def require_room_for(quotas: Iterable[Quota], subject: str, subjects: Iterable[str]) -> None:
    """Raises QuotaExceeded if one more subject may not be created."""
    quota = nearest_of_subject(quotas, subject)
    if quota is not None and quota.subjects:
        pattern = quota.principal[len(SUBJECT) :]
        count = sum([matches(pattern, each) for each in subjects])
        if count >= quota.subjects:
            raise QuotaExceeded(
                f"{count} subjects fit {pattern!r}, the most that quota {quota.id!r} allows: delete one, or raise the quota"
            )


def require_room_of(quota: Quota | None, principal: Principal, created_by: Iterable[str]) -> None:
    """`created_by`: the creators of all subjects. Raises QuotaExceeded if the principal may not create one more."""
    if quota is not None and quota.subjects:
        count = sum([each == str(principal) for each in created_by])
        if count >= quota.subjects:
            raise QuotaExceeded(
                f"{principal} has created {count} subjects, the most that quota {quota.id!r} allows: delete one, or raise the quota"
            )


def nearest_of_subject(quotas: Iterable[Quota], subject: str) -> Quota | None:
    """The quota of a subject; None if there is none."""
    return _nearest((each for each in quotas if each.principal.startswith(SUBJECT)), SUBJECT + subject, set())


def nearest_namespace(quotas: Iterable[Quota], subject: str) -> Quota | None:
    """The quota of the smallest namespace that a subject is in; None: there is none."""
    found = [each for each in quotas if each.principal.startswith(NAMESPACE) and subject.startswith(each.principal[len(NAMESPACE) :])]
    return max(found, key=lambda each: (len(each.principal), each.id), default=None)


def _nearest(quotas: Iterable[Quota], text: str, named: set[str]) -> Quota | None:
    found = [each for each in quotas if each.principal in named or matches(each.principal, text)]
    return max(found, key=lambda each: _nearness(each, text), default=None)


def _nearness(quota: Quota, text: str) -> tuple[int, int, str]:
    if quota.principal == text:
        return 3, 0, quota.id
    if quota.principal.startswith(ROLE):
        return 2, 0, quota.id
    return (1, len(quota.principal), quota.id) if quota.principal != EVERY else (0, 0, quota.id)


class RateMeter:
    """One rate of one principal."""

    __slots__ = ("_at_s", "_level", "rate")

    def __init__(self, rate: int, now_s: float) -> None:
        self.rate = rate
        self._level = float(rate)
        self._at_s = now_s

    def owes(self, now_s: float) -> float:
        """For how many seconds nothing may be taken now."""
        return max(0.0, -self._level / self.rate - (now_s - self._at_s))

    def take(self, amount: int, now_s: float) -> float:
        """Count an amount. Returns for how many seconds nothing more may be taken."""
        self._level = min(self.rate, self._level + (now_s - self._at_s) * self.rate) - amount
        self._at_s = now_s
        return max(0.0, -self._level / self.rate)
