"""Sends records to a subject: each exactly once over any number of attempts, and in order per key.

    send for a second ─▶ wait until all of it is stored
    ─▶ note the mark and the ends of the queues ─▶ send ...

Rules:
* Every message is stored under its record's id, and another attempt uses the same id.
* Another attempt starts at the last note. It reads the target from the noted ends on, and skips
  records whose ids it finds there.
* Before it reads, every broker group confirms that all batches sent to it are decided
  (`Client.queue_ends`), so a batch of the dead process is stored before the read, or never.

A note is a line of JSON in the load's state file: what has been stored. The last whole line counts,
and each is flushed to disk before the load continues.

    {"version": 1, "load": {"subject": "orders", ...}, "base": "0123...", "mark": ..., "ends":
    [["g1", 0, 17]], "records": 4000,
     "is_done": false}

    load       source and target; the file is refused for another load
    base       the first half of the ids given to records without one
    mark       the source's position: all records before it are stored
    ends       the ends of the target's queues: records after the mark are stored only behind these
               positions
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

import qmq
from qmq.cli.transfer.message_source import TransferRecord
from qmq.client.producing.ordered.producer import OrderedProducer
from qmq.client.producing.producer import BATCH_BYTES, Producer, new_producer_id
from qmq.errors import DiskFull, InvalidArgument, UnknownSubject
from qmq.model import MessageId
from qmq.process.files import NO_SPACE
from qmq.text import parse_json
from qmq.wire.batch import CREATED_SPAN_MS, columns_of_copies

VERSION: Final = 1
Ends = Mapping[tuple[str, int], int]
"""(broker group, partition) -> sequence."""


@dataclass(frozen=True, slots=True)
class LoadState:
    """The progress of a load."""

    base: int
    mark: Any
    ends: Ends
    records: int
    is_done: bool = False

    def to_json(self) -> dict[str, Any]:
        """The state as a JSON value."""
        ends = [
            [group, partition, sequence]
            for (group, partition), sequence in sorted(self.ends.items())
        ]
        return {
            "base": f"{self.base:016x}",
            "mark": self.mark,
            "ends": ends,
            "records": self.records,
            "is_done": self.is_done,
        }

    @classmethod
    def of_json(cls, found: Mapping[str, Any]) -> LoadState:
        """The inverse of `to_json`. Raises ValueError, KeyError or TypeError."""
        ends = {
            (group, partition): sequence
            for group, partition, sequence in msgspec.convert(
                found["ends"], list[tuple[str, int, int]]
            )
        }
        if re.fullmatch(r"[0-9a-f]{1,16}", found["base"]) is None:
            raise ValueError(f"base {found['base'][:40]!r}")
        records, is_done = msgspec.convert((found["records"], found["is_done"]), tuple[int, bool])
        return cls(int(found["base"], 16), found["mark"], ends, records, is_done)


class LoadJournal:
    """The state file of one load; with None as its path, no state is kept. Locked by one process
    until `close`. Raises InvalidArgument.
    """

    def __init__(self, path: Path | None, load: Mapping[str, Any]) -> None:
        self.path, self._load, self._fd = path, dict(load), -1
        self.state: LoadState | None = None
        if path is None:
            return
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as cause:
            raise InvalidArgument(f"the state file {path} cannot be opened: {cause}") from None
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.state = self._read(path)
        except OSError:
            self.close()
            raise InvalidArgument(
                f"{path} is in use by another process: wait for it, or give another file "
                "with --state"
            ) from None
        except InvalidArgument:
            self.close()
            raise

    def _read(self, path: Path) -> LoadState | None:
        """The last whole line. A partial line after it, left by a crash, is cut off."""
        data = path.read_bytes()
        end = data.rfind(b"\n") + 1
        os.ftruncate(self._fd, end)
        os.lseek(self._fd, end, os.SEEK_SET)
        if not end:
            return None
        try:
            found = parse_json(data[:end].splitlines()[-1])
            if found["version"] != VERSION:
                raise ValueError(f"version {found['version']}")
            load, state = found["load"], LoadState.of_json(found)
        except (ValueError, KeyError, TypeError) as cause:
            raise InvalidArgument(
                f"{path} is not a state file ({cause}): remove it to start over, or give "
                "another file with --state"
            ) from None
        if load != self._load:
            raise InvalidArgument(
                f"{path} is the state file of another load ({json.dumps(load)}): remove it, "
                "or give another file with --state"
            )
        return state

    def save(self, state: LoadState) -> None:
        """Record the progress. It is on disk when this returns. Raises DiskFull, and the file is as
        it was then.
        """
        if self._fd >= 0:
            line = (
                json.dumps({"version": VERSION, "load": self._load, **state.to_json()}) + "\n"
            ).encode()
            end = os.lseek(self._fd, 0, os.SEEK_CUR)
            try:
                while line:
                    line = line[os.write(self._fd, line) :]
                os.fdatasync(self._fd)
            except OSError as cause:
                os.ftruncate(self._fd, end)  # the next line must not continue a part of this one
                os.lseek(self._fd, end, os.SEEK_SET)
                if cause.errno in NO_SPACE:
                    raise DiskFull(
                        f"no space left for the state file {self.path}: free some space, "
                        "then run the command again"
                    ) from None
                raise
        self.state = state

    def close(self) -> None:
        """Release the file's lock."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


BATCH_RECORDS: Final = 500
PACE_S: Final = 0.02
"""Records due within this time are sent together."""
NOTE_S: Final = 1.0
"""The interval between two notes; it bounds what another attempt must read again."""


class RecordSource(Protocol):
    """Yields the records that come after the mark given at construction."""

    def records(self) -> AsyncIterator[TransferRecord]:
        """Yields the records in order. Raises InvalidArgument for an invalid record."""
        ...

    def mark(self) -> Any:
        """The position after the last yielded record, as a JSON value."""
        ...


class RecordLoader:
    """Loads records. `rate`: records per second, 0 for no limit. `progress` is called with the
    number of finished records.
    """

    def __init__(
        self,
        mq: qmq.Client,
        subject: str,
        journal: LoadJournal,
        *,
        rate: float = 0.0,
        compression: str | None = None,
        progress: Callable[[int], None] = lambda _: None,
        note_s: float = NOTE_S,
    ) -> None:
        self._mq, self._subject, self._journal = mq, subject, journal
        self._rate, self._compression, self._progress, self._note_s = (
            rate,
            compression,
            progress,
            note_s,
        )
        self._batch: list[tuple[TransferRecord, bytes]] = []
        self._bytes = 0
        self._state = journal.state or LoadState(0, None, {}, 0)
        self.sent = 0
        """Records stored by this attempt."""
        self.found = 0
        """Records that an earlier attempt stored after its last note."""

    async def load(self, source: RecordSource) -> None:
        """Store all records of the source. Raises what `Client.send` and the source raise; another
        attempt then continues.
        """
        producer = await self._producer()
        try:
            stored = await self._stored_already()
            await self._load(source, producer, stored)
        except BaseException:
            producer.abort()
            raise
        await producer.close()

    async def _producer(self) -> Producer | OrderedProducer:
        found = await self._mq.metadata.find_subject(self._subject)
        if found is None:
            raise UnknownSubject(
                f"there is no subject {self._subject!r}: create it with `qmq subject create "
                f"{self._subject}`"
            )
        make = self._mq.ordered_producer if found.settings.order else self._mq.producer
        return make(self._subject, compression=self._compression)

    async def _stored_already(self) -> Counter[bytes]:
        """The ids that an earlier attempt stored after its last note.
        A new load first writes a note.
        """
        ends = await self._mq.queue_ends(self._subject)
        if self._journal.state is None:
            self._state = LoadState(new_producer_id(), None, ends, 0)
            self._journal.save(self._state)
            return Counter()
        behind = self._mq.browse(self._subject, positions=self._state.ends)
        return Counter([message.id.to_bytes() async for message in behind])

    async def _load(
        self, source: RecordSource, producer: Producer | OrderedProducer, stored: Counter[bytes]
    ) -> None:
        number, begin_s = self._state.records, time.monotonic()
        noted_s = begin_s
        async for record in source.records():
            number += 1
            name = self._id(record, number)
            if stored[name]:
                stored[name] -= 1
                self.found += 1
            else:
                self._put(record, name, number, producer)
                await self._pace(producer, begin_s)
            if time.monotonic() - noted_s >= self._note_s:
                await self._note(source, producer, number, is_done=False)
                noted_s = time.monotonic()
        await self._note(source, producer, number, is_done=True)

    def _id(self, record: TransferRecord, number: int) -> bytes:
        if record.id is not None:
            return record.id.to_bytes()
        return MessageId(self._state.base, number >> 16, number & 0xFFFF).to_bytes()

    def _put(
        self, record: TransferRecord, name: bytes, number: int, producer: Producer | OrderedProducer
    ) -> None:
        if isinstance(producer, OrderedProducer) and not record.key:
            raise InvalidArgument(
                f"record {number:,} has no key, and subject {self._subject!r} is ordered by key"
            )
        is_apart = (
            self._batch
            and abs(_created_ms(record) - _created_ms(self._batch[0][0])) >= CREATED_SPAN_MS // 2
        )
        if is_apart or self._bytes + record.size > BATCH_BYTES:
            self._send(producer)
        self._batch.append((record, name))
        self._bytes += record.size
        if len(self._batch) >= BATCH_RECORDS:
            self._send(producer)

    def _send(self, producer: Producer | OrderedProducer) -> None:
        if not self._batch:
            return
        records, names = zip(*self._batch, strict=True)
        columns, created_ms = columns_of_copies(
            [each.body for each in records],
            [each.key or b"" for each in records],
            [each.tags for each in records],
            [each.headers for each in records],
            [_created_ms(each) for each in records],
            list(names),
        )
        producer.put(columns, create_time_ms=created_ms)
        self.sent += len(records)
        self._batch, self._bytes = [], 0

    async def _pace(self, producer: Producer | OrderedProducer, begin_s: float) -> None:
        if producer.full:
            await producer.drain()
        if self._rate:
            early_s = begin_s + (self.sent + len(self._batch)) / self._rate - time.monotonic()
            if early_s > PACE_S:
                self._send(producer)
                await asyncio.sleep(early_s)

    async def _note(
        self,
        source: RecordSource,
        producer: Producer | OrderedProducer,
        number: int,
        *,
        is_done: bool,
    ) -> None:
        """Wait until everything sent is stored, then note the progress."""
        self._send(producer)
        await producer.flush()
        ends = await self._mq.queue_ends(self._subject)
        self._state = LoadState(self._state.base, source.mark(), ends, number, is_done)
        self._journal.save(self._state)
        self._progress(number)


def _created_ms(record: TransferRecord) -> int:
    return time.time_ns() // 1_000_000 if record.create_time_ms is None else record.create_time_ms
