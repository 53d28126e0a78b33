"""The nemesis repairs what it broke and records when; the changer repeats its change until it
succeeds. With fakes, without waiting.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from pathlib import Path
from random import Random
from typing import Any

import pytest
from history.events import Recorder, load
from history.ordered.events import Outage
from system.ordered_nemesis import FREEZE_S, Changer, Nemesis, follow
from system.ordered_workload import KILLS, Step, worth_harming

from qmq.errors import NotConnected, RouteConflict
from qmq.proto.v1 import control_pb2 as control
from qmq.proto.v1 import meta_pb2 as pb


class FakeMetadata:
    """A route of two partitions that can be moved; `failures` are raised first."""

    def __init__(self, *groups: str) -> None:
        self.groups = list(groups)
        self.version = 1
        self.past: dict[int, list[str]] = {}
        self.lag = 0
        """By so many versions the next answer is late."""
        self.failures: list[Exception] = []
        self.asked: list[tuple[int, str]] = []

    async def describe_route(self, subject: str, version: int = 0) -> pb.DescribeRouteResponse:
        version = version or self.version - self.lag
        parts = [
            pb.OrderedPartition(
                number=version * 10 + at,
                lps=control.LpRange(first=at * 4, end=at * 4 + 4),
                broker_group=group,
            )
            for at, group in enumerate(self.past.get(version, self.groups))
        ]
        self.lag = 0
        return pb.DescribeRouteResponse(
            route=pb.OrderedRoute(version=version, logical_partitions=8, partitions=parts)
        )

    def move_all(self, group: str) -> None:
        """A change by another client."""
        self.past[self.version] = list(self.groups)
        self.groups = [group] * len(self.groups)
        self.version += 1

    async def change_route(
        self,
        subject: str,
        *,
        from_version: int,
        reason: str,
        move: pb.MoveOperation | None = None,
        **_: object,
    ) -> None:
        self.asked.append((from_version, reason))
        if self.failures:
            self.version += 1  # another client's change
            raise self.failures.pop(0)
        assert from_version == self.version
        self.past[self.version] = list(self.groups)
        if move is not None:
            self.groups[move.partition - self.version * 10] = move.broker_group
        self.version += 1


class FakeCluster:
    """Remembers what was done to it."""

    services = ("etcd0", "meta0", "g1-a")

    def __init__(self, story: list[str]) -> None:
        self._story = story
        self.before_pauses: list[Callable[[], None]] = []
        """What happens at the same moment, each once."""

    def pause(self, *names: str) -> None:
        for happens in self.before_pauses[:1]:
            happens()
        del self.before_pauses[:1]
        self._story.append(" ".join(("pause", *names)))

    def __getattr__(self, verb: str) -> Callable[..., None]:
        return lambda *names, **_: self._story.append(" ".join((verb, *names)))


class FakeVictims:
    """Two broker groups; the first replica is the master, and the second when another one is
    wanted.
    """

    def __init__(self, story: list[str], replicas: int) -> None:
        self.replicas = {
            f"g{group}": [f"g{group}-{'abc'[at]}" for at in range(replicas)] for group in (1, 2)
        }
        self.metas = ["meta0"]
        self.cluster: Any = FakeCluster(story)
        self._story = story

    async def master(self, group: str, *, other_than: str = "", within_s: float = 240.0) -> str:
        self._story.append(f"{group} has a master")
        return self.replicas[group][1 if other_than else 0]

    async def settled(self, group: str, *, within_s: float = 240.0) -> str:
        self._story.append(f"{group} is settled")
        return self.replicas[group][0]

    async def do(self, act: Callable[..., None], *names: str, **options: Any) -> None:
        act(*names, **options)

    async def start(self, name: str) -> None:
        self._story.append(f"start {name}")


class FakeConsumer:
    """Remembers what was done to it."""

    name = "c"

    def __init__(self, story: list[str]) -> None:
        self._story = story

    def __getattr__(self, verb: str) -> Callable[[], None]:
        return lambda: self._story.append(f"{verb} consumer")


class World:
    """All fakes, and the story of their calls together with the history's lines."""

    def __init__(self, folder: Path, *, replicas: int = 3, seed: int = 1) -> None:
        self.story: list[str] = []
        self.slept_s = 0.0
        self.path = folder / "h.jsonl"
        self.recorder = Recorder(self.path)
        self.metadata: Any = FakeMetadata("g1", "g1")
        self.changer = Changer(self.metadata, "orders", ["g1", "g2"], Random(seed))
        self.victims = FakeVictims(self.story, replicas)
        self.nemesis = Nemesis(
            self.victims,
            [FakeConsumer(self.story)],  # type: ignore[list-item]
            self.recorder,
            self.changer,
            Random(seed),
            note=lambda text: self.story.append(f"note {text.split(':')[0]}"),
            progress=self.progress,
            consumer_lease_s=3.0,
            sleep=self.sleep,
        )

    async def progress(self, count: int, within_s: float, lps: Collection[int] = ()) -> None:
        self.story.append(f"writers of {len(lps)} continue" if lps else "writers continue")

    async def sleep(self, seconds: float) -> None:
        self.slept_s += seconds
        self.story.append("wait")

    def outages(self) -> list[tuple[str, str]]:
        return [(event.type, event.kind) for event in load(self.path) if isinstance(event, Outage)]


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("kind", [*KILLS, "freeze-group", "cut-group"])
async def test_whatever_is_broken_is_mended_and_outages_end(
    kind: str, replicas: int, tmp_path: Path
) -> None:
    world = World(tmp_path, replicas=replicas)
    await world.nemesis.strike(kind)
    verbs = [line.split()[0] for line in world.story]
    assert verbs.count("kill") == verbs.count("start")
    assert verbs.count("pause") == verbs.count("resume")
    assert ("partition" in verbs) == ("heal" in verbs) == (kind == "cut-group")
    assert world.nemesis.done == {kind: 1}
    assert [end for end, _ in world.outages()] in ([], ["invoke", "ok"])
    assert bool(world.outages()) == (
        kind.endswith(("master", "group")) or (kind == "kill-slave" and replicas == 1)
    )


async def test_a_killed_master_is_started_when_its_successor_serves(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.nemesis.strike("kill-master")
    assert world.story == [
        "g1 is settled",
        "note a kill of the master",
        "kill g1-a",
        "g1 has a master",
        "start g1-a",
    ]


async def test_a_frozen_group_is_left_before_it_wakes_up_and_its_lease_is_over_by_then(
    tmp_path: Path,
) -> None:
    world = World(tmp_path)
    await world.nemesis.strike("freeze-group")
    assert world.story == [
        *(
            "g1 is settled",
            "note a frozen group",
            "pause g1-a g1-b g1-c",
            "writers of 8 continue",
            "wait",
            "resume g1-a g1-b g1-c",
        ),
        "g1 is settled",
    ]
    assert world.metadata.groups == ["g2", "g2"]
    assert FREEZE_S - 1.0 < world.slept_s <= FREEZE_S


async def test_a_group_emptied_while_it_was_frozen_does_not_count_as_a_victim(
    tmp_path: Path,
) -> None:
    world = World(tmp_path)
    world.victims.cluster.before_pauses = [lambda: world.metadata.move_all("g2")]
    await world.nemesis.strike("freeze-group")
    frozen = (
        "pause g1-a g1-b g1-c",
        "resume g1-a g1-b g1-c",
        "pause g2-a g2-b g2-c",
        "writers of 8 continue",
        "resume g2-a g2-b g2-c",
    )
    assert [
        line for line in world.story if line.split()[0] in ("pause", "resume", "writers")
    ] == list(frozen)
    assert world.nemesis.done == {"freeze-group": 1}
    assert [end for end, _ in world.outages()] == ["invoke", "ok"] * 2


async def test_a_group_without_partitions_for_one_version_is_not_a_victim(tmp_path: Path) -> None:
    world = World(tmp_path)

    def away_and_back() -> None:
        world.metadata.move_all("g2")
        world.metadata.move_all("g1")

    world.victims.cluster.before_pauses = [away_and_back]
    await world.nemesis.strike("freeze-group")
    assert [line for line in world.story if line.startswith("writers")] == ["writers of 8 continue"]
    assert world.story.count("pause g1-a g1-b g1-c") == 2


async def test_a_group_that_is_emptied_while_it_settles_is_not_frozen(tmp_path: Path) -> None:
    world = World(tmp_path)
    settled = world.victims.settled

    async def emptied(group: str, *, within_s: float = 240.0) -> str:
        world.victims.settled = settled  # type: ignore[method-assign]
        world.metadata.move_all("g2")
        return await settled(group)

    world.victims.settled = emptied  # type: ignore[method-assign]
    await world.nemesis.strike("freeze-group")
    assert [line for line in world.story if line.startswith("pause")] == ["pause g2-a g2-b g2-c"]


async def test_a_route_that_a_lagging_metaserver_tells_of_is_asked_for_again(
    tmp_path: Path,
) -> None:
    world = World(tmp_path)
    await world.changer.change("move")
    world.metadata.lag = 1
    assert (await world.changer.route()).version == 2


async def test_a_group_that_cannot_be_left_wakes_up_all_the_same_and_its_outage_has_no_end(
    tmp_path: Path,
) -> None:
    world = World(tmp_path)
    world.metadata.failures = [ValueError("a bug")]
    with pytest.raises(ValueError, match="a bug"):
        await world.nemesis.strike("freeze-group")
    assert world.story[-1] == "resume g1-a g1-b g1-c"
    assert [end for end, _ in world.outages()] == ["invoke"]


async def test_a_stopped_consumer_sleeps_for_longer_than_its_lease(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.nemesis.strike("stop-consumer")
    assert world.story == ["note stop consumer c", "pause consumer", "wait", "resume consumer"]
    assert world.slept_s > 3.0


async def test_a_change_that_conflicts_is_retried_from_the_current_route(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.metadata.failures = [RouteConflict("another one"), NotConnected("the metaserver died")]
    await world.changer.change("move")
    assert world.metadata.asked == [(1, "move"), (2, "move"), (3, "move")]
    assert (world.changer.done, world.changer.refused) == ({"move": 1}, {"E114": 1, "E301": 1})


async def test_a_drain_continues_until_the_group_has_nothing(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.metadata.failures = [RouteConflict("another one")]
    await world.changer.evacuate("g1")
    assert world.metadata.groups == ["g2", "g2"]
    assert worth_harming(await world.changer.route(), ["g1", "g2"]) == ["g2"]


async def test_steps_run_one_after_the_other_and_never_early() -> None:
    taken: list[str] = []

    async def act(kind: str) -> None:
        taken.append(kind)
        await asyncio.sleep(0)
        taken.append(f"{kind} done")

    await follow(
        [Step(0.0, "split"), Step(0.0, "merge")], act, lambda: taken.append("bar"), begin_s=0.0
    )
    assert taken == ["split", "split done", "bar", "merge", "merge done", "bar"]
