"""Decides which of several watchdogs works: the one that holds the lease row. Pure: takes the row, returns the next step.

    look ──▶ WAIT (another watchdog holds it) | CREATE (there is no row) | TAKE (it expired) ─ compare and set by the token ──▶ held or not
    held ──▶ RENEW after a third of the lease ──▶ held, or LOST: another watchdog took it

Rules:
* The database decides, in the statement that takes a lease, whether the old one has expired; the clocks of machines do not matter. If two
  watchdogs take it at the same time, one changes the row, and the other changes none, because the token has changed.
* The holder counts by its own monotonic clock from *before* its request: its own deadline is earlier than the database's.
* A holder that was paused past its lease may still send, and delete what it sent. This is harmless: a message that two watchdogs send has
  one id, and only stored messages are deleted, by their ids and the messages' ids. The lease only avoids double work.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


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
class Held:
    """A lease that this watchdog holds or held: since when and until when, in seconds of the watchdog's monotonic clock."""

    token: int
    asked_at: float
    until: float

    def is_held(self, now: float) -> bool:
        """Whether the lease still counts."""
        return now < self.until


def next_step(held: Held | None, row: LeaseRow | None, now: float) -> Step:
    """The watchdog's next action. `row` is used only while it does not hold the lease."""
    if held is not None:
        return Step.RENEW if now >= held.asked_at + (held.until - held.asked_at) / 3 else Step.WORK
    if row is None:
        return Step.CREATE
    return Step.WAIT if row.left_ms > 0 else Step.TAKE


def after_asking(token: int, is_changed: bool, asked_at: float, lease_s: float) -> Held | None:
    """The held lease after taking it (with the row's new token) or renewing it."""
    return Held(token, asked_at, asked_at + lease_s) if is_changed else None


def wait_s(held: Held | None, row: LeaseRow | None, now: float, poll_s: float) -> float:
    """How long until the next step is due."""
    if held is not None:
        return max(held.asked_at + (held.until - held.asked_at) / 3 - now, 0.0)
    if row is None or row.left_ms <= 0:
        return 0.0
    return min(max(row.left_ms / 1000, 0.01), poll_s)
