"""What the dispatcher of a located subject (`BalancedDispatcher`, `PartitionedDispatcher`) needs of its `SubjectDispatcher`."""

from __future__ import annotations

from typing import Protocol

from qmq.delay.dispatcher.batch_planner import BatchPlanner
from qmq.delay.dispatcher.due_window import DueWindow
from qmq.delay.interfaces import DueMessage, SchedulePlace
from qmq.errors import QmqError


class DispatcherOwner(Protocol):
    """The dispatcher of one subject, whatever its order."""

    subject: str
    planner: BatchPlanner
    suspects: dict[SchedulePlace, int]
    """Messages of batches that were refused because of their content, and how many may share a batch with each."""

    @property
    def is_held(self) -> bool:
        """Whether nothing new may be planned until a pause is over."""
        ...

    def hold(self, failure: QmqError) -> None:
        """Plan nothing new for a while, then locate the subject anew."""
        ...

    def set_aside(self, message: DueMessage, why: QmqError) -> None:
        """The message cannot be delivered as it is; it is retried later, alone."""
        ...

    def collect(self, window: DueWindow) -> list[DueMessage]:
        """Record what was decided. Returns the messages to be planned again, in order."""
        ...
