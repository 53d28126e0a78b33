"""Sends records to a subject: each exactly once over any number of attempts, and in order per key.

    send for a second ─▶ wait until all of it is stored ─▶ note the mark and the ends of the queues ─▶ send ...

Rules:
* Every message is stored under its record's id, and another attempt uses the same id.
* Another attempt starts at the last note. It reads the target from the noted ends on, and skips records whose ids it finds there.
* Before it reads, every broker group confirms that all batches sent to it are decided (`Client.queue_ends`), so a batch of the dead process
  is stored before the read, or never.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any, Final, Protocol

import qmq
from qmq.cli.transfer.load_journal import LoadJournal, LoadState
from qmq.cli.transfer.transfer_record import TransferRecord
from qmq.client.ordered.ordered_producer import OrderedProducer
from qmq.client.producer import BATCH_BYTES, Producer, new_producer_id
from qmq.copies import CREATED_SPAN_MS, columns_of_copies
from qmq.errors import InvalidArgument, UnknownSubject
from qmq.model import MessageId

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
    """Loads records. `rate`: records per second, 0 for no limit. `progress` is called with the number of finished records."""

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
        self._rate, self._compression, self._progress, self._note_s = rate, compression, progress, note_s
        self._batch: list[tuple[TransferRecord, bytes]] = []
        self._bytes = 0
        self._state = journal.state or LoadState(0, None, {}, 0)
        self.sent = 0
        """Records stored by this attempt."""
        self.found = 0
        """Records that an earlier attempt stored after its last note."""

    async def load(self, source: RecordSource) -> None:
        """Store all records of the source. Raises what `Client.send` and the source raise; another attempt then continues."""
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
            raise UnknownSubject(f"there is no subject {self._subject!r}: create it with `qmq subject create {self._subject}`")
        make = self._mq.ordered_producer if found.settings.order else self._mq.producer
        return make(self._subject, compression=self._compression)

    async def _stored_already(self) -> Counter[bytes]:
        """The ids that an earlier attempt stored after its last note. A new load first writes a note."""
        ends = await self._mq.queue_ends(self._subject)
        if self._journal.state is None:
            self._state = LoadState(new_producer_id(), None, ends, 0)
            self._journal.save(self._state)
            return Counter()
        behind = self._mq.browse(self._subject, positions=self._state.ends)
        return Counter([message.id.to_bytes() async for message in behind])

    async def _load(self, source: RecordSource, producer: Producer | OrderedProducer, stored: Counter[bytes]) -> None:
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

    def _put(self, record: TransferRecord, name: bytes, number: int, producer: Producer | OrderedProducer) -> None:
        if isinstance(producer, OrderedProducer) and not record.key:
            raise InvalidArgument(f"record {number:,} has no key, and subject {self._subject!r} is ordered by key")
        is_apart = self._batch and abs(_created_ms(record) - _created_ms(self._batch[0][0])) >= CREATED_SPAN_MS // 2
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

    async def _note(self, source: RecordSource, producer: Producer | OrderedProducer, number: int, *, is_done: bool) -> None:
        """Wait until everything sent is stored, then note the progress."""
        self._send(producer)
        await producer.flush()
        ends = await self._mq.queue_ends(self._subject)
        self._state = LoadState(self._state.base, source.mark(), ends, number, is_done)
        self._journal.save(self._state)
        self._progress(number)


def _created_ms(record: TransferRecord) -> int:
    return time.time_ns() // 1_000_000 if record.create_time_ms is None else record.create_time_ms
