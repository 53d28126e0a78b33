"""One batch of due messages on its way to its broker group, from the moment it is to be planned until its fate is known. Pure.

A batch that an earlier master planned may have been sent by it, once or often: it is uncertain from the beginning.
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
    """None until the ledger has committed it: it must not leave before."""
    is_lost: bool = False
    """Whether nobody will ever say what became of it: its messages go again, with their ids."""
    fault: QmqError | None = None
    """Why it can never be stored as it is."""
    says_again: bool = False
    """Whether `encoded` says that it may be there already (`BatchFlag.AGAIN`)."""

    @property
    def producer_id(self) -> int:
        """Under which it is numbered."""
        return self.draft.producer_id
