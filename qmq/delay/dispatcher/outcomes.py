"""The outcomes of a subject's batches: decided batches are recorded, messages at fault are set aside, and a permanent refusal pauses
planning.

Rules:
* Errors that an operator has to repair (the subject is deleted, its messages are refused) are retried after pauses that rise to 30 s.
* A batch that is refused because of its content is halved until the messages at fault are alone. Only those wait, and the log names them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

from qmq.delay.dispatcher.batch_planner import BatchPlanner, Withdraw
from qmq.delay.dispatcher.due_window import DueBatch, DueWindow
from qmq.delay.interfaces import DueMessage, SchedulePlace
from qmq.delivery.retries import pause_s
from qmq.errors import InvalidArgument, MessageTooLarge, QmqError

log = logging.getLogger("qmq.delay")


class _Aside(NamedTuple):
    message: DueMessage
    why: QmqError
    timer: asyncio.TimerHandle


class SubjectOutcomes:
    """`locate_again` is called with a pause in seconds when planning is held. `put_back` takes a message that was set aside, to be sent
    before all others. `withdraw` removes a waiting message of the subject.
    """

    def __init__(
        self,
        subject: str,
        planner: BatchPlanner,
        locate_again: Callable[[float], None],
        put_back: Callable[[DueMessage], None],
        withdraw: Withdraw,
    ) -> None:
        self.suspects: dict[SchedulePlace, int] = {}
        """Messages of batches that were refused because of their content, and how many may share a batch with each."""
        self.refusal: QmqError | None = None
        """Why planning is held."""
        self._subject = subject
        self._planner = planner
        self._locate_again = locate_again
        self._put_back = put_back
        self._withdraw = withdraw
        self._loop = asyncio.get_running_loop()
        self._aside: dict[SchedulePlace, _Aside] = {}
        self._tries: dict[SchedulePlace, int] = {}
        self._refusals = 0

    # --- held ----------------------------------------------------------------------------------------------------------

    @property
    def is_held(self) -> bool:
        """Whether planning is paused."""
        return self.refusal is not None

    def hold(self, failure: QmqError) -> None:
        """Plan nothing for a while, then locate the subject again."""
        if self.refusal is None:
            self.refusal = failure
            self._refusals += 1
            self._locate_again(pause_s(self._refusals, failure))

    def not_located(self, failure: QmqError) -> None:
        """Locating the subject failed: planning is held until it succeeds."""
        self.refusal = failure

    def located(self) -> None:
        """The subject is located: continue planning."""
        self.refusal = None

    # --- decided -------------------------------------------------------------------------------------------------------

    def collect(self, window: DueWindow) -> list[DueMessage]:
        """Record what was decided. Returns the messages to be planned again, in order."""
        for batch, produced in window.take_done():
            self._planner.done(batch, produced)
            self._refusals = 0
            self.forget([message.place for message in batch.draft.messages])
        void = window.take_void()
        if not void:
            return []
        self._planner.void(void, self._withdraw)
        return [message for batch in void for message in self._again(batch)]

    def forget(self, places: Sequence[SchedulePlace]) -> None:
        """These messages are stored, or withdrawn."""
        if self.suspects or self._tries:
            for place in places:
                self.suspects.pop(place, None)
                self._tries.pop(place, None)

    def _again(self, batch: DueBatch) -> Sequence[DueMessage]:
        messages, fault = batch.draft.messages, batch.fault
        if isinstance(fault, MessageTooLarge | InvalidArgument):
            if len(messages) == 1:
                self.set_aside(messages[0], fault)
                return []
            self.suspects.update(dict.fromkeys([message.place for message in messages], len(messages) // 2))
        elif fault is not None:
            self.hold(fault)
        return messages

    # --- set aside -----------------------------------------------------------------------------------------------------

    def set_aside(self, message: DueMessage, why: QmqError) -> None:
        """The message cannot be delivered now; it is retried later, alone."""
        place = message.place
        self.suspects[place] = 1
        tries = self._tries[place] = self._tries.get(place, 0) + 1
        if tries == 1:
            log.error(
                "message %s to %r cannot be delivered and is set aside; it will be tried again from time to time: %s",
                message.message_id.hex(),
                self._subject,
                why,
            )
        self._aside[place] = _Aside(message, why, self._loop.call_later(pause_s(tries, why), self._try_again, place))

    def _try_again(self, place: SchedulePlace) -> None:
        self._put_back(self._aside.pop(place).message)

    def take_aside(self, place: SchedulePlace) -> bool:
        """Remove a message that is set aside; False if it is not."""
        aside = self._aside.pop(place, None)
        if aside is not None:
            aside.timer.cancel()
        return aside is not None

    @property
    def aside_messages(self) -> int:
        """Messages that no partition accepts as they are."""
        return len(self._aside)

    @property
    def why_aside(self) -> str:
        """Why one of the messages that are set aside is not accepted; empty without any."""
        return str(next(iter(self._aside.values())).why) if self._aside else ""

    def close(self) -> None:
        """Try nothing again."""
        for aside in self._aside.values():
            aside.timer.cancel()
