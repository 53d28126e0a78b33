"""Reads a group's logs and schedule from a replica's control port, and puts them into the backup.

The backup reads logs over the network and not folders, so that it can run anywhere, from any replica, while the cluster works: committed
bytes never change, and all replicas have the same bytes at the same positions. This module also checks what other readers of `ReadLog`
trust: every entry's checksums, and that indexes rise.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any, Final

import grpc
import msgspec

from qmq.backup.backup_manifest import BackedUpFile, BackedUpSchedule, BackedUpSegment, ChunkedBytes
from qmq.backup.backup_objects import BackupObjects
from qmq.delay.schedule import Schedule
from qmq.errors import CorruptBatch, LogDamaged, NotConnected, Overloaded, Unavailable
from qmq.limits import MIB
from qmq.log.envelopes import walk_rising
from qmq.proto.v1 import control_pb2 as pb
from qmq.proto.v1 import delay_pb2
from qmq.rpc import typed_error
from qmq.schedule_description import describe_schedule

PIECE_BYTES: Final = MIB
CALL_S: Final = 30.0
COLD_TRIES: Final = 600
"""Attempts to read a segment that the broker first fetches from its object store: a minute or two."""

Told = Callable[[int], None]
"""Called with the number of bytes that were read or skipped."""


def check_entries(data: bytes, position: int, after: int) -> int:
    """Check whole entries of a log; they must have rising indexes above `after`. Returns the last index. Raises CorruptBatch."""

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

    def __init__(self, address: str, stub: Any, objects: BackupObjects, told: Told) -> None:
        self._address = address
        self._stub = stub
        self._objects = objects
        self._told = told

    async def segments(self, log: int, held: pb.HeldLog, earlier: Iterable[BackedUpSegment]) -> tuple[BackedUpSegment, ...]:
        """A log's segments up to the held end. A segment in an earlier backup is not read again. Raises LogDamaged, Unavailable,
        StoreAway.
        """
        known = {each.base: each for each in earlier if each.is_sealed}
        bases = [base for base in held.bases if base < held.end]
        found: list[BackedUpSegment] = []
        for base, end in pairwise([*bases, held.end]):
            is_sealed = end != held.end
            same = known.get(base)
            if is_sealed and same is not None and same.end == end:
                found.append(same)
                self._told(end - base)
                continue
            content = await self._read(log, base, end)
            if content is None:  # retention deleted it meanwhile, and all before it
                found.clear()
            else:
                found.append(BackedUpSegment(base, content, is_sealed))
        return tuple(found)

    async def _read(self, log: int, base: int, end: int) -> ChunkedBytes | None:
        """A segment's entries from its beginning to `end`; None if retention has deleted the segment."""
        chunker, position, index = Chunker(self._objects), base, 0
        while position < end:
            data = await self._piece(log, position)
            if data is None:
                return None
            data = data[: end - position]
            try:
                index = check_entries(data, position, index)
            except CorruptBatch as cause:
                raise LogDamaged(f"{self._address} gave a damaged entry at {position}: {cause.message}") from cause
            if not data:
                raise Unavailable(f"{self._address} has no entry at {position}, and its log ends at {end}")
            await chunker.add(data)
            position += len(data)
            self._told(len(data))
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
                await asyncio.sleep((failure.retry_after_ms or 50) / 1000)  # the broker fetches the segment from its object store
            else:
                return answer.entries
        raise AssertionError("the last try returns or raises")


class ScheduleReader:
    """Reads a delay group's schedule from the control port of a replica."""

    def __init__(self, address: str, stub: Any, objects: BackupObjects, told: Told) -> None:
        self._address = address
        self._stub = stub
        self._objects = objects
        self._told = told

    async def describe(self) -> delay_pb2.ScheduleDescription | None:
        """The newest checkpoint's state; None without a checkpoint. Call this before the moment, so that the logs reach beyond the
        checkpoint.
        """
        try:
            return await describe_schedule(self._stub, timeout_s=CALL_S)
        except grpc.RpcError as cause:
            failure = typed_error(cause, self._address)
            if isinstance(failure, NotConnected):
                return None
            raise failure from cause

    async def read(self, description: delay_pb2.ScheduleDescription) -> BackedUpSchedule:
        """Read the schedule's files. Raises Unavailable if a file was deleted meanwhile: then call `describe` again."""
        state = description.state
        files = [BackedUpFile(name, await self._file(name, size)) for name, size in Schedule.files(msgspec.msgpack.decode(state))]
        stored = await asyncio.to_thread(self._objects.put_bytes, state)
        return BackedUpSchedule(description.index, stored, tuple(files))

    async def _file(self, name: str, size: int) -> ChunkedBytes:
        chunker, at = Chunker(self._objects), 0
        while at < size:
            request = delay_pb2.ReadScheduleRequest(file=name, offset=at, bytes_max=min(PIECE_BYTES, size - at))
            try:
                data: bytes = (await self._stub.ReadSchedule(request, timeout=CALL_S)).data
            except grpc.RpcError as cause:
                raise Unavailable(f"the schedule's file {name} is gone: {typed_error(cause, self._address)}") from cause
            if not data:
                raise Unavailable(f"the schedule's file {name} ends at {at:,}, and had {size:,} bytes")
            await chunker.add(data)
            at += len(data)
            self._told(len(data))
        return await chunker.end()
