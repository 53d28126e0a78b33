"""Decides which rows a watchdog sends next, and which subjects it skips for a while. Pure: the caller passes the time.

    rows that wait, in the order of their ids ──▶ choose ──▶ for each subject, the ids to send now, in order

Rules:
* A row that its sender still claims is left out.
* Rows after a row of the same subject and key that is left out are left out, too: messages of a key are sent in the order of their ids.
  This also applies to keys of unordered subjects, at no cost.
* A subject gets up to `messages_max` messages and `bytes_max` bytes at a time, one message at least; what is behind them waits for the
  next time.
* A subject that fails is skipped for 1 s, then 2 s, 4 s, up to 30 s, until one of its messages is sent. So no subject delays another.

Worked example: rows 1 (a, key k, claimed), 2 (a, key j), 3 (a, key k), 4 (b): chosen are a: [2] and b: [4]; 3 waits for 1.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

FIRST_PAUSE_S: Final = 1.0
PAUSE_S_MAX: Final = 30.0


class WaitingRow(NamedTuple):
    """The columns of a row that the choice needs. `claimed_ms` is how long its sender still claims it; 0 or less if the claim expired."""

    id: int
    subject: str
    key_hash: int | None
    size: int
    claimed_ms: int


def choose(rows: Iterable[WaitingRow], messages_max: int, bytes_max: int) -> dict[str, list[int]]:
    chosen: dict[str, list[int]] = {}
    room: dict[str, int] = {}
    held: set[tuple[str, int]] = set()
    for row in rows:
        key = None if row.key_hash is None else (row.subject, row.key_hash)
        taken = chosen.get(row.subject, ())
        left = room.get(row.subject, bytes_max)
        is_full = bool(taken) and (len(taken) >= messages_max or row.size > left)
        if is_full:
            room[row.subject] = -1  # take no more messages of this subject, however small
        elif row.claimed_ms <= 0 and key not in held:
            chosen.setdefault(row.subject, []).append(row.id)
            room[row.subject] = left - row.size
            continue
        if key is not None:
            held.add(key)
    return chosen


class Patience:
    """Tracks which subjects fail, and how long each is skipped."""

    def __init__(self) -> None:
        self._failing: dict[str, tuple[float, float]] = {}

    def failed(self, subject: str, now: float) -> float:
        """No message of the subject could be sent. Returns the pause before the next try."""
        pause, _ = self._failing.get(subject, (FIRST_PAUSE_S / 2, 0.0))
        pause = min(pause * 2, PAUSE_S_MAX)
        self._failing[subject] = (pause, now + pause)
        return pause

    def sent(self, subject: str) -> None:
        """Messages of the subject were sent."""
        self._failing.pop(subject, None)

    def resting(self, now: float) -> list[str]:
        """The subjects that are currently skipped."""
        return [subject for subject, (_, until) in self._failing.items() if until > now]
