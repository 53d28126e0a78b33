"""One soak: a node, a producer at a share of the node's capacity, consumers that join, leave, hang
and crash. 1 % of the messages fail.

    calibrate     run without a limit for a while, to measure what the node and its consumers take
    run           send at `load` of that; at times a consumer leaves (SIGTERM), crashes (SIGKILL), hangs (SIGSTOP, past its lease), or joins
    drain         stop sending; consumers work until the group has read everything
    judge         `judge_messages`, `judge_samples`

One consumer is never disturbed, so that its memory can be judged, too. Retries come after fractions
of a second, so that failing messages become dead letters within the run.

Judges a soak: was every message handled or dead-lettered, and did the processes' memory and files
stay constant? Pure.
"""  # noqa: E501

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from support import NodeProcess
from system.group import secured
from system.soak_worker import EVERY, FAILS, GROUP, LEASE_MS, SUBJECT, Runs, read_notes

import qmq
from qmq.model import OPERATORS, dead_letter_subject

RSS_GROWTH_MAX: Final = 1.25
RSS_SPARE_MIB: Final = 48
"""Memory may grow by that much besides: caches fill."""
COUNT_SPARE: Final = 8
"""File handles and threads may be so many more at a glance."""


class Sample(NamedTuple):
    """A process at one moment."""

    time_s: float
    rss_mib: float
    handles: int
    threads: int


@dataclass(slots=True)
class Verdict:
    """The findings of a soak."""

    sent: int = 0
    handled: int = 0
    handled_again: int = 0
    dead_lettered: int = 0
    """Distinct messages in the dead-letter queue."""
    lost_consumers_dead_lettered: int = 0
    """Those of them that did not fail in the handler: their consumers were lost too often."""
    anomalies: list[str] = field(default_factory=list)


def counts_of(runs: Runs, end: int) -> npt.NDArray[np.int32]:
    """How often each number below `end` is in the runs."""
    edges = np.zeros(end + 1, np.int32)
    firsts, lasts = np.minimum(runs[:, 0], end), np.minimum(runs[:, 0] + runs[:, 1], end)
    np.add.at(edges, firsts, 1)
    np.add.at(edges, lasts, -1)
    return np.cumsum(edges[:-1], dtype=np.int32)


def judge_messages(
    sent: Runs, handled: Runs, dead_lettered: Runs, *, every: int, fails: int
) -> Verdict:
    """Every acknowledged message was handled, or is in the dead-letter queue once; those that
    always fail (`fails` of `every`) are there and were never handled.
    """
    end = int((sent[:, 0] + sent[:, 1]).max(initial=0))
    was_sent = counts_of(sent, end) > 0
    times, letters = counts_of(handled, end), counts_of(dead_lettered, end)
    failing = np.zeros(end, bool)
    failing[fails::every] = True
    verdict = Verdict(
        int(was_sent.sum()),
        int((times > 0).sum()),
        int((times - 1).clip(0).sum()),
        int((letters > 0).sum()),
    )
    verdict.lost_consumers_dead_lettered = int(((letters > 0) & ~failing).sum())
    for what, found in (
        (
            "were lost: neither handled nor in the dead-letter queue",
            was_sent & (times == 0) & (letters == 0),
        ),
        ("always fail, and are not in the dead-letter queue", was_sent & failing & (letters == 0)),
        ("always fail, and count as handled", failing & (times > 0)),
        ("are in the dead-letter queue more than once", letters > 1),
    ):
        if found.any():
            verdict.anomalies.append(
                f"{int(found.sum())} messages {what}, such as {int(np.argmax(found))}"
            )
    return verdict


def judge_samples(name: str, samples: Sequence[Sample]) -> list[str]:
    """Memory, file handles and threads are flat: what they were after a quarter of the time they
    are at the end.
    """
    quarter = len(samples) // 4
    if quarter < 2:
        return [f"{name}: only {len(samples)} samples"]
    early, late = samples[quarter : 2 * quarter], samples[-quarter:]
    anomalies: list[str] = []
    before, after = median(each.rss_mib for each in early), median(each.rss_mib for each in late)
    if after > before * RSS_GROWTH_MAX and after > before + RSS_SPARE_MIB:
        anomalies.append(f"{name}: memory grew from {before:.0f} to {after:.0f} MiB")
    for what, place in (("file handles", 2), ("threads", 3)):
        low, high = median(each[place] for each in early), median(each[place] for each in late)
        if high > low + COUNT_SPARE:
            anomalies.append(f"{name}: {what} grew from {low:.0f} to {high:.0f}")
    return anomalies


CONSUMERS: Final = 4
RETRY_DELAYS_MS: Final = (100, 200, 400, 800)
SAMPLE_S: Final = 1.0
DRAIN_S: Final = 120.0
TESTS: Final = Path(__file__).resolve().parents[1]
RETENTION_MIB: Final = 8_192


@dataclass(slots=True)
class Report:
    """The work and the findings of a soak."""

    seconds: float
    seed: int
    load: float
    capacity: float = 0.0
    """Messages a second that were sent and handled at full load."""
    rate: float = 0.0
    events: Counter[str] = field(default_factory=Counter)
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    verdict: Verdict = field(default_factory=Verdict)

    def to_json(self) -> str:
        """The whole result as JSON."""
        found = {
            "seconds": self.seconds,
            "seed": self.seed,
            "load": self.load,
            "capacity": self.capacity,
            "rate": self.rate,
        }
        samples = {name: [each._asdict() for each in some] for name, some in self.samples.items()}
        return json.dumps(
            {
                **found,
                "events": dict(self.events),
                "samples": samples,
                "verdict": asdict(self.verdict),
            },
            indent=1,
        )

    @property
    def anomalies(self) -> list[str]:
        """Anomalies of messages and of processes."""
        return self.verdict.anomalies


class Worker:
    """A child process, and its file."""

    def __init__(self, role: str, server: str, path: Path, *more: str) -> None:
        self.path = path
        command = [sys.executable, "-m", "system.soak_worker", role, server, str(path), *more]
        # A child inherits the mask: told to leave before it can hear that, it leaves when it can.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            self.process = subprocess.Popen(
                command, cwd=TESTS, env={**os.environ, "PYTHONPATH": str(TESTS)}
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    async def ended(self) -> None:
        """Waited for; a worker that fails fails the run."""
        status = await asyncio.to_thread(self.process.wait, 60)
        assert status in (0, -signal.SIGKILL), f"{self.path.name} ended with {status}"

    def kill(self) -> None:
        """If it still runs."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


class Soak:
    """`progress` is called with (what, share done). `secure`: with TLS and enforced rules."""

    def __init__(
        self,
        folder: Path,
        seconds: float,
        *,
        seed: int = 0,
        load: float = 0.7,
        calibrate_s: float = 10.0,
        steps_s: float = 2.0,
        progress: Callable[[str, float], None] = lambda _what, _share: None,
        secure: bool = False,
    ) -> None:
        self._folder = folder
        self._random = Random(seed)
        self._calibrate_s, self._steps_s = calibrate_s, steps_s
        self._progress = progress
        self._secure = secure
        self._node = NodeProcess(
            folder / "node", "--no-delay", "--retention-mib", str(RETENTION_MIB)
        )
        self._node.variables = {"QMQ_SEGMENT_MIB": "512"}
        self._numbers = itertools.count()
        self._consumers: list[Worker] = []
        self._all: list[Worker] = []
        self.report = Report(seconds, seed, load)

    async def run(self) -> Report:
        """Make the whole run. Raises AssertionError if a worker fails, TimeoutError if the group
        does not finish.
        """
        (self._folder / "notes").mkdir(parents=True)
        async with secured(self._node, self._folder, secure=self._secure):
            return await self._run()

    async def _run(self) -> Report:
        await asyncio.to_thread(self._node.start)
        try:
            async with qmq.connect(self._node.address) as mq:
                await mq.metadata.create_subject(qmq.SubjectConfig(SUBJECT))
                await mq.metadata.set_group_settings(
                    SUBJECT, GROUP, attempts_max=5, retry_delays_ms=RETRY_DELAYS_MS
                )
                await self._soak(mq)
        finally:
            for worker in self._all:
                worker.kill()
            self._node.kill()
        return self.report

    async def _soak(self, mq: qmq.Client) -> None:
        report = self.report
        steady = self._worker("consume", "steady")
        for _ in range(CONSUMERS - 1):
            self._join()
        letter_reader = self._worker("letters")
        report.capacity = await self._calibrate(mq)
        report.rate = report.capacity * report.load
        producer = self._worker("produce", f"{report.rate:.0f}")
        watched = {
            "broker": self._node_pid(),
            "producer": producer.process.pid,
            "consumer": steady.process.pid,
        }
        await self._trouble(watched)
        await self._end(producer)
        await self._drained(mq)
        for worker in (*self._consumers, steady, letter_reader):
            await self._end(worker)
        self._judge(producer)

    def _worker(self, role: str, *more: str) -> Worker:
        number = next(self._numbers)
        worker = Worker(
            role, self._node.address, self._folder / "notes" / f"{role}-{number}", *more
        )
        self._all.append(worker)
        return worker

    def _join(self) -> None:
        self._consumers.append(self._worker("consume", f"c{next(self._numbers)}"))

    def _node_pid(self) -> int:
        assert self._node.process is not None
        return self._node.process.pid

    async def _end(self, worker: Worker) -> None:
        worker.signal(signal.SIGTERM)
        await worker.ended()

    # --- load -------------------------------------------------------------------------------------

    async def _calibrate(self, mq: qmq.Client) -> float:
        """Messages a second that are handled while as much is sent as is taken; then the backlog is
        worked off.
        """
        producer = self._worker("produce", "0")
        self._progress("calibrating", 0.0)
        await asyncio.sleep(self._calibrate_s / 2)
        before, began = await self._more_than(0, mq), time.monotonic()
        await asyncio.sleep(self._calibrate_s / 2)
        capacity = (await self._more_than(before, mq) - before) / (time.monotonic() - began)
        await self._end(producer)
        await self._drained(mq)
        self._all.remove(producer)
        # What calibrated is no part of the soak: the next producer begins at number 0 again.
        for worker in self._all:
            os.truncate(worker.path, 0)
        return capacity

    async def _more_than(self, done: int, mq: qmq.Client) -> int:
        """How much is handled, once that is more than `done`: consumers on a loaded machine start
        late. Raises TimeoutError.
        """
        async with asyncio.timeout(DRAIN_S):
            while (found := await self._done(mq)) <= done:
                await asyncio.sleep(0.2)
            return found

    async def _done(self, mq: qmq.Client) -> int:
        return sum(
            each.next_sequence - each.unacked - each.requeued for each in await self._group(mq)
        )

    async def _group(self, mq: qmq.Client) -> list[Any]:
        return [each for each in await mq.metadata.describe_groups(SUBJECT) if each.group == GROUP]

    async def _unseen(self, mq: qmq.Client) -> int:
        """Dead letters that are stored, and not looked at; also those that are not committed
        yet.
        """
        stored = sum(each.messages for each in await mq.metadata.dead_letter_queues(GROUP))
        looked = await mq.metadata.describe_groups(dead_letter_subject(GROUP)) if stored else []
        return stored - sum(each.settled_before for each in looked if each.group == OPERATORS)

    async def _drained(self, mq: qmq.Client) -> None:
        """Wait until the group has nothing left, and its dead letters are looked at."""
        async with asyncio.timeout(DRAIN_S):
            while True:
                left = sum(
                    each.waiting + each.unacked + each.requeued + each.dying
                    for each in await self._group(mq)
                )
                if not left and not await self._unseen(mq):
                    return
                self._progress(f"draining, {left:,} left", 1.0)
                await asyncio.sleep(0.2)

    # --- trouble ----------------------------------------------------------------------------------

    async def _trouble(self, watched: dict[str, int]) -> None:
        report, began = self.report, time.monotonic()
        following = began + self._steps_s
        hanging: list[tuple[float, Worker]] = []
        while (now := time.monotonic()) < began + report.seconds:
            for name, pid in watched.items():
                report.samples.setdefault(name, []).append(sample(pid, now - began))
            for item in [each for each in hanging if each[0] <= now]:
                item[1].signal(signal.SIGCONT)
                hanging.remove(item)
            if now >= following:
                following = now + self._random.uniform(0.5, 1.5) * self._steps_s
                hanging += self._event(now, {id(worker) for _, worker in hanging})
            self._progress("soaking", (now - began) / report.seconds)
            await asyncio.sleep(SAMPLE_S)
        for _, worker in hanging:
            worker.signal(signal.SIGCONT)

    def _event(self, now: float, hanging: set[int]) -> list[tuple[float, Worker]]:
        """Something happens to the consumers: two to five of them are there besides the steady
        one.
        """
        free = [worker for worker in self._consumers if id(worker) not in hanging]
        names = ["join"] * (len(self._consumers) < CONSUMERS + 1) + ["leave", "crash", "hang"] * (
            len(free) > 1
        )
        what = self._random.choice(names or ["nothing"])
        self.report.events[what] += 1
        if what == "join":
            self._join()
        elif what != "nothing":
            worker = self._random.choice(free)
            if what == "hang":
                worker.signal(signal.SIGSTOP)
                return [(now + LEASE_MS / 1000 * self._random.uniform(0.5, 2.5), worker)]
            worker.signal(signal.SIGTERM if what == "leave" else signal.SIGKILL)
            self._consumers.remove(worker)
        return []

    # --- judging ----------------------------------------------------------------------------------

    def _judge(self, producer: Worker) -> None:
        report = self.report
        notes = {
            role: [read_notes(each.path) for each in self._all if each.path.name.startswith(role)]
            for role in ("consume", "letters")
        }
        handled, dead_lettered = np.concatenate(notes["consume"]), np.concatenate(notes["letters"])
        report.verdict = judge_messages(
            read_notes(producer.path), handled, dead_lettered, every=EVERY, fails=FAILS
        )
        for name, samples in report.samples.items():
            report.verdict.anomalies += judge_samples(name, samples)
        if not report.anomalies:
            shutil.rmtree(self._folder / "notes")


def sample(pid: int, time_s: float) -> Sample:
    """The current state of a process."""
    status = dict(
        line.split(":", 1)
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if ":" in line
    )
    handles = len(os.listdir(f"/proc/{pid}/fd"))
    return Sample(time_s, int(status["VmRSS"].split()[0]) / 1024, handles, int(status["Threads"]))
