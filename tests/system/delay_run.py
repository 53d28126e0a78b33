"""A cluster with a delay group, as processes on free loopback ports: etcd, metaservers, a broker
group, a delay group. Tests kill each.

A test can start a process of the delay group with a *crash point* (system/crashing.py), where it
dies, and with another clock (system/faketime.py).

One run of faults against a delay group under load, and its verdict. `tools/run delay_faults` is its
long form.

kill           SIGKILL of the delay group's master, at a random moment
crash          the master kills itself at a chosen line (system/crashing.py)
stop           SIGSTOP of the master for a few seconds
off            all replicas of the delay group are killed and started again after a while: messages due meanwhile are late
brokers        the real-time brokers are down
hand-over      the master hands over
jump           the clock of the master's machine jumps an hour forward or back, and returns (needs libfaketime)
"""  # noqa: E501

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Final

import grpc
from support.etcd_process import EtcdProcess, ServerTls, free_ports
from system import faketime
from system.crashing import POINTS
from system.delay_workload import ORDERED, PLAIN, DelayWorkload, Verdict, judge, out_of_order
from system.group import master_at, settled_at, statuses_at

from qmq.proto.v1 import control_pb2 as pb
from qmq.proto.v1 import control_pb2_grpc
from qmq.rpc.network import NETWORK
from qmq.rpc.server_name import any_server
from qmq.rpc.tls_network import TlsNetwork
from qmq.security.certificates import create_authority, issue
from qmq.security.tls import Credentials, Tls

ROOT: Final = Path(__file__).resolve().parents[2]
META: Final = "meta"
READY: Final = "is ready"
ETCD: Final = "etcd"
ADMIN: Final = "admin"
FILES: Final = ("ca", "cert", "key")


def _issued(folder: Path, names: Sequence[str]) -> dict[str, Tls]:
    """A certificate for each process, for etcd, and for who looks on."""
    create_authority(folder)
    kinds = {**dict.fromkeys(names, "node"), META: "meta", ETCD: "node", ADMIN: "op"}
    made = {name: issue(folder, name, kind, ["127.0.0.1"]) for name, kind in kinds.items()}
    return {name: Tls(folder / "ca.pem", each.cert, each.key) for name, each in made.items()}


class DelayCluster:
    """One broker group `g` and one delay group `d`. `start_all`, then verbs by name; `stop` ends
    everything.
    """

    def __init__(
        self,
        folder: Path,
        *,
        brokers: int = 1,
        delays: int = 3,
        variables: Mapping[str, str] | None = None,
        secure: bool = False,
    ) -> None:
        """With `secure` everything uses TLS, and every process has a certificate."""
        self.folder = folder
        self.brokers = [f"g{number}" for number in range(brokers)]
        self.delays = [f"d{number}" for number in range(delays)]
        self._variables = dict(variables or {})
        names = [*self.brokers, *self.delays]
        ports = free_ports(2 * len(names) + 1)
        self._ports = {name: (ports[2 * at], ports[2 * at + 1]) for at, name in enumerate(names)}
        self._meta_port = ports[-1]
        self.server = f"127.0.0.1:{self._meta_port}"
        self._papers: dict[str, Tls] = _issued(folder / "papers", names) if secure else {}
        self.tls = self._papers.get(ADMIN)
        """What this process shows; None: nothing."""
        self.network = NETWORK if self.tls is None else TlsNetwork(Credentials(self.tls))
        member = self._papers.get(ETCD)
        tls = (
            ServerTls(member.ca, member.cert, member.key)
            if member is not None and member.cert and member.key
            else None
        )
        self.etcd = EtcdProcess(folder / "etcd", tls=tls)
        self.processes: dict[str, subprocess.Popen[str]] = {}
        self.logs: dict[str, Path] = {}

    # --- life -------------------------------------------------------------------------------------

    async def start_all(self) -> None:
        """Up, and ready."""
        await asyncio.to_thread(self.etcd.start)
        await asyncio.gather(*[self.start(name) for name in (META, *self.brokers, *self.delays)])

    async def start(
        self, name: str, *, crash: str = "", environment: Mapping[str, str] | None = None
    ) -> None:
        """Start a process and wait until it reports that it is ready."""
        await asyncio.to_thread(self._start, name, crash, environment or {})

    def _start(self, name: str, crash: str, environment: Mapping[str, str]) -> None:
        module = ["-m", "system.crashing", crash] if crash else ["-m", "qmq.cli"]
        path = os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
        with self._log(name).open("ab") as errors:
            process = subprocess.Popen(
                [
                    sys.executable,
                    *module,
                    *self._words(name),
                    "--etcd",
                    self.etcd.endpoint.removeprefix("http://"),
                ],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={
                    **os.environ,
                    "PYTHONPATH": path,
                    **self._variables,
                    **self._shown(name),
                    **environment,
                },
            )
        assert process.stdout is not None
        line = process.stdout.readline()
        # one that is to crash may do so at once, while it follows
        if READY not in line and not crash:
            process.kill()
            process.wait()
            raise RuntimeError(
                f"{name} did not start: {line!r}; {self._log(name).read_text()[-2000:]}"
            )
        self.processes[name] = process

    def _shown(self, name: str) -> dict[str, str]:
        """The paths of a process's certificate."""
        tls = self._papers.get(name)
        return (
            {}
            if tls is None
            else {
                f"QMQ_{where}_{what.upper()}": str(getattr(tls, what))
                for where in ("TLS", "ETCD")
                for what in FILES
            }
        )

    def _log(self, name: str) -> Path:
        return self.logs.setdefault(name, self.folder / f"{name}.log")

    def _words(self, name: str) -> list[str]:
        if name == META:
            return ["meta", "--port", str(self._meta_port)]
        data, control = self._ports[name]
        role, group, members = (
            ("delay", "d", self.delays) if name in self.delays else ("broker", "g", self.brokers)
        )
        return [
            role,
            "--group",
            group,
            "--replica",
            name,
            "--replicas",
            ",".join(members),
            "--data",
            str(self.folder / name),
            "--data-port",
            str(data),
            "--control-port",
            str(control),
        ]

    def kill(self, name: str) -> None:
        """SIGKILL; harmless if it is gone."""
        process = self.processes.pop(name, None)
        if process is not None:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()

    def send_signal(self, name: str, number: signal.Signals) -> None:
        """SIGSTOP, SIGCONT and others."""
        self.processes[name].send_signal(number)

    def is_running(self, name: str) -> bool:
        process = self.processes.get(name)
        return process is not None and process.poll() is None

    async def stop(self) -> None:
        """End everything."""
        for name in list(self.processes):
            self.kill(name)
        await asyncio.to_thread(self.etcd.stop)

    # --- looking ----------------------------------------------------------------------------------

    def control(self, name: str) -> str:
        """Address of a replica's control port."""
        return f"127.0.0.1:{self._ports[name][1]}"

    def _controls(self) -> dict[str, str]:
        return {name: self.control(name) for name in self.delays}

    async def statuses(self, names: Sequence[str]) -> dict[str, pb.ReplicaStatus]:
        """The statuses of all replicas that answer."""
        return await statuses_at({name: self.control(name) for name in names}, self.network)

    async def delay_master(self, *, within_s: float = 240.0) -> str:
        """The serving master of the delay group, waited for."""
        return await master_at(self._controls(), self.network, within_s=within_s)

    async def settled(self, *, within_s: float = 240.0) -> str:
        """The delay group's master, when all its replicas are there and in step."""
        return await settled_at(self._controls(), self.network, within_s=within_s)


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
        self.cluster = DelayCluster(
            folder, brokers=brokers, variables={"QMQ_BUCKET": "5m"}, secure=secure
        )

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
                    name = (
                        self._faults[number % len(self._faults)]
                        if rounds >= len(self._faults)
                        else self._random.choice(self._faults)
                    )
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
        await asyncio.gather(
            *[self.cluster.start(name) for name in ("meta", *self.cluster.brokers)]
        )
        await asyncio.gather(*[self._start(name) for name in self.cluster.delays])
        await self.cluster.settled()

    async def _start(self, name: str, crash: str = "") -> None:
        clock = self._clocks.get(name)
        await self.cluster.start(
            name, crash=crash, environment=clock.environment if clock is not None else None
        )

    def _judge(self, work: DelayWorkload, outcome: Outcome) -> None:
        wishes = list(work.wishes.values())
        sights = [*work.sights[PLAIN], *work.sights[ORDERED]]
        verdict: Verdict = judge(wishes, sights)
        kept = [wish for wish in wishes if wish.number in work.in_time]
        outcome.anomalies = verdict.anomalies + out_of_order(kept, work.sights[ORDERED])
        outcome.sent, outcome.acknowledged = len(wishes), sum(wish.is_acked for wish in wishes)
        outcome.cancelled, outcome.delivered = verdict.cancelled, verdict.delivered
        outcome.lateness_ms = verdict.lateness_ms

    # --- faults: each returns what it was, when the cluster is whole again ------------------------

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
        async with self.cluster.network.channel(
            self.cluster.control(serving[0]), any_server
        ) as channel:
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
        await self._hand_to(
            self._random.choice(
                [each for each in self.cluster.delays if each != await self.cluster.delay_master()]
            )
        )
        await self.cluster.settled()
        return "hand-over"

    async def _jump(self) -> str:
        clock = self._clocks[await self.cluster.delay_master()]
        hours = self._random.choice((-1, 1))
        clock.jump(hours * 3600)
        await asyncio.sleep(self._random.uniform(2.0, max(self._away_s, 3.0)))
        clock.jump(0)
        return f"clock jumped {hours:+d} h"
