"""The way of an ordered subject: each message goes to the partition that holds its key when it is due, each key in order.

    put ─▶ by logical partition ─▶ branch: tray ─planned─▶ channel ─▶ its partition
                  ▲                              │ settled after a change of the route
                  └──────── newest route ────────┘ what is not stored there, and what waits behind it

Rules:
* All undecided messages of a logical partition are in one branch: the one that the table (`_by_lp`) names. A range flips to the newest
  route's partition when the old one's channel is settled; until then new messages wait behind, in the old one's tray.
* What an earlier master planned goes first. If the newest route lacks its partition, the logical partitions of its messages wait for it.
* The route is asked for when a partition refuses as if it were sealed, again and again until it is newer.
* A message without a key cannot be sent here: it is set aside.

Worked example: partition 1 holds [0, 8) and is split into 2 and 3 while three batches are on their way: the first is stored, the others
are refused. The route of version 2 lacks partition 1, and what was refused is certainly not stored: void. Its messages, and then those that
waited behind them, go to the trays of 2 and 3, in order, and the table names 2 and 3 from now on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from qmq_ordering.route import PhysicalPartition, Route

from qmq.client.ordered.batch_builder import Keys
from qmq.client.route_book import Ordering
from qmq.delay.interfaces import Draft, DueMessage, SchedulePlace
from qmq.delay.outlets.channel import Channel
from qmq.delay.outlets.courier import Courier
from qmq.delay.outlets.parcel import Parcel
from qmq.delay.outlets.tray import Tray, encoded
from qmq.errors import InvalidArgument, QmqError, RouteChanged

if TYPE_CHECKING:
    from qmq.delay.outlets.outlet import Outlet


class Branch:
    """One partition's part: what waits for it, and its courier."""

    def __init__(self, tray: Tray, courier: Courier) -> None:
        self.tray = tray
        self.courier = courier
        self.channel = courier.channel


class Routed:
    is_ordered = True

    def __init__(self, outlet: Outlet, ordering: Ordering, resumed: Sequence[Parcel]) -> None:
        self.subject = outlet.subject
        self._outlet = outlet
        self._office = outlet.office
        self._locator = outlet.office.links.locator
        self._loop = asyncio.get_running_loop()
        self._keys = Keys(ordering.route.logical_partitions)
        self._route: Route | None = None
        self._branches: dict[int, Branch] = {}
        self._by_lp: list[Branch] = []
        self._following: asyncio.Task[None] | None = None
        self._is_closed = False
        self._begin(ordering, resumed)

    def _begin(self, ordering: Ordering, resumed: Sequence[Parcel]) -> None:
        route = self._route = ordering.route
        for part in route.partitions:
            self._branch(part.number, part.group)
        self._by_lp = [self._branches[route.holder(lp).number] for lp in range(route.logical_partitions)]
        for parcel in resumed:
            number = parcel.draft.partition
            branch = self._branch(number, parcel.draft.broker_group)
            branch.channel.admit(parcel)
            if route.partition(number) is None:
                for lp in self._lps(parcel.draft.messages):
                    self._by_lp[lp] = branch
        self._locator.listen(self.subject, self._rerouted)
        self._learn(ordering)

    def _branch(self, number: int, group: str) -> Branch:
        branch = self._branches.get(number)
        if branch is None:
            courier = Courier(self._office.links, Channel(group, number, is_ordered=True), self)
            branch = self._branches[number] = Branch(Tray(self._office.limits, self._outlet.suspects), courier)
        return branch

    def _lps(self, messages: Sequence[DueMessage]) -> list[int]:
        return self._keys.of_many([message.key for message in messages])

    # --- in ------------------------------------------------------------------------------------------------------------

    def put(self, messages: Sequence[DueMessage]) -> None:
        messages = self._with_key(messages)
        by_lp, touched = self._by_lp, dict[int, Branch]()
        for message, lp in zip(messages, self._lps(messages), strict=True):
            branch = by_lp[lp]
            branch.tray.messages.append(message)
            touched[branch.channel.partition] = branch
        for branch in touched.values():
            self._draft(branch)

    def _with_key(self, messages: Sequence[DueMessage]) -> Sequence[DueMessage]:
        if all([message.key for message in messages]):  # noqa: C419 - faster than a generator
            return messages
        why = InvalidArgument(f"subject {self.subject!r} is ordered, and the message has no key")
        for message in messages:
            if not message.key:
                self._outlet.set_aside(message, why)
        return [message for message in messages if message.key]

    def put_back(self, messages: Sequence[DueMessage]) -> None:
        messages = self._with_key(messages)
        for message, lp in reversed(list(zip(messages, self._lps(messages), strict=True))):
            self._by_lp[lp].tray.messages.appendleft(message)

    def withdraw(self, place: SchedulePlace) -> bool:
        """Take out what is not planned; False if it is not here."""
        return any(branch.tray.withdraw(place) for branch in self._branches.values())

    def take_waiting(self) -> list[DueMessage]:
        """All that is not planned, per key in order."""
        messages = [message for branch in self._branches.values() for message in branch.tray.messages]
        for branch in self._branches.values():
            branch.tray.messages.clear()
        return messages

    # --- out -----------------------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Plan and send what can be."""
        for branch in list(self._branches.values()):
            self._draft(branch)
            branch.courier.pump()

    def _draft(self, branch: Branch) -> None:
        """Plan what waits for a partition, as long as its broker group takes it."""
        tray, channel = branch.tray, branch.channel
        if not tray or self._outlet.is_held or self._is_closed:
            return
        self._locator.touch(self.subject)
        while tray and channel.may_admit(self._loop.time()):
            messages, size = tray.take()
            draft = Draft(self.subject, channel.partition, channel.group, *channel.number(self._office.new_id), messages)
            self._office.plan(channel, draft, size, lambda: self._planned(branch))
        if tray:
            branch.courier.reach()

    def _planned(self, branch: Branch) -> None:
        if not branch.courier.is_closed:
            self.changed(branch.courier)

    def encode(self, parcel: Parcel) -> tuple[bytes, bytes]:
        """The batch as it travels. Raises MessageTooLarge."""
        return encoded(parcel.draft, self._lps(parcel.draft.messages), is_again=parcel.is_uncertain)

    # --- what changes --------------------------------------------------------------------------------------------------

    def changed(self, courier: Courier) -> None:
        """For a courier: see `Owner`."""
        channel = courier.channel
        branch = self._branches[channel.partition]
        if channel.is_settled:
            self._settle()
            return
        self.put_back(self._outlet.collect(channel))
        self._draft(branch)
        courier.pump()
        if channel.wants_route and self._following is None and not self._is_closed:
            self._following = self._loop.create_task(self._follow())

    def wants(self, courier: Courier) -> bool:
        """For a courier: whether something waits that could be planned for it."""
        branch = self._branches.get(courier.channel.partition)
        return branch is not None and bool(branch.tray) and not branch.channel.is_left and not self._outlet.is_held

    # --- routes --------------------------------------------------------------------------------------------------------

    def _rerouted(self) -> None:
        """The locator knows something new about the subject or its groups."""
        ordering = self._locator.book.ordering(self.subject)
        if ordering is not None and not self._is_closed:
            self._learn(ordering)

    def _learn(self, ordering: Ordering) -> None:
        route, known = ordering.route, self._route
        if known is not None and route.version < known.version:
            return
        is_newer = known is not None and route.version > known.version
        self._route = route
        for part in route.partitions:
            self._keep(part, is_newer)
        for number, branch in self._branches.items():
            if route.partition(number) is None:
                branch.channel.leave(self._loop.time(), is_fenced=number in ordering.fenced)
        self._settle()
        for branch in list(self._branches.values()):
            branch.courier.moved()

    def _keep(self, part: PhysicalPartition, is_newer: bool) -> None:
        branch = self._branch(part.number, part.group)
        if is_newer:
            branch.channel.keep()

    def _settle(self) -> None:
        """What is settled hands over: what was not stored there, and then what waited behind it, goes by the newest route."""
        for number, branch in sorted(self._branches.items()):
            if branch.channel.is_settled:
                branch.channel.settle()
                del self._branches[number]
                self._flip(branch)
                branch.courier.close()
                waiting = self._outlet.collect(branch.channel)
                waiting += branch.tray.messages
                for message, lp in zip(waiting, self._lps(waiting), strict=True):
                    self._by_lp[lp].tray.messages.append(message)
        self.pump()

    def _flip(self, old: Branch) -> None:
        assert self._route is not None
        for lp, branch in enumerate(self._by_lp):
            if branch is old:
                self._by_lp[lp] = self._branches[self._route.holder(lp).number]

    async def _follow(self) -> None:
        """Ask for the route until it is newer; the locator keeps the pauses."""
        try:
            while any(branch.channel.wants_route for branch in self._branches.values()) and not self._outlet.is_held:
                try:
                    await self._locator.ordering(self.subject, anew=True)
                except QmqError as failure:
                    self._outlet.hold(failure)
        finally:
            self._following = None

    # --- for people, and the end ---------------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Messages that are not planned."""
        return sum([len(branch.tray) for branch in self._branches.values()])

    @property
    def is_idle(self) -> bool:
        """Whether nothing is planned and undecided."""
        return not any(branch.channel.flight for branch in self._branches.values())

    def trouble(self) -> tuple[int, str]:
        """Messages that cannot be delivered now, and why."""
        now, count, why = self._loop.time(), 0, None
        for branch in self._branches.values():
            channel = branch.channel
            if channel.is_troubled(now) or channel.is_left or channel.wants_route:
                held = len(branch.tray) + sum([len(parcel.draft.messages) for parcel in channel.flight])
                count += held
                if held and why is None:
                    why = channel.trouble or RouteChanged(f"partition {channel.partition} has not settled what is before the change")
        return count, str(why) if why is not None else ""

    def close(self) -> None:
        """Nothing more is sent."""
        self._is_closed = True
        self._locator.unlisten(self.subject, self._rerouted)
        if self._following is not None:
            self._following.cancel()
        for branch in self._branches.values():
            branch.courier.close()
