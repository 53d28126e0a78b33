"""All outlets: due messages come in, mixed; each subject has an outlet of its own, and none waits for another.

    outlets = Outlets(links, ledger, new_producer_id=ProducerIds())
    outlets.resume(plan, messages)      every open plan of earlier masters, in the order of their numbers, before the first put
    outlets.put(messages)
    ...
    await outlets.stop()

What is asked of the ledger: plans, dones and voids are written in the order of the calls (several may share an entry). So an open plan in
the log means that what follows it in its channel and depends on it was not planned yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from qmq import limits
from qmq.client.links import Links
from qmq.delay.interfaces import Draft, DueMessage, PlanLog, SchedulePlace
from qmq.delay.outlets.office import Office
from qmq.delay.outlets.outlet import Outlet
from qmq.delay.outlets.parcel import Parcel
from qmq.delay.outlets.tray import Limits, size_of
from qmq.log.actions import PlanAction

BATCH_MESSAGES: Final = 1_000
BATCH_BYTES: Final = 256 * limits.KIB
OUTLETS_MAX: Final = 4_096
"""More outlets than this are kept only while they have something to do."""


class Outlets:
    """One life of a master; the links' locator must not create subjects: one that was deleted stays so."""

    def __init__(
        self,
        links: Links,
        ledger: PlanLog,
        *,
        batch_messages: int = BATCH_MESSAGES,
        batch_bytes: int = BATCH_BYTES,
        new_producer_id: Callable[[], int],
    ) -> None:
        self._office = Office(links, ledger, Limits(batch_messages, batch_bytes), new_producer_id, self.halt)
        self._outlets: dict[str, Outlet] = {}
        self._kept = OUTLETS_MAX

    # --- in ------------------------------------------------------------------------------------------------------------

    def resume(self, plan: PlanAction, messages: Sequence[DueMessage]) -> None:
        """An open plan of an earlier master, and its messages in their order: sent again under its own number, before anything newer of its
        keys. Plans come in the order of their numbers, all of them before the first `put`.
        """
        draft = Draft(plan.subject, plan.partition, plan.broker_group, plan.producer_id, plan.batch_sequence, messages)
        size = sum([size_of(message) for message in messages])
        if not self._office.is_closed:
            self._outlet(plan.subject).resume(Parcel(draft, plan, size=size, is_uncertain=True))

    def put(self, messages: Sequence[DueMessage]) -> None:
        """Due messages in their order, all subjects mixed. They wait here until they are planned."""
        if self._office.is_closed:
            return
        by_subject: dict[str, list[DueMessage]] = {}
        for message in messages:
            found = by_subject.get(message.subject)
            if found is None:
                found = by_subject[message.subject] = []
            found.append(message)
        for subject, its in by_subject.items():
            self._outlet(subject).put(its)

    def withdraw(self, place: SchedulePlace) -> bool:
        """Take out a message that is cancelled or moved; False if it is planned already, or may be delivered, or is not here."""
        outlet = self._office.waiting.get(place)
        return outlet is not None and place not in self._office.doubtful and outlet.withdraw(place)

    def _outlet(self, subject: str) -> Outlet:
        outlet = self._outlets.get(subject)
        if outlet is None:
            if len(self._outlets) >= self._kept:
                self._close_idle()
            outlet = self._outlets[subject] = Outlet(subject, self._office)
        return outlet

    def _close_idle(self) -> None:
        for subject, outlet in list(self._outlets.items()):
            if outlet.is_idle:
                outlet.close()
                del self._outlets[subject]
        self._kept = max(OUTLETS_MAX, 2 * len(self._outlets))

    # --- how it stands -------------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Messages put and not planned."""
        return len(self._office.waiting)

    @property
    def planned(self) -> int:
        """Messages planned (or about to be) and not decided."""
        return self._office.planned

    @property
    def resent(self) -> int:
        """Messages sent again although they may be stored: their partition was fenced before it answered, or forgot their producer."""
        return self._office.resent

    @property
    def set_aside(self) -> int:
        """Messages that cannot be delivered as they are: the log names them."""
        return sum([outlet.set_aside_messages for outlet in self._outlets.values()])

    def stuck(self, subject: str) -> int:
        """Messages of the subject that wait and cannot be delivered now; 0 if all of them can."""
        outlet = self._outlets.get(subject)
        return 0 if outlet is None else outlet.trouble()[0]

    def troubles(self) -> list[tuple[str, int, str]]:
        """(subject, messages that wait, why): the subjects that cannot be delivered now, or not all of them."""
        found = [(subject, *outlet.trouble()) for subject, outlet in self._outlets.items()]
        return [each for each in found if each[1]]

    # --- the end -------------------------------------------------------------------------------------------------------

    def halt(self) -> None:
        """Nothing more is sent, and the ledger is not called again."""
        self._office.close()
        for outlet in self._outlets.values():
            outlet.close()

    async def stop(self) -> None:
        """This master is one no longer, or ends: nothing more is sent, at once, and the ledger is not called again."""
        self.halt()
        await self._office.wait_closed()
