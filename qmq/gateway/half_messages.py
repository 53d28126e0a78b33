"""Half messages: how a transaction's message waits for its commit. Pure.

A half message is a delayed message of its topic that is due in 700 days (`HALF_LIFE_MS` after it was taken). Its transaction id is its
delayed id. To commit is to move it to now, to roll back is to cancel it: the delay group's log decides which of the two happens, once, and
delivers what was committed exactly once, whatever dies meanwhile (docs/DELAY.md).

    half ──COMMIT: move to now──▶ delivered
      └────ROLLBACK: cancel─────▶ gone

Since its due time says when it was taken, all that wait for a decision are found by their due times; a header tells them from messages that
an application delayed for as long.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Final

from qmq.client.delayed_message import DelayedMessage
from qmq.client.due_times import time_ms
from qmq.gateway.message_mapping import TYPE
from qmq.gateway.status_codes import Refused
from qmq.proto.rocketmq import definition_pb2 as api

HALF_LIFE_MS: Final = 700 * 24 * 3600 * 1000
FIRST_CHECK_MS: Final = 6_000
"""A transaction is asked about when it is as old as this; RocketMQ's default."""
CHECK_PAUSES_MS: Final = (10_000, 20_000, 30_000, 60_000)
"""Between two checks of a transaction; the last one holds for all further ones."""
LIMIT_MS: Final = 12 * 3600 * 1000
"""A transaction that is as old as this is rolled back."""
_SLACK_MS: Final = 7 * 24 * 3600 * 1000
"""So long may all gateways be away, and what became too old meanwhile is rolled back by the first that comes."""
_DECIDED: Final = ("planned", "delivered", "moved")


@dataclass(frozen=True, slots=True)
class TransactionTiming:
    """When transactions are asked about, in milliseconds of their age, and how often anybody looks."""

    first_check_ms: int = FIRST_CHECK_MS
    pauses_ms: tuple[int, ...] = CHECK_PAUSES_MS
    limit_ms: int = LIMIT_MS
    look_ms: int = 3_000


TIMING: Final = TransactionTiming()


def is_half(found: DelayedMessage) -> bool:
    """Whether a delayed message is one that waits for its transaction."""
    return found.headers.get(TYPE) == b"TRANSACTION"


def taken_ms(found: DelayedMessage) -> int:
    """When a half message was taken, milliseconds since 1970."""
    return time_ms(found.due) - HALF_LIFE_MS


def outcome_before(found: DelayedMessage, now: datetime) -> api.TransactionResolution.ValueType:
    """What was decided of it already; unspecified for nothing."""
    if found.state == "cancelled":
        return api.ROLLBACK
    is_committed = found.state in _DECIDED or found.due <= now
    return api.COMMIT if is_committed else api.TRANSACTION_RESOLUTION_UNSPECIFIED


def check_decision(wanted: api.TransactionResolution.ValueType, before: api.TransactionResolution.ValueType, transaction_id: str) -> bool:
    """Whether there is anything to do. Raises Refused if the opposite was decided, or nothing is wanted."""
    if wanted not in (api.COMMIT, api.ROLLBACK):
        raise Refused(api.BAD_REQUEST, "a transaction ends with COMMIT or ROLLBACK")
    if before in (api.COMMIT, api.ROLLBACK) and before != wanted:
        done = "committed" if before == api.COMMIT else "rolled back"
        raise Refused(api.INVALID_TRANSACTION_ID, f"transaction {transaction_id} was {done} before")
    return before != wanted


class CheckPlan:
    """Which half messages to ask about now. Times in milliseconds since 1970."""

    def __init__(self, timing: TransactionTiming = TIMING) -> None:
        self.timing = timing
        self._checks: dict[str, tuple[int, int]] = {}
        """By transaction: how often it was asked about, and when to ask again."""

    def window(self, now_ms: int) -> tuple[int, int]:
        """The due times of half messages that are old enough to be asked about, and were not rolled back long ago: from, to."""
        oldest_ms = now_ms - self.timing.limit_ms - _SLACK_MS
        return oldest_ms + HALF_LIFE_MS, now_ms - self.timing.first_check_ms + HALF_LIFE_MS

    def is_over(self, half: DelayedMessage, now_ms: int) -> bool:
        """Whether it is too old, and is to be rolled back."""
        return now_ms - taken_ms(half) >= self.timing.limit_ms

    def is_time(self, half: DelayedMessage, now_ms: int) -> bool:
        """Whether to ask now."""
        return self._checks.get(half.id, (0, 0))[1] <= now_ms

    def asked(self, half: DelayedMessage, now_ms: int) -> None:
        """It was asked about."""
        count = self._checks.get(half.id, (0, 0))[0]
        pauses = self.timing.pauses_ms
        self._checks[half.id] = count + 1, now_ms + pauses[min(count, len(pauses) - 1)]

    def keep_only(self, ids: set[str]) -> None:
        """The others are decided."""
        for each in [each for each in self._checks if each not in ids]:
            del self._checks[each]
