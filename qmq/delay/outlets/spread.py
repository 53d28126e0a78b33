"""The way of an unordered subject: each batch goes to any of its broker groups that takes messages.

Rules:
* Groups take turns, batch by batch; one that is away, drained, silent or busy is passed over, so it holds up nothing but what is planned
  there. While no group can be had nothing is planned.
* What was refused by a group, or never left for it, is void as soon as another group can have it, or when the group is drained; what may be
  stored there stays there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from qmq.delay.interfaces import Draft, DueMessage, SchedulePlace
from qmq.delay.outlets.channel import Channel
from qmq.delay.outlets.courier import Courier
from qmq.delay.outlets.parcel import Parcel
from qmq.delay.outlets.tray import Tray, encoded
from qmq.errors import QmqError, ReadOnly

if TYPE_CHECKING:
    from qmq.delay.outlets.outlet import Outlet


class Spread:
    is_ordered = False

    def __init__(self, outlet: Outlet, resumed: Sequence[Parcel]) -> None:
        self.subject = outlet.subject
        self._outlet = outlet
        self._office = outlet.office
        self._locator = outlet.office.links.locator
        self._loop = asyncio.get_running_loop()
        self._tray = Tray(self._office.limits, outlet.suspects)
        self._couriers: dict[tuple[str, int], Courier] = {}
        self._groups: Mapping[str, bool] = {}
        self._turns: list[Courier] = []
        self._at = 0
        self._asking: asyncio.Task[None] | None = None
        self._is_closed = False
        for parcel in resumed:
            self._courier(parcel.draft.broker_group, parcel.draft.partition).channel.admit(parcel)
        self._locator.listen(self.subject, self._rerouted)
        self._rerouted()

    # --- in ------------------------------------------------------------------------------------------------------------

    def put(self, messages: Sequence[DueMessage]) -> None:
        self._tray.messages.extend(messages)
        self._draft()

    def put_back(self, messages: Sequence[DueMessage]) -> None:
        self._tray.put_back(messages)

    def withdraw(self, place: SchedulePlace) -> bool:
        """Take out what is not planned; False if it is not here."""
        return self._tray.withdraw(place)

    def take_waiting(self) -> list[DueMessage]:
        """All that is not planned, in order."""
        messages = list(self._tray.messages)
        self._tray.messages.clear()
        return messages

    # --- out -----------------------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Plan and send what can be."""
        self._draft()
        for courier in list(self._couriers.values()):
            courier.pump()

    def _draft(self) -> None:
        """Plan what waits, as long as there is a group for it."""
        tray = self._tray
        if tray and not self._outlet.is_held and not self._is_closed:
            self._locator.touch(self.subject)
            while tray and (courier := self._pick()) is not None:
                messages, size = tray.take()
                channel = courier.channel
                draft = Draft(self.subject, 0, channel.group, *self._office.next_number(), messages)
                self._office.plan(channel, draft, size, courier.pump)
            if tray:
                self._look_for_more()

    def _pick(self) -> Courier | None:
        now, turns = self._loop.time(), self._turns
        for step in range(1, len(turns) + 1):
            at = (self._at + step) % len(turns)
            if turns[at].channel.may_admit(now):
                self._at = at
                return turns[at]
        return None

    def _look_for_more(self) -> None:
        for courier in self._turns:
            courier.reach()
        if not self._turns and self._asking is None:
            self._asking = self._loop.create_task(self._ask())

    async def _ask(self) -> None:
        """All groups are drained, or there is none: ask until there is one; the locator keeps the pauses."""
        try:
            while self._tray and not self._turns and not self._outlet.is_held:
                try:
                    self._groups = await self._locator.groups(self.subject, anew=True)
                    self._rerouted()
                except QmqError as failure:
                    self._outlet.hold(failure)
        finally:
            self._asking = None

    def encode(self, parcel: Parcel) -> tuple[bytes, bytes]:
        """The batch as it travels. Raises MessageTooLarge."""
        return encoded(parcel.draft, is_again=parcel.is_uncertain)

    # --- what changes --------------------------------------------------------------------------------------------------

    def changed(self, courier: Courier) -> None:
        """For a courier: see `Owner`."""
        self._release(courier)
        self._tray.put_back(self._outlet.collect(courier.channel))
        self._draft()
        courier.pump()

    def _release(self, courier: Courier) -> None:
        channel, now = courier.channel, self._loop.time()
        if channel.flight and channel.is_troubled(now):
            others = [each for each in self._turns if each is not courier and not each.channel.is_troubled(now)]
            if others or not self._groups.get(channel.group):
                channel.release()

    def wants(self, courier: Courier) -> bool:
        """For a courier: whether something waits that it may have."""
        return bool(self._tray) and not self._outlet.is_held and courier in self._turns

    def _rerouted(self) -> None:
        """The locator knows something new about the subject or its groups."""
        groups = self._locator.book.groups(self.subject)
        if groups is None or self._is_closed:
            return
        self._groups = groups
        self._turns = [self._courier(group) for group, is_writable in groups.items() if is_writable]
        for courier in list(self._couriers.values()):
            courier.moved()
            self.changed(courier)

    def _courier(self, group: str, partition: int = 0) -> Courier:
        courier = self._couriers.get((group, partition))
        if courier is None:
            courier = self._couriers[group, partition] = Courier(self._office.links, Channel(group, partition), self)
        return courier

    # --- for people, and the end ---------------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Messages that are not planned."""
        return len(self._tray)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is planned and undecided."""
        return not any(courier.channel.flight for courier in self._couriers.values())

    def trouble(self) -> tuple[int, str]:
        """Messages that cannot be delivered now, and why."""
        now = self._loop.time()
        troubled = [courier.channel for courier in self._couriers.values() if courier.channel.is_troubled(now)]
        count = sum([len(parcel.draft.messages) for channel in troubled for parcel in channel.flight])
        why: QmqError | None = next((channel.trouble for channel in troubled if channel.trouble is not None), None)
        if not self._turns:
            why = why or ReadOnly(f"no broker group takes messages of {self.subject!r} just now: all are drained")
        if all(courier.channel in troubled for courier in self._turns):
            count += len(self._tray)
        return count, str(why) if why is not None else ""

    def close(self) -> None:
        """Nothing more is sent."""
        self._is_closed = True
        self._locator.unlisten(self.subject, self._rerouted)
        if self._asking is not None:
            self._asking.cancel()
        for courier in self._couriers.values():
            courier.close()
