"""Wall clocks that jump, swing and drift, each for one process: the machine's clock stays.

A library that is compiled here (`wall_clock.c`) is preloaded into the processes of a kind. The
first strike of a test starts them again with it. From then on each of them reads a page that the
nemesis writes, so a clock jumps while the process runs. CLOCK_MONOTONIC and CLOCK_BOOTTIME stay
true, as they do on a machine whose wall clock is set.

A fault took effect when the process has read the wrong clock: the library counts that. etcd is a
program without a C library, and is left out.
"""

from __future__ import annotations

import asyncio
import atexit
import mmap
import shutil
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from campaign.cluster import World
from campaign.faults.victims import Choose, client, delay_master, master, meta
from campaign.machine import REASONS
from campaign.values import Fault, Strikes, Striking, Struck

COMPILER: Final = "a C compiler"
SOURCE: Final = Path(__file__).with_name("wall_clock.c")
VARIABLE: Final = "QMQ_TEST_CLOCK"
PAGE: Final = struct.Struct("<QqqqqqQ")
NS: Final = 1_000_000_000
READ_S: Final = 5.0
"""How long a process may take to read its clock: it does so all the time."""

JUMP_S: Final = (30.0, 12 * 3600.0)
"""By less than a day: a producer's id holds a time, and a day is allowed (`qmq/log/queue.py`)."""
SMALL_JUMP_S: Final = (1.5, 3.0)
"""Of clients that name due times: what they ask for must come during the test."""
SWING_S: Final = (2.0, 600.0)
PERIOD_S: Final = (0.05, 0.4)
DRIFTS_PPM: Final = (-900_000, -500_000, 500_000, 4_000_000)


def _no_compiler() -> str:
    return "" if shutil.which("cc") else "a C compiler: cc is missing"


REASONS[COMPILER] = _no_compiler


@dataclass(frozen=True, slots=True, kw_only=True)
class WrongClock:
    """How a wall clock is wrong."""

    offset_ns: int = 0
    drift_ppm: int = 0
    swing_ns: int = 0
    period_ns: int = 0

    def __str__(self) -> str:
        parts = (
            f"{self.offset_ns / NS:+.1f} s off" if self.offset_ns else "",
            f"{self.drift_ppm:+} ppm" if self.drift_ppm else "",
            f"swings by {self.swing_ns / NS:+.1f} s every {self.period_ns / NS:.2f} s"
            if self.swing_ns
            else "",
        )
        return ", ".join(filter(None, parts)) or "true"


TRUE: Final = WrongClock()
Lies = Callable[[World], WrongClock]


class ClockPage:
    """The page of one process's clock. It begins true."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(bytes(PAGE.size))
        with path.open("r+b") as file:
            self._bytes = mmap.mmap(file.fileno(), PAGE.size)

    def set(self, lie: WrongClock) -> None:
        """The process has this clock from its next reading on."""
        version = PAGE.unpack_from(self._bytes)[0]
        fields = (
            time.monotonic_ns(),
            lie.offset_ns,
            lie.drift_ppm,
            lie.swing_ns,
            lie.period_ns,
        )
        # Odd first: a reader waits until all fields are there.
        struct.pack_into("<Q", self._bytes, 0, version + 1)
        struct.pack_into("<qqqqq", self._bytes, 8, *fields)
        struct.pack_into("<Q", self._bytes, 0, version + 2)

    @property
    def reads(self) -> int:
        """How often a wrong clock was read, since the page was made."""
        return int(PAGE.unpack_from(self._bytes)[-1])


@cache
def library() -> Path:
    """The compiled library, once for this process. Raises OSError."""
    folder = Path(tempfile.mkdtemp(prefix="campaign-clock-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    target = folder / "wall_clock.so"
    words = ["cc", "-O2", "-shared", "-fPIC", "-o", str(target), str(SOURCE), "-ldl"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")
    return target


def page_of(world: World, name: str) -> ClockPage:
    """The page of a service's clock."""
    return ClockPage(world.folder / "clocks" / name)


async def equip(world: World, names: Sequence[str]) -> None:
    """Start those services again with a clock that can be set, which run without one."""
    services = world.cluster.services
    bare = [name for name in names if VARIABLE not in services[name].environment]
    if not bare:
        return
    preloaded = str(await asyncio.to_thread(library))
    model = world.cluster.folder.load_model()
    assert model is not None, "the cluster is up"
    for name in bare:
        page_of(world, name).set(TRUE)
        model["services"][name]["environment"] |= {
            "LD_PRELOAD": preloaded,
            VARIABLE: str(world.folder / "clocks" / name),
        }
    world.cluster.folder.save_model(model)
    await world.do(world.cluster.stop, *[name for name in bare if world.state(name) != "dead"])
    await world.start(*bare)


@asynccontextmanager
async def lied_to(world: World, lies: dict[str, WrongClock]) -> Striking:
    """These services have wrong clocks during the block."""
    pages = {name: page_of(world, name) for name in lies}
    before = {name: page.reads for name, page in pages.items()}
    try:
        for name, page in pages.items():
            page.set(lies[name])
        until_s = time.monotonic() + READ_S
        while time.monotonic() < until_s and any(
            page.reads == before[name] for name, page in pages.items()
        ):
            await asyncio.sleep(0.05)
        seen = [
            f"{name}: {lies[name]}" for name, page in pages.items() if page.reads > before[name]
        ]
        yield Struck(targets=tuple(lies), effect="; ".join(seen))
    finally:
        for page in pages.values():
            page.set(TRUE)


# --- how clocks are wrong -------------------------------------------------------------------------


def _is_small(world: World, kind: str) -> bool:
    return kind == "clients" and "delays" in world.test.workload.uses


def _jump(sign: int, kind: str) -> Lies:
    def lie(world: World) -> WrongClock:
        range_s = SMALL_JUMP_S if _is_small(world, kind) else JUMP_S
        return WrongClock(offset_ns=sign * int(world.random.uniform(*range_s) * NS))

    return lie


def _strobe(kind: str) -> Lies:
    def lie(world: World) -> WrongClock:
        range_s = SMALL_JUMP_S if _is_small(world, kind) else SWING_S
        return WrongClock(
            swing_ns=world.random.choice((-1, 1)) * int(world.random.uniform(*range_s) * NS),
            period_ns=int(world.random.uniform(*PERIOD_S) * NS),
        )

    return lie


def _drift(world: World) -> WrongClock:
    return WrongClock(drift_ppm=world.random.choice(DRIFTS_PPM))


# --- whose ----------------------------------------------------------------------------------------


def _lying(kind: str, choose: Choose, lie: Lies) -> Strikes:
    """The clock of one process of a kind is wrong."""

    @asynccontextmanager
    async def strike(world: World) -> Striking:
        await equip(world, world.of_kind(kind))
        await world.settled()
        (name,) = await choose(world)
        async with lied_to(world, {name: lie(world)}) as struck:
            yield struck

    return strike


@asynccontextmanager
async def _all_apart(world: World) -> Striking:
    """Every broker's clock is wrong by another amount: no majority says anything."""
    await equip(world, world.brokers)
    await world.settled()
    lies = {name: _jump(world.random.choice((-1, 1)), "brokers")(world) for name in world.brokers}
    async with lied_to(world, lies) as struck:
        yield struck


NEEDS = frozenset({COMPILER})


CHOSEN: Final[dict[str, tuple[str, str, Choose]]] = {
    "master": ("brokers", "a master's wall clock", master),
    "delay-master": ("delays", "the wall clock of the delay group's master", delay_master),
    "meta": ("metas", "a metaserver's wall clock", meta),
    "client": ("clients", "a client's wall clock", client),
}


def _lie(how: str, kind: str) -> tuple[str, Lies]:
    return {
        "forward": ("is set forward by minutes or hours", _jump(1, kind)),
        "back": ("is set back by minutes or hours", _jump(-1, kind)),
        "strobe": ("swings several times a second", _strobe(kind)),
        "drift": ("is a multiple too fast, or too slow", _drift),
    }[how]


def _fault(how: str, whose: str) -> Fault:
    kind, clock, choose = CHOSEN[whose]
    what, lie = _lie(how, kind)
    return Fault(
        name=f"clock-{how}-{whose}",
        what=f"{clock} {what}",
        strike=_lying(kind, choose, lie),
        hits=frozenset({kind}),
        needs=NEEDS,
    )


FAULTS = (
    *(_fault(how, "master") for how in ("forward", "back", "strobe", "drift")),
    Fault(
        name="clock-apart",
        what="the brokers' wall clocks do not agree",
        strike=_all_apart,
        needs=NEEDS,
    ),
    *(_fault(how, "delay-master") for how in ("forward", "back", "strobe", "drift")),
    *(_fault(how, "meta") for how in ("forward", "strobe")),
    *(_fault(how, "client") for how in ("forward", "back", "strobe")),
)
