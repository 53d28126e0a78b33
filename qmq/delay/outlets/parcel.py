"""A parcel: one batch on its way to its broker group, from the moment it is to be planned until its fate is known. Pure.

It is *certainly not stored* when every try of it was answered so, and there can be no try that we know nothing of. A parcel that an earlier
master planned may have been sent by it, once or often: it is uncertain from the beginning.
"""

from __future__ import annotations

from dataclasses import dataclass

from qmq.delay.interfaces import Draft, DueMessage
from qmq.errors import QmqError
from qmq.log.actions import PlanAction


@dataclass(slots=True, eq=False)
class Parcel:
    draft: Draft
    size: int
    """Bytes of its messages, about."""
    plan: PlanAction | None = None
    """None until the ledger has committed it: it must not leave before."""
    is_uncertain: bool = False
    """Whether a try ended without anybody knowing."""
    attempts: int = 0
    unanswered: int = 0
    """Tries whose answer may still come."""
    is_out: bool = False
    """Whether its partition, sealed, said that it is not in it: then no earlier try counts any more."""
    is_lost: bool = False
    """Whether nobody will ever say what became of it: its messages go again, with their ids."""
    first_question: int = 0
    """The first attempt that was made when the partition was known to be left; 0: none."""
    run: int = 0
    is_gone: bool = False
    """Whether it is decided: answers that come late mean nothing."""
    fault: QmqError | None = None
    """Why it can never be stored as it is."""
    encoded: tuple[bytes, bytes] | None = None
    says_again: bool = False
    """Whether `encoded` says that it may be there already (`BatchFlag.AGAIN`)."""

    @property
    def producer_id(self) -> int:
        """Under which it is numbered."""
        return self.draft.producer_id

    @property
    def messages(self) -> list[DueMessage]:
        """What is in it."""
        return list(self.draft.messages)

    @property
    def is_certain(self) -> bool:
        """Whether it is certainly not stored, and no try can change that any more."""
        return self.is_out or not (self.unanswered or self.is_uncertain)
