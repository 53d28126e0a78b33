"""Decides whose turn it is: which of several watchdogs works, and which rows it sends next. Pure:
the caller passes the time and the rows.

*The lease.* The watchdog that holds the lease row works.

    look ──▶ WAIT (another watchdog holds it) | CREATE (there is no row) | TAKE (it expired)
    CREATE, TAKE ──▶ compare and set by the token ──▶ held or not
    held ──▶ RENEW after a third of the lease ──▶ held, or LOST: another watchdog took it

Rules:
* The database decides, in the statement that takes a lease, whether the old one has expired; the
  clocks of machines do not matter. If two watchdogs take it at the same time, one changes the row,
  and the other changes none, because the token has changed.
* The holder counts by its own monotonic clock from *before* its request: its own deadline is
  earlier than the database's.
* A holder that was paused past its lease may still send, and delete what it sent. This is harmless:
  a message that two watchdogs send has one id, and only stored messages are deleted, by their ids
  and the messages' ids. The lease only avoids double work.

*The choice.* It skips subjects that fail for a while.

    rows that wait, in the order of their ids
    ──▶ choose ──▶ for each subject, the ids to send now, in order

Rules:
* A row that its sender still claims is left out.
* Rows after a row of the same subject and key that is left out are left out, too: messages of a key
  are sent in the order of their ids. This also applies to keys of unordered subjects, at no cost.
* A subject gets up to `messages_max` messages and `bytes_max` bytes at a time, one message at
  least; what is behind them waits for the next time.
* A subject that fails is skipped for 1 s, then 2 s, 4 s, up to 30 s, until one of its messages is
  sent. So no subject delays another.

Worked example: rows 1 (a, key k, claimed), 2 (a, key j), 3 (a, key k), 4 (b): chosen are a: [2] and
b: [4]; 3 waits for 1.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple

FIRST_PAUSE_S: Final = 1.0
PAUSE_S_MAX: Final = 30.0


class WaitingRow(NamedTuple):
    """The columns of a row that the choice needs. `claimed_ms` is how long its sender still claims
    it; 0 or less if the claim expired.
    """

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


class LeaseRow(NamedTuple):
    """The lease's row in the database; `left_ms` is the remaining time by the database's clock."""

    holder: str
    token: int
    left_ms: int


class Step(Enum):
    """The watchdog's next action."""

    CREATE = "create"
    TAKE = "take"
    WAIT = "wait"
    RENEW = "renew"
    WORK = "work"


@dataclass(frozen=True, slots=True)
class HeldLease:
    """A lease that this watchdog holds or held: since when and until when, in seconds of the
    watchdog's monotonic clock.
    """

    token: int
    asked_at: float
    until: float

    def is_held(self, now: float) -> bool:
        """Whether the lease still counts."""
        return now < self.until


def next_step(held: HeldLease | None, row: LeaseRow | None, now: float) -> Step:
    """The watchdog's next action. `row` is used only while it does not hold the lease."""
    if held is not None:
        return Step.RENEW if now >= held.asked_at + (held.until - held.asked_at) / 3 else Step.WORK
    if row is None:
        return Step.CREATE
    return Step.WAIT if row.left_ms > 0 else Step.TAKE


def after_asking(token: int, is_changed: bool, asked_at: float, lease_s: float) -> HeldLease | None:
    """The held lease after taking it (with the row's new token) or renewing it."""
    return HeldLease(token, asked_at, asked_at + lease_s) if is_changed else None


def wait_s(held: HeldLease | None, row: LeaseRow | None, now: float, poll_s: float) -> float:
    """How long until the next step is due."""
    if held is not None:
        return max(held.asked_at + (held.until - held.asked_at) / 3 - now, 0.0)
    if row is None or row.left_ms <= 0:
        return 0.0
    return min(max(row.left_ms / 1000, 0.01), poll_s)
