"""`qmq delay`: one replica of one delay group. A replica like a broker's, and in the same folder:

    DATA/delay.json                  the settings with which the group was created (process.py)
    DATA/broker/schedule/            the schedule, with each message's position and due time: the
                                     projection of the store beside it
    DATA/broker/schedule-fetched/    a schedule that is being copied from another replica

The common parts of replicas are in `qmq/node/replica/node.py` and `qmq/node/replica/broker.py`. A
delay replica also has:

    broker          with DelayWork (qmq/delay/broker.py), which sends due messages while it is
                    master; it finds real-time brokers in the coordination store
    projection      Schedule
    control port    DelayService
    if its schedule is incomplete: ScheduleTransfer, which copies another replica's

`ScheduleTransfer` copies the schedule of a delay replica whose log starts over, because the
replica's own log lacks the entries that made the schedule:

    begin      the new log does not start at the first entry, so the schedule is incomplete; each
               opening reports this (`Schedule.is_whole`)
    fetch      copy the files of another replica's newest checkpoint, piece by piece, into a
               separate folder
    wait       until this replica's own log holds, committed, every entry after that checkpoint
    adopt      move the folder into place, open the store again with that state, and replay the
               replica's own log from there

The copy starts again after a crash before the last step, or if a file or the source replica
disappears. Files only grow until they are deleted, and a checkpoint records their lengths, so the
time of reading does not matter. Until the copy is complete, this replica writes no checkpoint
itself.

A replica with an incomplete schedule may hold the longest log. If it is elected, it leads, which
brings the other replicas up to date. It serves no clients, and hands over to a replica with a
complete schedule.

A replica that is asked gives the state in its newest checkpoint, and the files, without locks.
Files may grow, which is harmless. When a bucket is closed, its files are deleted, and the other
replica begins again.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import grpc
import msgspec
from qmq_coordination.broker_groups import DelaySettings

from qmq.broker.parts import KindParts
from qmq.broker.produce_checks import Routing
from qmq.delay.broker import DelayWork, schedule_of
from qmq.delay.config import DelayConfig
from qmq.delay.files import SCHEDULE, ReplicaScheduleFiles
from qmq.delay.schedule import Schedule
from qmq.delay.service import DelayIdentity, DelayService, describe_schedule
from qmq.errors import DiskFull, LogDamaged, QmqError, Unavailable
from qmq.limits import MIB
from qmq.log.disk import Disk
from qmq.log.log_config import LogConfig
from qmq.log.store import Store
from qmq.node import process
from qmq.node.broker_assembly import ViewLocator
from qmq.node.metrics.broker import DelaySource
from qmq.node.process import MACHINE, TIMING, Environment, NodeTiming
from qmq.node.replica.broker import OwnParts, ReplicaBroker
from qmq.node.replica.context import ReplicaConfig, ReplicaContext, open_context
from qmq.node.replica.node import ReplicaNode
from qmq.process.files import make_private
from qmq.proto.v1 import delay_pb2 as pb
from qmq.proto.v1 import delay_pb2_grpc
from qmq.rpc.channel import typed_error
from qmq.rpc.network import NETWORK, Network
from qmq.rpc.server_name import ServerName, always
from qmq.security.access import OpenAccess

if TYPE_CHECKING:
    from qmq_coordination.coordination_store import CoordinationStore

    from qmq.client.connection.pool import ConnectionPool


log = logging.getLogger("qmq.node")

ASIDE: Final = "schedule-fetched"
PIECE_BYTES: Final = MIB
REPORT_S: Final = 5.0
ASK_S: Final = 10.0
"""The deadline of another replica's answer that describes its schedule or has a
piece of the schedule.
"""
POLL_S: Final = 0.05
"""How often a replica checks whether its own log has reached the copied schedule."""


class ScheduleTransfer:
    """Copies the schedule of one replica. `store` is the folder of its store."""

    def __init__(
        self,
        replica: ReplicaBroker,
        store: Path,
        disk: Disk,
        form: type[Schedule],
        fatal: Callable[[BaseException], None],
        network: Network = NETWORK,
        timing: NodeTiming = TIMING,
    ) -> None:
        self._replica = replica
        self._timing = timing
        self._network = network
        self._store = store
        self._disk = disk
        self._form = form
        self._fatal = fatal
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._is_started = False

    # --- life -------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin when the replica has joined its group."""
        self._is_started = True
        self.fetch()

    def stop_fetch(self) -> None:
        """Stop copying, because the log and the schedule's files are about to start over."""
        self._cancel("fetch")

    def fetch(self) -> None:
        """Fetch another schedule after the log started over,
        if the log does not reach back to the beginning.
        """
        self._start("fetch", self._run)

    def role_changed(self) -> None:
        """Handle a change of role: a master without a schedule hands over soon."""
        if self._is_started and self._replica.is_master and not self._replica.has_all:
            self._start("hand over", self._hand_over)

    async def stop(self) -> None:
        """Stop the transfer, at any point."""
        self._is_started = False
        tasks = list(self._tasks.values())
        for name in list(self._tasks):
            self._cancel(name)
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, name: str, run: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._cancel(name)
        if self._is_started:
            task = self._tasks[name] = asyncio.get_running_loop().create_task(run())
            task.add_done_callback(self._ended)

    def _cancel(self, name: str) -> None:
        task = self._tasks.pop(name, None)
        if task is not None:
            task.cancel()

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (failure := task.exception()) is not None:
            self._fatal(failure)

    # --- fetching ---------------------------------------------------------------------------------

    async def _run(self) -> None:
        if self._replica.has_all:
            return
        log.warning(
            "this replica has no schedule: it fetches one from another replica, and does not "
            "serve until then"
        )
        while not await self.fetch_from_any():  # noqa: ASYNC110 - others must come
            await asyncio.sleep(self._timing.schedule_retry_s)

    async def fetch_from_any(self) -> bool:
        """Try each replica that has the schedule, until one gave it. Returns whether one did."""
        for name, address in self._replica.donors().items():
            async with self._network.channel(address, always(name)) as channel:
                try:
                    await self._take_from(name.replica, delay_pb2_grpc.DelayControlStub(channel))
                except grpc.RpcError as cause:
                    log.warning(
                        "fetching the schedule from replica %s failed: %s",
                        name.replica,
                        typed_error(cause, address),
                    )
                except (DiskFull, LogDamaged, Unavailable) as failure:
                    log.warning(
                        "storing the schedule of replica %s failed: %s", name.replica, failure
                    )
                else:
                    return True
        return False

    async def _take_from(self, name: str, stub: Any) -> None:
        described = await describe_schedule(stub, timeout_s=ASK_S)
        first = self._replica.complete_from
        if first is None or described.index < first - 1:
            raise Unavailable(
                f"its checkpoint is of index {described.index}, and our log begins at "
                f"{first or 'a place that is not known yet'}"
            )
        await self._fetch(name, stub, self._form.files(msgspec.msgpack.decode(described.state)))
        while self._replica.committed < described.index:  # noqa: ASYNC110 - the log comes from the master
            await asyncio.sleep(POLL_S)
        self._adopt(described.state)
        log.warning(
            "this replica now uses the schedule of replica %s as of index %d", name, described.index
        )

    async def _fetch(self, name: str, stub: Any, files: list[tuple[str, int]]) -> None:
        aside = self._store / ASIDE
        shutil.rmtree(aside, ignore_errors=True)
        make_private(aside)
        progress = _Progress(name, len(files), sum(size for _, size in files))
        for file, size in files:
            await self._fetch_file(stub, aside / Path(file).name, size, progress)
        await asyncio.to_thread(self._disk.sync_folder, aside)

    async def _fetch_file(self, stub: Any, path: Path, size: int, progress: _Progress) -> None:
        fd = self._disk.open_append(path)
        try:
            at = 0
            while at < size:
                request = pb.ReadScheduleRequest(
                    file=path.name, offset=at, bytes_max=min(PIECE_BYTES, size - at)
                )
                piece: bytes = (await stub.ReadSchedule(request, timeout=ASK_S)).data
                if not 0 < len(piece) <= size - at:
                    raise Unavailable(
                        f"{path.name} gave {len(piece)} bytes at {at}, and should have {size}"
                    )
                self._disk.write(fd, [piece], at)
                at += len(piece)
                progress.report(len(piece))
            await asyncio.to_thread(self._disk.sync, fd)
        finally:
            self._disk.close(fd)

    def _adopt(self, state: bytes) -> None:
        """Adopt the files without an await, so that no other task sees the store in between."""
        self._form.adopt(self._store / ASIDE, state, self._disk)
        shutil.rmtree(self._store / SCHEDULE, ignore_errors=True)
        (self._store / ASIDE).rename(self._store / SCHEDULE)
        self._disk.sync_folder(self._store)
        self._replica.reopen_now()

    # --- leading without a schedule ---------------------------------------------------------------

    async def _hand_over(self) -> None:
        """Try to hand the mastership over,
        until another replica leads or the schedule is complete.
        """
        replica = self._replica
        while replica.is_master and not replica.has_all:
            for name, address in replica.donors().items():
                if await self._has_schedule(name, address):
                    try:
                        await replica.hand_over(name.replica)
                        return
                    except QmqError as failure:
                        log.warning(
                            "replica %s has its schedule but did not take over the mastership: %s",
                            name.replica,
                            failure,
                        )
            await asyncio.sleep(self._timing.schedule_give_s)

    async def _has_schedule(self, name: ServerName, address: str) -> bool:
        async with self._network.channel(address, always(name)) as channel:
            asking = delay_pb2_grpc.DelayControlStub(channel)
            try:
                await asking.DescribeSchedule(pb.DescribeScheduleRequest(offset=0), timeout=ASK_S)
            except grpc.RpcError:
                return False
            return True


class _Progress:
    """Logs the progress from time to time."""

    def __init__(self, donor: str, files: int, size: int) -> None:
        self._donor, self._bytes, self._done = donor, size, 0
        self._reported_s = time.monotonic()
        log.info("fetching %d files of the schedule, %d bytes, from replica %s", files, size, donor)

    def report(self, size: int) -> None:
        self._done += size
        if time.monotonic() - self._reported_s >= REPORT_S:
            self._reported_s = time.monotonic()
            log.info(
                "%d of %d bytes of the schedule fetched from replica %s",
                self._done,
                self._bytes,
                self._donor,
            )


def delay_log() -> LogConfig:
    """A delay group's message log is only the input of the schedule: one day of it is enough for
    replicas that were away.
    """
    return LogConfig(retention_ms=process.DAY_MS)


@dataclass(frozen=True, slots=True)
class DelayReplicaConfig(ReplicaConfig):
    """The configuration of one replica. `settings` create the group, or must equal those of an
    existing group. `delay` is for this replica only."""

    data_port: int = 20883
    control_port: int = 20884
    log: LogConfig = field(default_factory=delay_log)
    settings: DelaySettings = process.DEFAULT
    delay: DelayConfig = field(default_factory=DelayConfig)


class DelayKind:
    """A replica of a delay group: it derives the schedule from its log, and serves only while the
    schedule is complete.
    """

    routing: Final = Routing()

    def __init__(
        self, context: ReplicaContext, settings: DelaySettings, delay: DelayConfig
    ) -> None:
        self.settings = settings
        self._context = context
        self._locator = ViewLocator(context.coordination, context.view, context.environment.network)
        self._work = DelayWork(
            context.config.group,
            settings,
            delay,
            context.clock,
            self._links,
            context.environment.fatal,
        )

    def projection(self) -> Schedule:
        return Schedule(
            self._context.folder / SCHEDULE, self._context.environment.disk, self.settings.bucket_ms
        )

    def discard(self) -> None:
        for name in (SCHEDULE, ASIDE):
            shutil.rmtree(self._context.folder / name, ignore_errors=True)

    def has_all(self, store: Store | None) -> bool:
        """True if the schedule is complete. If the log lost its beginning, the schedule must be
        copied from another replica.
        """
        return store is not None and schedule_of(store).is_whole

    def broker_parts(self, access: OpenAccess) -> KindParts:
        return self._work.parts(access)

    def _links(self) -> ConnectionPool:
        return self._locator.links(f"qmq-delay/{self._context.config.replica}")

    def own_parts(self, replica: ReplicaBroker) -> OwnParts:
        context, work = self._context, self._work
        config, environment, broker = context.config, context.environment, replica.broker
        files = ReplicaScheduleFiles(context.folder, lambda: replica.has_all)
        identity = DelayIdentity(config.group, config.replica, self.settings.bucket_ms)
        service = DelayService(identity, lambda: work.admin if broker.is_serving else None, files)
        transfer = ScheduleTransfer(
            replica,
            context.folder,
            environment.disk,
            Schedule,
            environment.fatal,
            environment.network,
            environment.node_timing,
        )

        async def stop() -> None:
            await transfer.stop()
            await work.stop()  # before the handover: the next master sends unanswered plans again
            self._locator.close()

        return OwnParts(
            DelaySource(broker, work, config.group),
            transfer.start,
            stop,
            service.add_to,
            transfer.role_changed,
            transfer.stop_fetch,
            transfer.fetch,
        )


def delay_node(
    config: DelayReplicaConfig,
    coordination: CoordinationStore | None = None,
    *,
    environment: Environment = MACHINE,
) -> ReplicaNode:
    """Make a replica. The caller starts it. Without `coordination` the replica uses the configured
    etcd cluster. Raises InvalidArgument for impossible settings.
    """
    settings = process.check_settings(config.settings)
    context = open_context(config, coordination, environment)
    return ReplicaNode(context, DelayKind(context, settings, config.delay))
