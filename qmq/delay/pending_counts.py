"""How many messages of each subject a delay group still has to deliver: pending or planned. Pure; part of the schedule's state.

A batch counts when it is stored, a recurring message's next run when it is written. A message counts no more when it is delivered or
cancelled; one that is moved goes on counting.

A checkpoint of an older version has no counts: what was stored before it then counts for nothing, and no count falls below 0.
"""

from __future__ import annotations

from collections.abc import Mapping


class PendingCounts:
    __slots__ = ("_counts",)

    def __init__(self, counts: Mapping[str, int] | None = None) -> None:
        self._counts = dict(counts or {})

    def of(self, subject: str) -> int:
        return self._counts.get(subject, 0)

    def all(self) -> dict[str, int]:
        """Of every subject that has any; a copy."""
        return dict(self._counts)

    def add(self, subject: str, messages: int) -> None:
        """So many more are to be delivered."""
        self._counts[subject] = self._counts.get(subject, 0) + messages

    def take(self, subject: str, messages: int) -> None:
        """So many were delivered or cancelled."""
        left = self._counts.get(subject, 0) - messages
        if left > 0:
            self._counts[subject] = left
        else:
            self._counts.pop(subject, None)
