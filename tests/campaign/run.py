"""One test from its cluster's start to its verdict."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from random import Random
from typing import Final, TypeAlias

from cluster_runner.errors import ClusterError
from history.events import Recorder

import qmq
from campaign.client import Job
from campaign.cluster import World, running
from campaign.machine import missing
from campaign.nemesis import DoesNotServe, torment
from campaign.table import checkers
from campaign.tail import Tail
from campaign.values import SUBJECT, Bug, CampaignTest
from campaign.verdict import Result, judged

BEGUN_S: Final = 120.0
DRAINED_S: Final = 240.0
LOOK_S: Final = 0.25
WITH_BUG: Final = 0.3
"""The share of these times with a planted bug, where much of what is waited for never happens."""


Disturb: TypeAlias = Callable[[World, Recorder, Callable[[], int]], Awaitable[None]]
"""Breaks and heals; the last argument counts operations that were answered."""


def tormenting(seconds: float) -> Disturb:
    """The test's fault, again and again."""

    async def disturb(world: World, recorder: Recorder, answered: Callable[[], int]) -> None:
        await torment(world, recorder, answered, until_s=time.monotonic() + seconds)

    return disturb


async def run_test(
    test: CampaignTest,
    folder: Path,
    *,
    seed: int,
    seconds: float,
    bug: Bug | None = None,
    tell: Callable[[str], None] = lambda line: None,
    disturb: Disturb | None = None,
) -> Result:
    """The verdict. Leaves histories and the output of all processes in the folder. `disturb`: what
    the nemesis does instead of the test's fault again and again for these seconds.
    """
    begun_s = time.monotonic()
    reason = missing(test.fault.needs) or test.workload.lacks()
    if reason:
        return Result(test=test.name, verdict="skipped", seed=seed, seconds=0.0, reason=reason)
    if test.run is not None:
        return await test.run(folder, seed, checkers())
    histories = folder / "histories"
    histories.mkdir(parents=True)
    tail = Tail(histories)
    try:
        # Not in a thread: an interruption of the start must not leave processes behind.
        with running(test, folder, histories, seed, bug) as world:
            seconds = max(seconds, test.workload.seconds if test.workload.is_long else 0.0)
            tell(f"the cluster is up after {time.monotonic() - begun_s:.1f} s")
            reason, is_drained = await _in_cluster(
                world,
                tail,
                histories,
                seed,
                disturb or tormenting(seconds),
                WITH_BUG if bug else 1.0,
                tell,
            )
    except (ClusterError, OSError, TimeoutError) as failure:
        return Result(
            test=test.name,
            verdict="error",
            seed=seed,
            seconds=round(time.monotonic() - begun_s, 1),
            reason=f"{type(failure).__name__}: {failure}",
        )
    tail.look()
    return judged(
        test,
        tail.in_order(),
        checkers(),
        is_drained=is_drained,
        seed=seed,
        seconds=time.monotonic() - begun_s,
        reason=reason,
    )


async def _in_cluster(
    world: World,
    tail: Tail,
    histories: Path,
    seed: int,
    disturb: Disturb,
    patience: float,
    tell: Callable[[str], None],
) -> tuple[str, bool]:
    """Why the run ended early, and whether readers got everything."""
    work = world.test.workload
    await world.settled()
    await _set_up(world, histories, seed)
    await world.do(world.cluster.start, *world.clients)
    looking = asyncio.create_task(_look(tail))
    try:
        try:
            await _until(
                lambda: all(tail.answered[name] for name in work.gates), patience * BEGUN_S
            )
            tell("clients are served")
        except TimeoutError:  # a bug may be the reason, and then a checker says which
            tell("some operations are never answered")
        reason = ""
        with Recorder(histories / "nemesis.jsonl") as recorder:
            try:
                await disturb(world, recorder, lambda: sum(tail.answered.values()))
            except DoesNotServe as failure:
                reason = str(failure)
        await _again(world)
        await _after_the_last_fault(tail, work.gates, patience * BEGUN_S)
        senders = [
            f"{role.name}{number}"
            for role in work.roles
            if role.is_sender
            for number in range(role.count)
        ]
        await world.do(world.cluster.stop, *senders)
        tell("senders ended")
        is_drained = await _drained(world, tail, patience * DRAINED_S)
        tell("readers have everything" if is_drained else "readers did not get everything")
        alive = [name for name in world.clients if world.state(name) != "dead"]
        await world.do(world.cluster.stop, *alive)
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
    return reason, is_drained


async def _set_up(world: World, histories: Path, seed: int) -> None:
    program = world.test.workload.programs.get("setup")
    if program is None:
        return
    async with qmq.connect(world.server) as client:
        with Recorder(histories / "setup.jsonl") as recorder:
            await program(
                Job(
                    name="setup",
                    role="setup",
                    number=0,
                    subject=SUBJECT,
                    client=client,
                    folder=world.folder,
                    recorder=recorder,
                    durability=world.test.durability,
                    random=Random(seed),
                )
            )


async def _again(world: World) -> None:
    """A client that ended by itself is an error of the workload, or of the product: it is reported,
    and the run continues with a new process.
    """
    for name in world.clients:
        if world.state(name) == "dead":
            log = world.cluster.log(name)
            (world.folder / f"{name}-ended.log").write_bytes(log.read_bytes())
            await world.start(name)


async def _after_the_last_fault(tail: Tail, names: Iterable[str], within_s: float) -> None:
    """So much is answered once more that the gates can see it."""
    before = Counter(tail.answered)
    try:
        await _until(lambda: all(tail.answered[name] > before[name] for name in names), within_s)
    except TimeoutError:
        return


async def _drained(world: World, tail: Tail, within_s: float) -> bool:
    try:
        await _until(lambda: world.test.workload.is_drained(tail.events), within_s)
    except TimeoutError:
        return False
    return True


async def _look(tail: Tail) -> None:
    while True:
        tail.look()
        await asyncio.sleep(LOOK_S)


async def _until(condition: Callable[[], bool], within_s: float) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(LOOK_S)
