"""Every cell of the matrix ends as the table says, and nothing that was reported as flushed is lost
in silence.

Runs one cell on a cluster in this process: the damaged replicas and the master's fault are both
over when it judges.

Steps:

    before     messages, some of them consumed; a checkpoint; more messages that were reported as
               flushed; a few that only page caches have
    fault      the master is paused, killed or cut off; the damaged replicas are killed, harmed and
               started again; the master comes back
    judged     what a new group reads, whether new messages are stored and read, and the replicas'
               files, after a round of the scrubber
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Final

import pytest
from damage.cells import (
    LOGS,
    REPLICAS,
    Beside,
    Cell,
    Damage,
    End,
    FailingDisk,
    Kind,
    Platter,
    cells,
    common_sizes,
    files_of,
    harm,
)
from support import forms

import qmq
from qmq.errors import LogDamaged, NotConnected, QmqError
from qmq.limits import KIB
from qmq.log.log_config import LogConfig
from qmq.log.scrub import Scrubber
from qmq.node.replica.node import ReplicaNode
from qmq.testing import TestCluster, virtual
from qmq.testing.cluster import DELAY, KEEP_MS
from qmq.testing.machine import ReplicaMachine

NOON: Final = datetime(2026, 1, 5, 12, tzinfo=UTC)
SUBJECT: Final = "orders"
SOON: Final = timedelta(milliseconds=200)
WITHIN_S: Final = 60.0
"""Any state that a run waits for comes within this real time; if it does not, it never comes."""
CHECKPOINT_S: Final = 70
OLD: Final = 60
"""Messages before the checkpoint."""
NEW: Final = 30
"""Messages after it."""
LOOSE: Final = 5
"""Messages that only page caches have."""
SIZE: Final = 2_000
EIO: Final = "[Errno 5]"
LOOK_S: Final = 0.02


@dataclass(slots=True)
class Found:
    """The outcome of a cell's run."""

    end: End
    refusals: dict[str, str] = field(default_factory=dict)
    """Why replicas did not start."""
    lost: set[bytes] = field(default_factory=set)
    """Acknowledged messages that can no longer be read."""
    refused_reads: list[str] = field(default_factory=list)
    unknown: set[bytes] = field(default_factory=set)
    """Messages that were read and never sent."""
    is_served: bool = True


class Run:
    """One cell's cluster."""

    def __init__(self, cell: Cell, cluster: TestCluster, platters: dict[str, Platter]) -> None:
        self.cell = cell
        self.cluster = cluster
        self.platters = platters
        self.group = DELAY if cell.kind.is_of_delay_group else "group-1"
        self.folders = {
            name: self._machine(name).node.config.data for name in cluster.groups[self.group]
        }  # type: ignore[union-attr]
        self.flushed: set[bytes] = set()
        self.loose: set[bytes] = set()
        self.refusals: dict[str, str] = {}
        self.harmed: list[str] = []
        self._groups = itertools.count(1)

    def _machine(self, name: str) -> ReplicaMachine:
        found = self.cluster.machine(name)
        assert isinstance(found, ReplicaMachine)
        return found

    # --- before -----------------------------------------------------------------------------------

    async def fill(self) -> None:
        """Messages, consumers' progress and a checkpoint on all replicas."""
        mq = self.cluster.client()
        for number in range(OLD):
            await self._send(mq, number, "flushed", minutes=2 if number < OLD // 2 else 30)
        if self.cell.kind.is_of_delay_group:
            await self.cluster.clock.advance(minutes=3)
        for number in range(OLD // 2):
            await self._consume(mq, f"before-{number % 3}", 1)
        await self._checkpoint()
        for number in range(OLD, OLD + NEW):
            await self._send(mq, number, "flushed", minutes=30)
        await self._consume(mq, "before-0", 3)
        # a later flush would flush the loose messages, too
        assert await self._until(self._have_flushed)
        for number in range(OLD + NEW, OLD + NEW + LOOSE):
            await self._send(mq, number, "quorum", minutes=30)
        # or a replica that lags would not have the damaged entry
        assert await self._until(self._have_same_sizes)

    async def _send(self, mq: qmq.Client, number: int, acks: str, *, minutes: int) -> None:
        body = b"%06d" % number + bytes(SIZE)
        later = {"delay": timedelta(minutes=minutes)} if self.cell.kind.is_of_delay_group else {}
        await mq.send(SUBJECT, body, acks=acks, **later)  # type: ignore[arg-type]
        (self.flushed if acks == "flushed" else self.loose).add(body)

    async def _consume(self, mq: qmq.Client, group: str, count: int) -> None:
        async with mq.consumer(SUBJECT, group, ack="explicit") as consumer:
            got = await consumer.pull(count, timedelta(seconds=WITHIN_S))
            assert got
            await got.ack_sync()

    async def _checkpoint(self) -> None:
        async def have_checkpoints() -> bool:
            return all(files_of(Kind.CHECKPOINT, folder) for folder in self.folders.values())

        # Then little time passes: a second checkpoint, which is due after as long again, would
        # flush and spill during the fault.
        await self.cluster.clock.advance(seconds=CHECKPOINT_S)
        assert await self._until(have_checkpoints, passing_s=1)

    async def _have_flushed(self) -> bool:
        """Whether no replica has a flush before it that a message asked for."""
        stores = [
            node.broker.store
            for name in self.folders
            if (node := self._machine(name).node) is not None
        ]
        return min(each.flushed_index for each in stores) >= max(
            each.flush_wanted for each in stores
        )

    async def _have_same_sizes(self) -> bool:
        """Whether the logs are of the same size on all replicas."""
        logs = [
            [path for kind in LOGS for path in files_of(kind, folder)]
            for folder in self.folders.values()
        ]
        return (
            len({repr([(path.name, path.stat().st_size) for path in each]) for each in logs}) == 1
        )

    async def _until(self, condition: Callable[[], Awaitable[bool]], passing_s: int = 0) -> bool:
        """Wait for a state. Between two looks `passing_s` pass in the cluster. False if the state
        never comes.
        """
        until_s = time.monotonic() + WITHIN_S
        while not await condition():
            if time.monotonic() > until_s:
                return False
            await self.cluster.clock.advance(seconds=passing_s)
            await asyncio.sleep(LOOK_S)
        return True

    # --- the fault --------------------------------------------------------------------------------

    async def fault(self) -> None:
        """Both faults, until the run has ended."""
        master = self.cluster.master(self.group)
        slaves = [name for name in self.cluster.groups[self.group] if name != master]
        harmed = self.harmed = [*slaves, master][: self.cell.replicas]
        with self._beside(master):
            dead = {*harmed, master} if self.cell.beside is Beside.KILL else {*harmed}
            # All at the same moment: the others would elect a master, which flushes what the fault
            # is to find in page caches.
            await asyncio.gather(*[self.cluster.kill(name) for name in dead])
            sizes = common_sizes(self.cell.kind, [self.folders[name] for name in harmed])
            for name in harmed:
                shutil.copytree(self.folders[name], _copy_of(self.folders[name]))
                harm(self.cell, self.folders[name], self.platters[name], sizes)
            await self._start(harmed)
        again = [
            name for name in self.cluster.groups[self.group] if not self._machine(name).is_running
        ]
        if again:  # as a supervisor does: now all peers are there
            self.refusals.clear()
            await self._start(again)

    @contextmanager
    def _beside(self, master: str) -> Iterator[None]:
        others = [name for name in self.cluster.groups[self.group] if name != master]
        with ExitStack() as undo:
            if self.cell.beside is Beside.PAUSE:
                undo.callback(self.cluster.cut(master))
            elif self.cell.beside is Beside.CUT_OFF:
                for other in others:
                    undo.callback(self.cluster.cut(master, other))
            yield

    async def _start(self, names: list[str]) -> None:
        """Start the replicas together, because they repair each other's damage."""
        ended = await asyncio.gather(
            *[self.cluster.restart(name) for name in names], return_exceptions=True
        )
        for name, failure in zip(names, ended, strict=True):
            if isinstance(failure, LogDamaged):
                self.refusals[name] = str(failure)
            elif failure is not None:
                raise failure

    async def recovered(self) -> Found:
        """The group's state after an operator followed the error's advice: the folders moved away
        or, if all are damaged, restored.
        """
        is_lost_everywhere = self.cell.replicas == REPLICAS
        for name in self.harmed:
            if self._machine(name).is_running:
                await self.cluster.kill(name)
            shutil.rmtree(self.folders[name])
            self.platters[name].blocks.bad.clear()
            if is_lost_everywhere:
                shutil.copytree(_copy_of(self.folders[name]), self.folders[name])
        self.refusals.clear()
        await self._start(self.harmed)
        await self.cluster.until_master(self.group)
        await self._have_same_logs()
        return await self.judge()

    async def _have_same_logs(self) -> bool:
        """Whether all replicas' logs become the same, byte for byte."""

        async def are_same() -> bool:
            return len({repr(self.logs(name)) for name in self.folders}) == 1

        return await self._until(are_same, passing_s=1)

    # --- judging ----------------------------------------------------------------------------------

    async def judge(self) -> Found:
        """The group's state now."""
        found = Found(End.REFUSED, self.refusals)
        try:
            self._assert_majority()
            await self._pass_time()
            first = await self._read(found)
            refused = list(found.refused_reads)
            seen = first | await self._read_elsewhere(found, first)
        except NotConnected:
            self._note_stops()
            found.is_served = False
            return found
        found.unknown = seen - self.flushed - self.loose
        found.lost = self.flushed - seen
        await self._scrub()
        self._note_stops()
        is_whole = await self._scrub() and (bool(self.refusals) or await self._have_same_logs())
        self._note_stops()
        ends = (
            (self.refusals, End.REFUSED),
            (found.lost, End.PARTLY),
            (self.loose - seen, End.SHORT),
            (refused, End.REBUILT),
            (not self.flushed <= first, End.ELSEWHERE),
            (not is_whole, End.REPORTED),
            (True, End.WHOLE),
        )
        found.end = next(end for holds, end in ends if holds)
        return found

    def _assert_majority(self) -> None:
        """Raises NotConnected if too few replicas run. The lease of the last master may not be
        over, but the group commits nothing more.
        """
        if 2 * sum(self._machine(name).is_running for name in self.folders) <= len(self.folders):
            raise NotConnected(f"{self.group} has no majority")

    async def _pass_time(self, by: str = "") -> None:
        """Delayed messages become due, and the master delivers those that it can read: the replica
        `by`, if it is named. A master that finds damage stops, and another one follows. Raises
        NotConnected.
        """
        await self.cluster.until_master(self.group)
        if not self.cell.kind.is_of_delay_group:
            return
        stopped = -1

        async def have_come() -> bool:
            nonlocal stopped
            self._assert_majority()
            if stopped < len(self.cluster.failures):
                stopped = len(self.cluster.failures)
                await self.cluster.clock.advance(hours=1)
            return await self._has_delivered(by)

        await self._until(have_come)
        await self.cluster.until_master(self.group)

    async def _has_delivered(self, by: str) -> bool:
        """Whether the master is `by`, if it is named, and only damaged messages are left. A replica
        that is not the master is made it.
        """
        metadata = self.cluster.client().metadata
        if by and not self._machine(by).is_running:
            return True  # it has stopped, and delivers nothing more
        try:
            (found,) = (await metadata.describe_delays()).delays
            if by and found.replica != by:
                await metadata.transfer(self.group, by)
                return False
        except (QmqError, ValueError):  # an election
            return False
        damaged = {each.subject for each in found.troubles if each.subject.startswith("bucket ")}
        return found.pending == len(damaged) and not found.waiting and not found.planned

    def _note_stops(self) -> None:
        """Replicas that stopped because of damage, or of a block that could not be written in part,
        are like those that did not start.
        """
        for name in self.folders:
            for failure in [
                each
                for each in self.cluster.failures
                if each.startswith(name) and ("E401" in each or EIO in each)
            ]:
                self.refusals[name] = failure
                self.cluster.failures.remove(failure)

    async def _read_elsewhere(self, found: Found, before: set[bytes]) -> set[bytes]:
        """What consumers read after an operator restarted the master, made another replica the
        master, or skipped the message.
        """
        seen = set[bytes]()
        for name in self.folders:
            if self.flushed <= before | seen or self.refusals:
                break
            found.refused_reads.clear()
            if self.cell.kind.is_of_delay_group:
                await self._pass_time(name)
            else:
                await self.cluster.restart(self.cluster.master(self.group))
                await self.cluster.until_master(self.group)
            seen |= await self._read(found)
        while found.refused_reads and not self.cell.kind.is_of_delay_group:
            seen |= await self._read_behind(found)
        return seen

    async def _read(self, found: Found, group: str = "") -> set[bytes]:
        """What a new group gets before the first message that cannot be read."""
        mq, seen = self.cluster.client(), set[bytes]()
        group = group or f"judge-{next(self._groups)}"

        async def has_read() -> bool:
            """Whether no message is left, or one cannot be read."""
            try:
                got = await consumer.pull(1_000, SOON)
            except QmqError as failure:
                found.refused_reads.append(str(failure))
                return True
            seen.update([message.body for message in got])
            if got:
                await got.ack_sync()
            self._assert_majority()
            return self.flushed | self.loose <= seen or (
                not got and await self._is_at_the_end(mq, group)
            )

        async with mq.consumer(SUBJECT, group, ack="explicit") as consumer:
            await self._until(has_read)
        return seen

    async def _is_at_the_end(self, mq: qmq.Client, group: str) -> bool:
        """Whether the group has acknowledged all messages. A master that was elected just now may
        not have answered the consumer yet.
        """
        try:
            found = await mq.metadata.describe_groups(SUBJECT, group)
        except QmqError:
            return False
        return (
            bool(found)
            and not found.silent
            and not any(each.waiting or each.unacked or each.requeued for each in found)
        )

    async def _read_behind(self, found: Found) -> set[bytes]:
        """The messages after the one that cannot be read: an operator skips that message, as the
        error says.
        """
        mq = self.cluster.client()
        behind, group = (
            int(found.refused_reads.pop().rpartition("--to ")[2]),
            f"behind-{next(self._groups)}",
        )
        async with mq.consumer(SUBJECT, group, ack="explicit") as consumer:
            await consumer.pull(1, timedelta(seconds=WITHIN_S))
        await mq.metadata.reset_group(SUBJECT, group, sequence=behind)
        return await self._read(found, group)

    async def _scrub(self) -> bool:
        """One round of each replica's scrubber, with the repair of what it finds. Whether nothing
        was found.
        """
        is_whole = True
        for name in self.cluster.groups[self.group]:
            node = self._machine(name).node
            if node is None:
                continue
            scrubber = Scrubber(node.broker.store)
            while not scrubber.rounds:
                damage = await asyncio.to_thread(scrubber.slice, 4 << 20)
                if damage is not None:
                    is_whole = False
                    await self._until(partial(_is_over, node, damage))
        return is_whole

    def logs(self, name: str) -> dict[str, bytes]:
        """A replica's log files."""
        folder = self.folders[name] / "broker"
        return {
            f"{log}/{path.name}": path.read_bytes()
            for log in ("message", "action")
            for path in sorted((folder / log).glob("*.log"))
        }


async def _is_over(node: ReplicaNode, damage: LogDamaged) -> bool:
    """Whether damage was repaired, or cannot be."""
    scrubber = Scrubber(node.broker.store)
    scrubber.log, scrubber.position = damage.log, damage.position
    if await asyncio.to_thread(scrubber.slice, 1) is None:
        return True
    return not node.driver.is_opening and not node.broker.report_damage(damage)


def _copy_of(folder: Path) -> Path:
    return folder.with_name(folder.name + ".copy")


@asynccontextmanager
async def prepared(cell: Cell) -> AsyncIterator[Run]:
    """The cluster of a cell, filled."""
    platters: dict[str, Platter] = {}
    log = LogConfig(
        segment_bytes=64 * KIB,
        action_segment_bytes=64 * KIB,
        retention_ms=KEEP_MS,
        flush_interval_ms=3_600_000,
        disk_free_bytes_min=0,
    )
    count = (1, 3) if cell.kind.is_of_delay_group else (3, 0)
    cluster = TestCluster(
        brokers=count[0],
        delay=count[1],
        clock=virtual(NOON),
        log=log,
        make_disk=lambda name: FailingDisk(platters.setdefault(name, Platter())),
    )
    async with cluster:
        run = Run(cell, cluster, platters)
        await run.fill()
        yield run


EVERY = list(cells())
PARTS = {"gate": 96, "ci": 32, "all": 1}[forms.FORM]
MESSAGES_IN_A_BLOCK = 3
SMOKE = [
    Cell(Kind.MESSAGES, Damage.FLIP, 3, Beside.KILL),
    Cell(Kind.CONSUME, Damage.FLIP, 3, Beside.PAUSE),
    Cell(Kind.SCHEDULE, Damage.UNREADABLE, 1, Beside.CUT_OFF),
]
CHOSEN = [cell for number, cell in enumerate(EVERY) if cell in SMOKE or number % PARTS == 0]


@pytest.mark.parametrize("cell", CHOSEN, ids=str)
async def test_the_cell_ends_as_the_table_says(cell: Cell) -> None:
    async with prepared(cell) as run:
        await run.fault()
        found = await run.judge()
        assert not found.unknown
        assert cell.allows(found.end), found
        if found.end is not End.PARTLY and found.is_served:
            assert not found.lost
        elif cell.kind is Kind.MESSAGES and found.end is End.PARTLY:
            assert len(found.lost) <= MESSAGES_IN_A_BLOCK
        if found.refusals:
            assert all("E401" in each or EIO in each for each in found.refusals.values())
            assert (await run.recovered()).end is End.WHOLE
