"""Two faults at once, of which each alone is another test.

`both` makes the second while the first lasts, and heals both together. `crossed` heals the first
one some seconds before the second, so that what was away is back while the other one is still
missing: a follower that is behind, and the only replica with the newest entries is dead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager

from campaign.cluster import World
from campaign.faults import clock, disk, etcd, kill, partition, power, stop
from campaign.values import Fault, Striking, Struck

BETWEEN_S = (2.0, 4.0)
"""Longer than an election."""
LASTS_S = (4.0, 8.0)
DELAYS = frozenset({"delays"})


def _together(first: Struck, second: Struck) -> Struck:
    is_met = first.effect and second.effect
    return Struck(
        targets=(*first.targets, *second.targets),
        effect=f"{first.effect}; {second.effect}" if is_met else "",
    )


def both(first: Fault, second: Fault, *, crossed: bool = False) -> Fault:
    """A fault of two, with what either needs. It hits what delay groups have if either does: then
    the other kinds are there, too.
    """

    @asynccontextmanager
    async def strike(world: World) -> Striking:
        async with AsyncExitStack() as stack:
            outer, inner = first.strike(world), second.strike(world)
            # What is entered last is healed first.
            if crossed:
                left = _Entered(outer)
                begun = await stack.enter_async_context(left)
                also = await stack.enter_async_context(inner)
                stack.push_async_callback(_pause, world)
                stack.push_async_callback(left.leave)
            else:
                begun = await stack.enter_async_context(outer)
                also = await stack.enter_async_context(inner)
            yield _together(begun, also)

    settings: Mapping[str, str] = {**first.settings, **second.settings}
    hits = first.hits | second.hits
    return Fault(
        name=f"{first.name}-and-{second.name}",
        what=f"{first.what}, and {second.what}" + (", which lasts longer" if crossed else ""),
        strike=strike,
        hits=DELAYS if hits >= DELAYS else hits,
        needs=first.needs | second.needs,
        lasts_s=LASTS_S,
        etcds=max(first.etcds, second.etcds),
        disk_mib=max(first.disk_mib, second.disk_mib),
        settings=settings,
    )


class _Entered:
    """A strike that may be left before the block ends."""

    def __init__(self, strike: AbstractAsyncContextManager[Struck]) -> None:
        self._strike = strike
        self._is_left = False

    async def __aenter__(self) -> Struck:
        return await self._strike.__aenter__()

    async def __aexit__(self, *_: object) -> None:
        await self.leave()

    async def leave(self) -> None:
        """Heal, once."""
        if not self._is_left:
            self._is_left = True
            await self._strike.__aexit__(None, None, None)


async def _pause(world: World) -> None:
    await asyncio.sleep(world.random.uniform(*BETWEEN_S))


_KNOWN = {
    each.name: each
    for module in (kill, stop, partition, etcd, disk, power, clock)
    for each in module.FAULTS
}


def _pair(first: str, second: str, *, crossed: bool = False) -> Fault:
    return both(_KNOWN[first], _KNOWN[second], crossed=crossed)


FAULTS = (
    # What is left is no majority, then one in which a replica is behind.
    _pair("partition-follower", "kill-master", crossed=True),
    _pair("power-follower", "kill-master", crossed=True),
    _pair("disk-full-follower", "kill-master", crossed=True),
    # A replica dies on one side of a cut.
    _pair("partition-master", "kill-one"),
    _pair("partition-bridge", "kill-master"),
    _pair("partition-no-answers", "kill-master"),
    # Nothing can elect while the master is away.
    _pair("etcd-no-quorum", "stop-master"),
    _pair("etcd-no-quorum", "kill-master"),
    _pair("etcd-kill-one", "kill-master"),
    _pair("partition-from-etcd", "kill-one"),
    # A master that neither etcd nor its followers tell that it was replaced.
    _pair("partition-from-etcd", "partition-master"),
    # A metaserver that starts late knows nothing of what changed.
    _pair("kill-master", "kill-meta", crossed=True),
    _pair("kill-client", "kill-master"),
    _pair("stop-client", "partition-master"),
    # A full disk and a start on it.
    _pair("disk-full-master", "kill-one"),
    # A clock is wrong at an election, and those that could deny it are away.
    _pair("clock-back-master", "kill-one"),
    _pair("clock-forward-master", "partition-master"),
    # What is due while both are away.
    _pair("stop-master", "kill-delay-master"),
    _pair("partition-master", "stop-delay-master"),
    _pair("clock-forward-delay-master", "kill-master"),
)
