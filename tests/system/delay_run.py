"""One run of faults against a delay group under load, and its verdict. `tools/run delay_faults` is its long form.

kill           SIGKILL of the delay group's master, at a random moment
crash          the master kills itself at a chosen line (system/crashing.py)
stop           SIGSTOP of the master for a few seconds
off            all replicas of the delay group are killed and started again after a while: messages due meanwhile are late
brokers        the real-time brokers are down
hand-over      the master hands over
jump           the clock of the master's machine jumps an hour forward or back, and returns (needs libfaketime)
"""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Final

import grpc

from qmq.proto.v1 import control_pb2 as pb
from qmq.proto.v1 import control_pb2_grpc
from qmq.rpc.server_name import any_server
from system import faketime
from system.crashing import POINTS
from system.delay_cluster import DelayCluster
from system.delay_judge import Verdict, judge, out_of_order
from system.delay_workload import ORDERED, PLAIN, DelayWorkload

FAULTS: Final = ("kill", "crash", "stop", "off", "brokers", "hand-over", "jump")
CRASH_S: Final = 15.0


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@dataclass(slots=True)
class Outcome:
    """The findings of a run."""

    seed: int
    faults: Counter[str] = field(default_factory=Counter)
    sent: int = 0
    acknowledged: int = 0
    cancelled: int = 0
    delivered: int = 0
    lateness_ms: list[int] = field(default_factory=list)
    anomalies: list[str] = field(default_factory=list)


class DelayRun:
    """Load, `rounds` faults, judgement."""

    def __init__(
        self,
        folder: Path,
        seed: int,
        *,
        faults: tuple[str, ...] = FAULTS,
        away_s: float = 3.0,
        progress: Callable[[str], None] = lambda _: None,
        brokers: int = 1,
        secure: bool = False,
    ) -> None:
        self._random = Random(seed)
        self._seed = seed
        self._faults = faults
        self._away_s = away_s
        self._progress = progress
        self._clocks: dict[str, faketime.FakeTime] = {}
        if "jump" in faults:
            for name in ("d0", "d1", "d2"):
                self._clocks[name] = faketime.FakeTime(_made(folder / f"clock-{name}"), cache_s=1)
        self.cluster = DelayCluster(folder, brokers=brokers, options=("--bucket", "5m"), secure=secure)

    async def run(self, rounds: int) -> Outcome:
        """Make the whole run. Raises TimeoutError if the cluster does not recover after a fault."""
        outcome = Outcome(self._seed)
        try:
            await self._start_all()
            work = DelayWorkload(self.cluster.server, self._seed, self.cluster.tls)
            await work.start()
            try:
                for number in range(rounds):
                    await asyncio.sleep(self._random.uniform(0.5, 2.5))
                    name = self._faults[number % len(self._faults)] if rounds >= len(self._faults) else self._random.choice(self._faults)
                    self._progress(name)
                    what = await getattr(self, f"_{name.replace('-', '_')}")()
                    outcome.faults[what] += 1
                await self.cluster.settled()
                await work.finish()
            finally:
                await work.close()
            self._judge(work, outcome)
        finally:
            await self.cluster.stop()
        return outcome

    async def _start_all(self) -> None:
        await asyncio.to_thread(self.cluster.etcd.start)
        await asyncio.gather(*[self.cluster.start(name) for name in ("meta", *self.cluster.brokers)])
        await asyncio.gather(*[self._start(name) for name in self.cluster.delays])
        await self.cluster.settled()

    async def _start(self, name: str, crash: str = "") -> None:
        clock = self._clocks.get(name)
        await self.cluster.start(name, crash=crash, environment=clock.environment if clock is not None else None)

    def _judge(self, work: DelayWorkload, outcome: Outcome) -> None:
        wishes = list(work.wishes.values())
        sights = [*work.sights[PLAIN], *work.sights[ORDERED]]
        verdict: Verdict = judge(wishes, sights)
        kept = [wish for wish in wishes if wish.number in work.in_time]
        outcome.anomalies = verdict.anomalies + out_of_order(kept, work.sights[ORDERED])
        outcome.sent, outcome.acknowledged = len(wishes), sum(wish.is_acked for wish in wishes)
        outcome.cancelled, outcome.delivered = verdict.cancelled, verdict.delivered
        outcome.lateness_ms = verdict.lateness_ms

    # --- faults: each returns what it was, when the cluster is whole again ---------------------------------------------

    async def _kill(self) -> str:
        name = await self.cluster.delay_master()
        self.cluster.kill(name)
        await self._start(name)
        await self.cluster.settled()
        return "kill"

    async def _crash(self) -> str:
        master = await self.cluster.settled()
        victim = self._random.choice([name for name in self.cluster.delays if name != master])
        point = self._random.choice(sorted(POINTS))
        self.cluster.kill(victim)
        await self._start(victim, f"{point}:{self._random.randrange(1, 12)}")
        try:
            async with asyncio.timeout(CRASH_S):
                while self.cluster.is_running(victim):
                    await self._hand_to(victim)
                    await asyncio.sleep(0.2)
        except TimeoutError:
            pass  # it never came so far; it is killed all the same
        has_crashed = not self.cluster.is_running(victim)
        self.cluster.kill(victim)
        await self._start(victim)
        await self.cluster.settled()
        return f"crash at {point}" if has_crashed else "kill"

    async def _hand_to(self, name: str) -> None:
        """Transfer the mastership; the caller checks the outcome."""
        found = await self.cluster.statuses(self.cluster.delays)
        serving = [each for each, status in found.items() if status.is_serving]
        if not serving or serving == [name]:
            return
        async with self.cluster.network.channel(self.cluster.control(serving[0]), any_server) as channel:
            stub: Any = control_pb2_grpc.BrokerControlStub(channel)
            try:
                await stub.Transfer(pb.TransferRequest(to=name), timeout=5.0)
            except grpc.RpcError:
                return

    async def _stop(self) -> str:
        name = await self.cluster.delay_master()
        self.cluster.send_signal(name, signal.SIGSTOP)
        await asyncio.sleep(self._random.uniform(0.5, 4.0))
        self.cluster.send_signal(name, signal.SIGCONT)
        await self.cluster.settled()
        return "stop"

    async def _off(self) -> str:
        for name in self.cluster.delays:
            self.cluster.kill(name)
        await asyncio.sleep(self._away_s)
        await asyncio.gather(*[self._start(name) for name in self.cluster.delays])
        await self.cluster.settled()
        return "all off"

    async def _brokers(self) -> str:
        for name in self.cluster.brokers:
            self.cluster.kill(name)
        await asyncio.sleep(self._away_s)
        await asyncio.gather(*[self.cluster.start(name) for name in self.cluster.brokers])
        return "brokers away"

    async def _hand_over(self) -> str:
        await self._hand_to(self._random.choice([each for each in self.cluster.delays if each != await self.cluster.delay_master()]))
        await self.cluster.settled()
        return "hand-over"

    async def _jump(self) -> str:
        clock = self._clocks[await self.cluster.delay_master()]
        hours = self._random.choice((-1, 1))
        clock.jump(hours * 3600)
        await asyncio.sleep(self._random.uniform(2.0, max(self._away_s, 3.0)))
        clock.jump(0)
        return f"clock jumped {hours:+d} h"
