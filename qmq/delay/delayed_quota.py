"""The quota `delayed_messages` (qmq/security/quotas.py) of a subject, at a delay group's master.

It is checked when a request's batches are about to be stored, after all earlier ones. A batch that is stored already is acknowledged again,
whatever the quota is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from qmq.delay.schedule_state import PendingCounts
from qmq.errors import QuotaExceeded
from qmq.log.store import Intake, Store
from qmq.security.quotas import Quota

BatchKey = tuple[str, int, int]
"""(subject, producer id, batch number)."""


class DelayedQuota:
    """Checks the batches of one write. `quota_of` returns a subject's limits; None: there are none."""

    def __init__(self, store: Store, pending: PendingCounts, quota_of: Callable[[str], Quota | None], group: str) -> None:
        self._store, self._pending, self._quota_of, self._group = store, pending, quota_of, group
        self._admitted: set[BatchKey] = set()
        self._taken: Counter[str] = Counter()

    def admit(self, batches: list[Intake]) -> None:
        """Admit all batches of a request, or none. Raises QuotaExceeded."""
        admitted = set[BatchKey]()
        taken: Counter[str] = Counter()
        for batch in batches:
            subject, header = batch.queue.id.subject, batch.header
            quota, key = self._quota_of(subject), (subject, header.producer_id, header.batch_sequence)
            if quota is None or not quota.delayed_messages or key in admitted or self._is_here(key, batch):
                continue
            waiting = self._pending.of(subject) + self._taken[subject] + taken[subject]
            if waiting + header.count > quota.delayed_messages:
                raise QuotaExceeded(
                    f"subject {subject!r} has {waiting} delayed messages that wait in delay group {self._group!r}, and {header.count} more "
                    f"are over the {quota.delayed_messages} that quota {quota.id!r} allows: wait until some are due, cancel some "
                    "(`qmq delay list`, `qmq delay cancel`), or raise the quota"
                )
            admitted.add(key)
            taken[subject] += header.count
        self._admitted |= admitted
        self._taken += taken

    def _is_here(self, key: BatchKey, batch: Intake) -> bool:
        return key in self._admitted or self._store.find_duplicate(batch.queue, batch.header) is not None
