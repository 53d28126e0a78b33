"""One batch of due messages, from planning until its outcome is known. Pure.

A batch that an earlier master planned may have been sent by it, so it is uncertain from the beginning.
"""

from __future__ import annotations

from dataclasses import dataclass

from qmq.delay.interfaces import Draft
from qmq.delivery.in_flight_batch import InFlightBatch
from qmq.errors import QmqError
from qmq.log.actions import PlanAction


@dataclass(slots=True, eq=False)
class DueBatch(InFlightBatch):
    draft: Draft
    plan: PlanAction | None = None
    """None until the plan is committed: the batch must not be sent before."""
    is_lost: bool = False
    """Whether its outcome can never be known: its messages are sent again, with their ids."""
    fault: QmqError | None = None
    """Why it can never be stored as it is."""
    says_again: bool = False
    """Whether `encoded` has the flag `BatchFlag.AGAIN`."""

    @property
    def producer_id(self) -> int:
        """The producer id of its number."""
        return self.draft.producer_id
