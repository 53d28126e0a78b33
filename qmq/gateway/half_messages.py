"""Half messages: how a transaction's message waits for its commit. Pure.

A half message is a delayed message of its topic that waits for a decision (docs/DELAY.md), due when its transaction is too old. Its
transaction id is its delayed id. A commit moves it to now, a rollback cancels it. The delay group's log decides once which of the two
happens, and a committed message is delivered exactly once, even if processes die. Without a decision it is cancelled when it is due.

    half ──COMMIT: move to now────────────▶ delivered
      ├────ROLLBACK: cancel───────────────▶ gone
      ├────the last question unanswered───▶ gone
      └────due────────────────────────────▶ gone
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from qmq.client.delayed_message import DelayedMessage
from qmq.client.due_times import time_ms
from qmq.gateway.message_mapping import CHECK_AFTER_MS, TYPE
from qmq.gateway.status_codes import Refused
from qmq.proto.rocketmq import definition_pb2 as api
from qmq.text_numbers import whole_number

FIRST_CHECK_MS: Final = 6_000
"""The gateway asks about a transaction for the first time at this age, unless its message says another; RocketMQ's default."""
CHECK_PAUSES_MS: Final = (10_000, 20_000, 30_000, 60_000)
"""The pauses between the checks of a transaction; the last pause holds for all further checks."""
CHECKS_MAX: Final = 15
"""The gateway rolls a transaction back after this many checks; RocketMQ's default."""
LIMIT_MS: Final = 12 * 3600 * 1000
"""The gateway rolls a transaction back at this age, even if no producer could be asked."""


@dataclass(frozen=True, slots=True)
class TransactionTiming:
    """When the gateway asks about transactions, in milliseconds of their age, and how often it looks for them."""

    first_check_ms: int = FIRST_CHECK_MS
    pauses_ms: tuple[int, ...] = CHECK_PAUSES_MS
    checks_max: int = CHECKS_MAX
    limit_ms: int = LIMIT_MS
    look_ms: int = 3_000


TIMING: Final = TransactionTiming()


def outcome_before(found: DelayedMessage) -> api.TransactionResolution.ValueType:
    """The decision that was already made on a transaction; unspecified if none was. Raises Refused if the message belongs to no
    transaction.
    """
    if found.headers.get(TYPE) != b"TRANSACTION":
        raise Refused(api.INVALID_TRANSACTION_ID, f"{found.id} is a delayed message, not a transaction")
    if found.state == "half":
        return api.TRANSACTION_RESOLUTION_UNSPECIFIED
    return api.ROLLBACK if found.state == "cancelled" else api.COMMIT


def check_decision(wanted: api.TransactionResolution.ValueType, before: api.TransactionResolution.ValueType, transaction_id: str) -> bool:
    """True if the decision still has to be carried out. Raises Refused if the opposite was decided, or if no decision is given."""
    if wanted not in (api.COMMIT, api.ROLLBACK):
        raise Refused(api.BAD_REQUEST, "a transaction ends with COMMIT or ROLLBACK")
    if before in (api.COMMIT, api.ROLLBACK) and before != wanted:
        done = "committed" if before == api.COMMIT else "rolled back"
        raise Refused(api.INVALID_TRANSACTION_ID, f"transaction {transaction_id} was {done} before")
    return before != wanted


def check_recovery(check_after_ms: int, limit_ms: int) -> None:
    """Raises Refused if a message wants its first check at an age that its transaction never has."""
    if not 0 <= check_after_ms < limit_ms:
        raise Refused(
            api.BAD_REQUEST,
            f"an orphaned_transaction_recovery_duration is less than {limit_ms / 1000:g} s, after which a transaction is rolled back; "
            f"not {check_after_ms / 1000:g} s",
        )


def first_check_ms(half: DelayedMessage, default_ms: int) -> int:
    """The age at which to ask about the transaction for the first time: what its message says, if that is more than 0."""
    return whole_number(half.headers.get(CHECK_AFTER_MS, b"")) or default_ms


class CheckPlan:
    """Chooses the half messages to ask about now. The pauses between checks are monotonic time, so no step of the machine's clock ends the
    checks, or makes them follow each other at once.
    """

    def __init__(self, timing: TransactionTiming = TIMING) -> None:
        self.timing = timing
        self._checks: dict[str, tuple[int, int]] = {}
        """By transaction: the number of checks so far, and the time of the next check."""
        self._seen_ms: dict[str, int] = {}
        """When this gateway saw each transaction first."""

    def is_time(self, half: DelayedMessage, wall_ms: int, now_ms: int) -> bool:
        """True if the transaction is old enough, by the wall clock or since this gateway saw it, and its next check is due."""
        age_ms = max(wall_ms - time_ms(half.create_time), now_ms - self._seen_ms.setdefault(half.id, now_ms))
        return age_ms >= first_check_ms(half, self.timing.first_check_ms) and self._checks.get(half.id, (0, now_ms))[1] <= now_ms

    def is_over(self, half: DelayedMessage) -> bool:
        """True if the transaction has had its last check."""
        return self._checks.get(half.id, (0, 0))[0] >= self.timing.checks_max

    def asked(self, half: DelayedMessage, now_ms: int) -> None:
        """Record a check of the transaction."""
        self._pause(half, now_ms, 1)

    def failed(self, half: DelayedMessage, now_ms: int) -> None:
        """Record that the transaction could not be checked: that is no check, and the next try comes after the same pause."""
        self._pause(half, now_ms, 0)

    def _pause(self, half: DelayedMessage, now_ms: int, checks: int) -> None:
        count = self._checks.get(half.id, (0, 0))[0]
        pauses = self.timing.pauses_ms
        self._checks[half.id] = count + checks, now_ms + pauses[min(count, len(pauses) - 1)]

    def keep_only(self, ids: set[str]) -> None:
        """Forget all transactions except these: the others are decided."""
        for each in [each for each in self._seen_ms if each not in ids]:
            del self._seen_ms[each]
            self._checks.pop(each, None)
