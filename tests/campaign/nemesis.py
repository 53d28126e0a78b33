"""The one that breaks things: strike, let it last, heal, wait until the cluster serves, be calm.

When and whom it strikes follows from the seed; nothing else is drawn. A strike is in the history
three times (`values.Strike`). Around a strike that may take acknowledgements of consumers back, a
`reset` is in the history: see `history.events`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Final

from history.events import Recorder, Reset

from campaign.cluster import World
from campaign.programs import now_ms
from campaign.values import Strike

CALM_S: Final = (2.0, 5.0)
SERVES_S: Final = 240.0
"""Generous: this is no figure of a failover, and machines of tests are busy."""
AGAIN: Final = 5
"""Operations that must be answered before a strike counts as healed."""
NEMESIS: Final = "nemesis"


class DoesNotServe(Exception):
    """After a fault was healed, the cluster serves nobody."""


async def torment(
    world: World, recorder: Recorder, answered: Callable[[], int], *, until_s: float
) -> None:
    """Strike until that moment of the monotonic clock. Raises DoesNotServe."""
    while True:
        calm_s = world.random.uniform(*CALM_S)
        await asyncio.sleep(calm_s)
        if time.monotonic() >= until_s:
            return
        await strike(world, recorder, answered)


async def strike(world: World, recorder: Recorder, answered: Callable[[], int]) -> None:
    """One fault, from its beginning until the cluster serves again. Raises DoesNotServe."""
    fault, lasts_s = world.test.fault, world.random.uniform(*world.test.fault.lasts_s)
    begun = recorder.record(
        Strike(process=NEMESIS, type="invoke", fault=fault.name, at_ms=now_ms())
    )
    forgets = world.test.durability in fault.loses_acks
    if forgets:
        recorder.record(Reset(process=NEMESIS, type="invoke"))
    async with fault.strike(world) as struck:
        seen = begun.ended("info", **asdict(struck), at_ms=now_ms())
        recorder.record(seen)
        await asyncio.sleep(lasts_s)
    try:
        async with asyncio.timeout(SERVES_S):
            await world.settled(within_s=SERVES_S)
            before = answered()
            while answered() < before + AGAIN:
                await asyncio.sleep(0.1)
    except TimeoutError:
        recorder.record(seen.ended("fail"))
        raise DoesNotServe(
            f"{SERVES_S:g} s after {fault.name} of {', '.join(struck.targets)} ended, the cluster "
            "does not serve"
        ) from None
    if forgets:
        recorder.record(Reset(process=NEMESIS, type="ok"))
    recorder.record(seen.ended("ok"))
