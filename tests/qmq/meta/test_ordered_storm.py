"""Several metaservers at once, with answers that get lost, transactions that come late, brokers
that fall silent and processes that die.

After every transaction the store is checked (ordered_support.Watchful): sealed before published,
versions one after another, and groups that move one version at a time over what is finished. In the
end, when all is well again, everything comes to its end.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from random import Random

import pytest
from meta_support import LPS, SUBJECT, KilledError, Lanes, World
from qmq_coordination.broker_groups import group_key
from qmq_coordination.ordered_records import FENCES, Fence, MemberRecord, assignment_key, member_key
from qmq_ordering.changes import merge, move, split
from qmq_ordering.lanes import Assignment, Gate
from qmq_ordering.routes import Change, LpRange, Route
from support.stores import Fault, FaultyStore

from qmq.errors import QmqError
from qmq.meta.ordered.groups import Start

FAULTS = (Fault.UNANSWERED, Fault.LOST, Fault.DELAYED)


class Storm(World):
    """A world in which everything goes wrong now and then."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        super().__init__(self.random)
        self.is_calm = False
        self.ways: list[FaultyStore] = []
        self.epochs = dict.fromkeys("abc", 1)

    def way(self) -> FaultyStore:
        """A metaserver's way to the store."""

        async def lose() -> None:
            if not self.is_calm and self.random.random() < 0.15:
                way.faults[way.count] = self.random.choice(FAULTS)

        way = FaultyStore(self.store, before=lose)
        self.ways.append(way)
        return way

    async def sleep(self, seconds: float) -> None:
        """A process that sleeps for long is killed sooner or later."""
        await super().sleep(seconds)
        await self.arrow("sleep")

    async def arrow(self, name: str) -> None:
        if not self.is_calm and self.random.random() < 0.04:
            raise KilledError(name)

    def make(self, route: Route) -> Change:
        """Some change of a route."""
        parts, change_id = route.partitions, self.new_id()
        which, part = (
            self.random.choice(("split", "merge", "move")),
            self.random.choice(route.partitions),
        )
        if which == "merge" and len(parts) > 1:
            first = self.random.randrange(len(parts) - 1)
            return merge(
                route,
                [each.number for each in parts[first : first + 2]],
                change_id=change_id,
                group=self.random.choice("abc"),
            )
        if which == "split" and part.range.width > 1 and len(parts) < 6:
            at = self.random.randrange(part.range.first + 1, part.range.end)
            return split(
                route,
                part.number,
                [at],
                change_id=change_id,
                groups=[self.random.choice("abc") for _ in range(2)],
            )
        return move(route, part.number, self.random.choice("abc"), change_id=change_id)

    # --- what continues ---------------------------------------------------------------------------

    async def change(self) -> None:
        changes = self.changes(self.way(), self.arrow)
        if (pending := (await self.state()).pending) is not None:
            await changes.carry_on(SUBJECT, pending.to_version)
        else:
            change = await changes.prepare(SUBJECT, self.make)
            await changes.carry_on(SUBJECT, change.to_version)

    async def look(self) -> None:
        group = self.random.choice("gh")
        way = self.way()
        if not (await self.groups(way, self.arrow).round(SUBJECT, group)).is_ready:
            await self.placing(way, self.arrow).make_ready(SUBJECT, group)

    async def consume(self) -> None:
        """Some group does some of what is open for it."""
        state = await self.state()
        group = self.random.choice("gh")
        record = state.groups.get(group)
        for piece in record.frontier.pieces if record is not None and record.is_ready else ():
            for part in state.routes[piece.version].overlapping(piece.range):
                lanes = self.brokers.parts.setdefault(part.number, Lanes(part.range))
                if not lanes.sealed_by and self.random.random() < 0.5:
                    lanes.next_sequence += 1
                cut = part.range.cut(piece.range)
                first = self.random.choice((cut.first, self.random.randrange(cut.first, cut.end)))
                self.brokers.finish(group, part.number, first, cut.end)

    async def disturb(self) -> None:
        """A broker group loses its master, which is gone from the store a little later; or it gets
        another one.
        """
        name = self.random.choice("abc")
        if name in self.brokers.down:
            await self.come_back(name)
        elif not self.brokers.down:
            self.brokers.down.add(name)
            if self.random.random() < 0.5:
                await self.embedded.delete(group_key(name, "master"))

    async def come_back(self, name: str) -> None:
        """A new master wins, closes fenced partitions, and answers."""
        self.epochs[name] += 1
        await self.elect(name, self.epochs[name])
        for item in (await self.embedded.list(f"{FENCES}{name}/")).items:
            fence = Fence.decode(item.value)
            self.brokers.down.discard(name)
            await self.brokers.seal(
                name, SUBJECT, int(item.key.rpartition("/")[2]), fence.change_id, fence.to_version
            )
        self.brokers.down.discard(name)

    async def deliver_late(self) -> None:
        for way in self.ways:
            late, way.delayed = way.delayed, []
            for each in late:
                with suppress(QmqError):
                    await self.store.txn(*each)

    async def live(self, turns: int) -> None:
        """One process after another, each with something to do."""
        for _ in range(turns):
            act = self.random.choice(
                (
                    self.change,
                    self.look,
                    self.look,
                    self.consume,
                    self.consume,
                    self.disturb,
                    self.deliver_late,
                )
            )
            with suppress(QmqError, KilledError):
                await act()

    async def calm_down(self) -> None:
        self.is_calm = True
        await self.deliver_late()
        for name in "abc":
            await self.come_back(name)
        pending = (await self.state()).pending
        if pending is not None:
            await self.changes().carry_on(SUBJECT, pending.to_version)
        for group in "gh":
            await self.placing().make_ready(SUBJECT, group)


@pytest.mark.parametrize("seed", range(12))
async def test_in_a_storm_order_holds_and_behind_it_everything_comes_to_its_end(seed: int) -> None:
    world = Storm(seed)
    await world.create(partitions=2)
    world.brokers.parts.update({1: Lanes(LpRange(0, 50)), 2: Lanes(LpRange(50, 100))})
    for group, start, gate in (("g", "earliest", Gate.LANES), ("h", "latest", Gate.STRICT)):
        await world.embedded.put(member_key(SUBJECT, group, "x"), MemberRecord("x", "1").encode())
        await world.placing().begin(SUBJECT, group, Start.of_new(start), gate)
    await asyncio.gather(*[world.live(40) for _ in range(3)])
    await world.calm_down()
    state = await world.check(latest=(await world.state()).latest)
    assert state.latest > 2
    for group in "gh":
        for _ in range(state.latest + 1):
            for number in range(1, state.routes[state.latest].next_number):
                world.brokers.finish(group, number)
            while (await world.groups().round(SUBJECT, group)).steps:
                pass
        found = await world.embedded.get(assignment_key(SUBJECT, group))
        assert found is not None
        lanes = Assignment.decode(found.value).lanes
        assert {lane.version for lane, _ in lanes} == {state.latest}
        assert sum(lane.range.width for lane, _ in lanes) == LPS
    for version in range(2, state.latest + 1):
        assert await world.changes().finish(SUBJECT, version)
