"""The quota `delayed_messages` (qmq/security/quotas.py) of a subject, and of the principal that created the subject, at a delay group's
master. The quota is checked just before a request's batches are stored, after all earlier ones. A batch that is stored already is
acknowledged again, regardless of the quota.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import NamedTuple

from qmq.delay.schedule_state import PendingCounts
from qmq.errors import QuotaExceeded
from qmq.log.store import Intake
from qmq.security.access_control import OpenAccess

BatchKey = tuple[str, int, int]
"""(subject, producer id, batch number)."""


class _Limit(NamedTuple):
    whose: str
    subjects: Collection[str]
    messages: int
    quota: str


class DelayedQuota:
    """Checks the batches of one write."""

    def __init__(self, pending: PendingCounts, access: OpenAccess, group: str) -> None:
        self._pending, self._access, self._group = pending, access, group
        self._admitted: set[BatchKey] = set()
        self._taken: Counter[str] = Counter()

    def admit(self, batches: list[Intake]) -> None:
        """Admit all batches of a request, or none. Raises QuotaExceeded."""
        admitted = set[BatchKey]()
        taken: Counter[str] = Counter()
        for batch in batches:
            subject, header = batch.queue.id.subject, batch.header
            limits, key = self._limits(subject), (subject, header.producer_id, header.batch_sequence)
            if not limits or key in admitted or self._is_here(key, batch):
                continue
            for limit in limits:
                waiting = sum([self._pending.of(each) + self._taken[each] + taken[each] for each in limit.subjects])
                if waiting + header.count > limit.messages:
                    raise QuotaExceeded(
                        f"{limit.whose} {waiting} delayed messages that wait in delay group {self._group!r}, and {header.count} more "
                        f"are over the {limit.messages} that quota {limit.quota!r} allows: wait until some are due, cancel some "
                        "(`qmq delay list`, `qmq delay cancel`), or raise the quota"
                    )
            admitted.add(key)
            taken[subject] += header.count
        self._admitted |= admitted
        self._taken += taken

    def _limits(self, subject: str) -> list[_Limit]:
        found, quota, created = list[_Limit](), self._access.subject_quota(subject), self._access.created_with(subject)
        if quota is not None and quota.delayed_messages:
            found.append(_Limit(f"subject {subject!r} has", (subject,), quota.delayed_messages, quota.id))
        if created is not None and created.quota.delayed_messages:
            whose = f"the subjects that {created.principal} created have"
            found.append(_Limit(whose, created.subjects, created.quota.delayed_messages, created.quota.id))
        return found

    def _is_here(self, key: BatchKey, batch: Intake) -> bool:
        return key in self._admitted or batch.queue.find_duplicate(batch.header) is not None
