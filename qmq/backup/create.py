"""`qmq backup create`, in these steps:

    1. write a mark, so that no prune deletes chunks that the backup needs (qmq/backup/prune.py)
    2. read the newest backup's manifest: the new backup refers to its sealed segments instead of
       copying them
    3. each delay group's newest checkpoint, before the moment, so that the logs go further than it
    4. the moment
    5. the coordination store's keys, each group's logs and schedule
    6. write the manifest; then check that the mark still exists

A crash anywhere before 6 leaves chunks that the next backup finds, and no backup. Nothing is ever
overwritten.

The backup reads logs from a replica's control port and not folders, so that it can run anywhere,
from any replica, while the cluster works: committed bytes never change, and all replicas have the
same bytes at the same positions. It also checks what other readers of `ReadLog` trust: every
entry's checksums, and that indexes rise.

The moment is a revision of the coordination store, and the end of each group's logs:

    hold the writes of every master
    ─▶ ask each for its logs' ends, and the store for its revision
    ─▶ release every master

While all are held, no group's log gets an entry that a client wrote after it saw another group's
log grow. So the ends belong together: every cause of an entry before them (the message that a
consumer handled before it acknowledged another, the delivery that a delay group has noted) lies
before them, too. The route of the revision and the command messages in the logs belong together for
the same reason.

Each master says at its release whether it was held without a break. If one was not, or another
replica was elected meanwhile, the attempt fails, and `create` tries again.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import grpc
import msgspec
from qmq_coordination.broker_groups import GROUPS, BrokerGroupState, group_states
from qmq_coordination.coordination_store import CoordinationStore, KeyListing

import qmq
from qmq.backup.manifest import (
    ROOT,
    VERSION,
    BackedUpFile,
    BackedUpGroup,
    BackedUpSchedule,
    BackedUpSegment,
    BackupManifest,
    ChunkedBytes,
    encode_items,
    kept,
    manifest_name,
    new_id,
)
from qmq.backup.objects import BackupObjects
from qmq.backup.prune import Mark, RunningMarks, Work
from qmq.delay.schedule import Schedule
from qmq.delay.service import describe_schedule
from qmq.errors import (
    BackupDamaged,
    BackupNotFound,
    CorruptBatch,
    LogDamaged,
    NotConnected,
    Overloaded,
    QmqError,
    Unavailable,
)
from qmq.limits import MIB
from qmq.log.envelopes import walk_rising
from qmq.proto.v1 import control_pb2 as pb
from qmq.proto.v1 import control_pb2_grpc, delay_pb2, delay_pb2_grpc
from qmq.rpc.channel import typed_error
from qmq.rpc.network import Network
from qmq.rpc.server_name import ServerName, always

PIECE_BYTES: Final = MIB
CALL_S: Final = 30.0
COLD_TRIES: Final = 600
"""Attempts to read a segment that the broker first fetches from its object
store: a minute or two.
"""

ReportBytes = Callable[[int], None]
"""Called with the number of bytes that were read or skipped."""


def check_entries(data: bytes, position: int, after: int) -> int:
    """Check whole entries of a log; they must have rising indexes above `after`. Returns the last
    index. Raises CorruptBatch.
    """

    def read(at: int, size: int) -> bytes:
        return data[at - position : at - position + size]

    for entry in walk_rising(read, position, position + len(data), after):
        after = entry.envelope.index
    return after


class Chunker:
    """Cuts bytes into chunks and stores these in threads."""

    def __init__(self, objects: BackupObjects) -> None:
        self._objects = objects
        self._buffer = bytearray()
        self._chunks: list[bytes] = []
        self._size = 0

    async def add(self, data: bytes) -> None:
        """Raises StoreAway, BackupDamaged."""
        self._buffer += data
        while len(self._buffer) >= self._objects.chunk_bytes:
            await self._put(self._objects.chunk_bytes)

    async def _put(self, size: int) -> None:
        chunk = bytes(self._buffer[:size])
        del self._buffer[:size]
        self._chunks.append(await asyncio.to_thread(self._objects.put_chunk, chunk))
        self._size += len(chunk)

    async def end(self) -> ChunkedBytes:
        """Raises StoreAway, BackupDamaged."""
        if self._buffer:
            await self._put(len(self._buffer))
        return ChunkedBytes(self._size, tuple(self._chunks))


class GroupLogReader:
    """Reads from one replica's control port."""

    def __init__(
        self, address: str, stub: Any, objects: BackupObjects, report: ReportBytes
    ) -> None:
        self._address = address
        self._stub = stub
        self._objects = objects
        self._report = report

    async def segments(
        self, log: int, held: pb.HeldLog, earlier: Iterable[BackedUpSegment]
    ) -> tuple[BackedUpSegment, ...]:
        """A log's segments up to the held end. A segment in an earlier backup is not read again.
        Raises LogDamaged, Unavailable, StoreAway.
        """
        known = {each.base: each for each in earlier if each.is_sealed}
        bases = [base for base in held.bases if base < held.end]
        found: list[BackedUpSegment] = []
        for base, end in pairwise([*bases, held.end]):
            is_sealed = end != held.end
            same = known.get(base)
            if is_sealed and same is not None and same.end == end:
                found.append(same)
                self._report(end - base)
                continue
            content = await self._read(log, base, end)
            if content is None:  # retention deleted it meanwhile, and all before it
                found.clear()
            else:
                found.append(BackedUpSegment(base, content, is_sealed))
        return tuple(found)

    async def _read(self, log: int, base: int, end: int) -> ChunkedBytes | None:
        """A segment's entries from its beginning to `end`;
        None if retention has deleted the segment.
        """
        chunker, position, index = Chunker(self._objects), base, 0
        while position < end:
            data = await self._piece(log, position)
            if data is None:
                return None
            data = data[: end - position]
            try:
                index = check_entries(data, position, index)
            except CorruptBatch as cause:
                raise LogDamaged(
                    f"{self._address} gave a damaged entry at {position}: {cause.message}"
                ) from cause
            if not data:
                raise Unavailable(
                    f"{self._address} has no entry at {position}, and its log ends at {end}"
                )
            await chunker.add(data)
            position += len(data)
            self._report(len(data))
        return await chunker.end()

    async def _piece(self, log: int, position: int) -> bytes | None:
        request = pb.ReadLogRequest(log=log, position=position, bytes_max=PIECE_BYTES)
        for tries_left in reversed(range(COLD_TRIES)):
            try:
                answer: pb.ReadLogResponse = await self._stub.ReadLog(request, timeout=CALL_S)
            except grpc.RpcError as cause:
                failure = typed_error(cause, self._address)
                if isinstance(failure, LogDamaged) and "outside the log" in failure.message:
                    return None
                if not isinstance(failure, Overloaded) or not tries_left:
                    raise failure from cause
                await asyncio.sleep(
                    (failure.retry_after_ms or 50) / 1000
                )  # the broker fetches the segment from its object store
            else:
                return answer.entries
        raise AssertionError("the last try returns or raises")


class ScheduleReader:
    """Reads a delay group's schedule from the control port of a replica."""

    def __init__(
        self, address: str, stub: Any, objects: BackupObjects, report: ReportBytes
    ) -> None:
        self._address = address
        self._stub = stub
        self._objects = objects
        self._report = report

    async def describe(self) -> delay_pb2.ScheduleDescription | None:
        """The newest checkpoint's state; None without a checkpoint. Call this before the moment, so
        that the logs reach beyond the checkpoint.
        """
        try:
            return await describe_schedule(self._stub, timeout_s=CALL_S)
        except grpc.RpcError as cause:
            failure = typed_error(cause, self._address)
            if isinstance(failure, NotConnected):
                return None
            raise failure from cause

    async def read(self, description: delay_pb2.ScheduleDescription) -> BackedUpSchedule:
        """Read the schedule's files. Raises Unavailable if a file was deleted meanwhile: then call
        `describe` again.
        """
        state = description.state
        files = [
            BackedUpFile(name, await self._file(name, size))
            for name, size in Schedule.files(msgspec.msgpack.decode(state))
        ]
        stored = await asyncio.to_thread(self._objects.put_bytes, state)
        return BackedUpSchedule(description.index, stored, tuple(files))

    async def _file(self, name: str, size: int) -> ChunkedBytes:
        chunker, at = Chunker(self._objects), 0
        while at < size:
            request = delay_pb2.ReadScheduleRequest(
                file=name, offset=at, bytes_max=min(PIECE_BYTES, size - at)
            )
            try:
                data: bytes = (await self._stub.ReadSchedule(request, timeout=CALL_S)).data
            except grpc.RpcError as cause:
                raise Unavailable(
                    f"the schedule's file {name} is gone: {typed_error(cause, self._address)}"
                ) from cause
            if not data:
                raise Unavailable(
                    f"the schedule's file {name} ends at {at:,}, and had {size:,} bytes"
                )
            await chunker.add(data)
            at += len(data)
            self._report(len(data))
        return await chunker.end()


log = logging.getLogger("qmq.backup")

HOLD_MS: Final = 2_000
"""The longest time that writes wait. Usually they wait for some hundredths of a second."""
HOLD_CALL_S: Final = 1.5
MOMENT_TRIES: Final = 10
RETRY_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class HeldGroup:
    """A group at the moment."""

    state: BrokerGroupState
    control_address: str
    logs: pb.HeldLogs


@dataclass(frozen=True, slots=True)
class Moment:
    """One moment of a whole cluster."""

    listing: KeyListing
    groups: tuple[HeldGroup, ...]
    """The groups by name."""


async def find_moment(
    store: CoordinationStore, network: Network, *, retry_s: float = RETRY_S
) -> Moment:
    """Find one moment. Raises CoordinationError; Unavailable if a group has no master, or its
    writes could not be held.
    """
    for tries_left in reversed(range(MOMENT_TRIES)):
        try:
            return await _find(store, network)
        except Unavailable as failure:
            if not tries_left:
                raise
            log.warning("no moment for the backup yet, trying again: %s", failure)
        await asyncio.sleep(retry_s)
    raise AssertionError("the last try returns or raises")


async def _find(store: CoordinationStore, network: Network) -> Moment:
    states = {
        name: state
        for name, state in group_states(await store.list(GROUPS)).items()
        if state.members is not None
    }
    if not states:
        raise Unavailable(
            "the coordination store knows no broker group: is --etcd that of the cluster?"
        )
    token = secrets.token_hex(8)
    async with _stubs(states, network) as stubs:
        try:
            await _all(
                stubs,
                lambda stub: stub.HoldWrites(
                    pb.HoldWritesRequest(token=token, hold_ms=HOLD_MS), timeout=HOLD_CALL_S
                ),
            )
            ends = await _all(
                stubs,
                lambda stub: stub.DescribeHold(
                    pb.DescribeHoldRequest(token=token), timeout=HOLD_CALL_S
                ),
            )
            revision = (await store.list(GROUPS, limit=1)).revision
        finally:
            released = await _release(stubs, token)
        if released:
            raise released[0]
    listing = await store.list(ROOT, revision=revision)
    return Moment(listing, _matched(states, ends, listing))


def _matched(
    states: Mapping[str, BrokerGroupState], ends: Mapping[str, pb.HeldLogs], listing: KeyListing
) -> tuple[HeldGroup, ...]:
    """The groups, if exactly the groups of this revision were held,
    under the epochs of this revision.
    """
    groups = KeyListing(
        listing.revision, tuple(each for each in listing.items if each.key.startswith(GROUPS))
    )
    now = {name: state for name, state in group_states(groups).items() if state.members is not None}
    if now.keys() != states.keys():
        raise Unavailable("a group was created while the backup looked for a moment")
    for name, state in now.items():
        if state.claim.epoch != ends[name].epoch:
            raise Unavailable(f"{name} elected another master while the backup looked for a moment")
    return tuple(HeldGroup(now[name], _address(states[name]), ends[name]) for name in sorted(now))


def master_name(state: BrokerGroupState) -> ServerName:
    """The name of a group's master."""
    return ServerName(
        group=state.name, replica=state.master.replica if state.master is not None else ""
    )


def _address(state: BrokerGroupState) -> str:
    if state.master is None:
        raise Unavailable(
            f"{state.name} has no master, so its newest entries are not known: a backup "
            "needs all groups"
        )
    return state.master.control_address


@asynccontextmanager
async def _stubs(
    states: Mapping[str, BrokerGroupState], network: Network
) -> AsyncIterator[dict[str, tuple[str, control_pb2_grpc.BrokerControlStub]]]:
    """Each group's master."""
    addresses = {name: _address(state) for name, state in states.items()}
    channels = {
        name: network.channel(address, always(master_name(states[name])))
        for name, address in addresses.items()
    }
    try:
        yield {
            name: (addresses[name], control_pb2_grpc.BrokerControlStub(channel))
            for name, channel in channels.items()
        }
    finally:
        await asyncio.gather(*[channel.close() for channel in channels.values()])


_Stubs = Mapping[str, tuple[str, Any]]


async def _all(stubs: _Stubs, call: Callable[[Any], Coroutine[Any, Any, Any]]) -> dict[str, Any]:
    """The answers of all groups. Raises the first failure after all have answered, so that no late
    request holds a group afterwards.
    """
    answers = await asyncio.gather(
        *[_answer_of(address, call(stub)) for address, stub in stubs.values()],
        return_exceptions=True,
    )
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return dict(zip(stubs, answers, strict=True))


async def _answer_of(address: str, answer: Coroutine[Any, Any, Any]) -> Any:
    try:
        return await answer
    except grpc.RpcError as cause:
        failure = typed_error(cause, address)
        raise (
            failure
            if isinstance(failure, Unavailable)
            else Unavailable(f"{address} refuses: {failure}")
        ) from cause


async def _release(stubs: _Stubs, token: str) -> list[QmqError]:
    """Release all held groups. Returns the failures."""
    request = pb.ReleaseWritesRequest(token=token)
    answers = await asyncio.gather(
        *[
            _answer_of(address, stub.ReleaseWrites(request, timeout=HOLD_CALL_S))
            for address, stub in stubs.values()
        ],
        return_exceptions=True,
    )
    return [each for each in answers if isinstance(each, QmqError)]


TRIES: Final = 3
PRUNE_POLL_S: Final = 1.0

Progress = Callable[[int, int], None]
"""Called with the bytes done and the bytes in all."""


def _untold(_done: int, _total: int) -> None:
    return


class BackupCreator:
    def __init__(
        self,
        store: CoordinationStore,
        network: Network,
        objects: BackupObjects,
        *,
        now_ms: Callable[[], int],
        progress: Progress = _untold,
    ) -> None:
        self._store = store
        self._network = network
        self._objects = objects
        self._marks = RunningMarks(objects.store)
        self._now_ms = now_ms
        self._progress = progress
        self._done = self._total = 0

    async def create(self) -> BackupManifest:
        """Raises CoordinationError, Unavailable, LogDamaged, StoreAway,
        BackupDamaged, BackupVersion.
        """
        for tries_left in reversed(range(TRIES)):
            try:
                return await self._marked()
            except Unavailable as failure:
                if not tries_left:
                    raise
                log.warning("the backup begins again: %s", failure)
        raise AssertionError("the last try returns or raises")

    async def _marked(self) -> BackupManifest:
        mark = await asyncio.to_thread(self._marks.put, Work.CREATE, self._now_ms())
        try:
            await self._until_nobody_prunes(mark)
            manifest = await self._create()
            if not await asyncio.to_thread(self._marks.is_there, mark):
                await asyncio.to_thread(self._objects.store.delete, manifest_name(manifest.id))
                raise Unavailable(
                    "the backup took over a day, and backups were pruned meanwhile: it may "
                    "lack objects, create it again"
                )
            return manifest
        finally:
            await asyncio.to_thread(self._marks.end, mark)

    async def _until_nobody_prunes(self, own: Mark) -> None:
        while any(
            each.work is Work.PRUNE and each.counts(self._now_ms())
            for each in await asyncio.to_thread(self._marks.others, own)
        ):
            log.info("backups are pruned here: waiting until that has ended")
            await asyncio.sleep(PRUNE_POLL_S)

    async def _create(self) -> BackupManifest:
        previous = await asyncio.to_thread(self._previous)
        schedules = await self._describe_schedules()
        moment = await find_moment(self._store, self._network)
        time_ms = self._now_ms()
        self._done, self._total = 0, sum(_log_bytes(each) for each in moment.groups)
        items = await asyncio.to_thread(
            self._objects.put_bytes, encode_items(kept(moment.listing.items))
        )
        groups = [
            await self._back_up(each, schedules.get(each.state.name), previous)
            for each in moment.groups
        ]
        manifest = BackupManifest(
            VERSION,
            new_id(time_ms),
            time_ms,
            moment.listing.revision,
            qmq.__version__,
            items,
            tuple(groups),
            self._objects.copied_bytes,
        )
        await asyncio.to_thread(self._objects.put_manifest, manifest)
        return manifest

    def _previous(self) -> BackupManifest | None:
        try:
            return self._objects.manifest()
        except BackupNotFound:
            return None
        except BackupDamaged as failure:
            log.warning(
                "this backup copies all data, because the previous backup cannot be read: %s",
                failure,
            )
            return None

    async def _describe_schedules(self) -> dict[str, delay_pb2.ScheduleDescription]:
        found: dict[str, delay_pb2.ScheduleDescription] = {}
        for name, state in group_states(await self._store.list(GROUPS)).items():
            if state.delay is None or state.master is None:
                continue
            address = state.master.control_address
            async with self._channel(state, address) as channel:
                described = await ScheduleReader(
                    address, delay_pb2_grpc.DelayControlStub(channel), self._objects, self._report
                ).describe()
            if described is not None:
                found[name] = described
        return found

    async def _back_up(
        self,
        held: HeldGroup,
        described: delay_pb2.ScheduleDescription | None,
        previous: BackupManifest | None,
    ) -> BackedUpGroup:
        state, address = held.state, held.control_address
        lineage = state.lineage
        before = None if previous is None else previous.group(state.name)
        known = ((), ()) if before is None or before.lineage != lineage else before.logs
        schedule: BackedUpSchedule | None = None
        if state.delay is not None and described is None and held.logs.message.bases[0]:
            raise Unavailable(
                f"{state.name} has written no checkpoint of its schedule yet: try again in a minute"
            )
        async with self._channel(state, address) as channel:
            if described is not None:
                reader = ScheduleReader(
                    address, delay_pb2_grpc.DelayControlStub(channel), self._objects, self._report
                )
                schedule = await reader.read(described)
            logs = GroupLogReader(
                address, control_pb2_grpc.BrokerControlStub(channel), self._objects, self._report
            )
            message = await logs.segments(0, held.logs.message, known[0])
            action = await logs.segments(1, held.logs.action, known[1])
        return BackedUpGroup(
            state.name, lineage, held.logs.index, held.logs.epoch, message, action, schedule
        )

    def _report(self, size: int) -> None:
        self._done += size
        self._progress(self._done, max(self._total, self._done))

    @asynccontextmanager
    async def _channel(
        self, state: BrokerGroupState, address: str
    ) -> AsyncIterator[grpc.aio.Channel]:
        channel: Any = self._network.channel(address, always(master_name(state)))
        try:
            yield channel
        finally:
            await channel.close()


def _log_bytes(held: HeldGroup) -> int:
    return sum(each.end - each.bases[0] for each in (held.logs.message, held.logs.action))
