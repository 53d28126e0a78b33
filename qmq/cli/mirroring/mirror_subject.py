"""Copies one subject to another cluster, round after round.

A round is a load (qmq/cli/transfer/loading.py): it continues where the last note says, and stores no message twice over any number of
attempts. Each copy names the clusters that the message came through, in the header `qmq-path`; a message that came through the target is
not copied there again, so mirrors may run both ways, and in rings.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import qmq
from qmq.cli.mirroring.mirror_notes import MirrorNote, MirrorRecord, Places, places_of, with_note
from qmq.cli.transfer.loading import LoadJournal, RecordLoader
from qmq.cli.transfer.message_source import MessageRange, MessageSource
from qmq.cli.transfer.transfer_record import TransferRecord, record_of
from qmq.errors import InvariantBroken
from qmq.limits import MIB
from qmq.log.disk import Disk

PATH: Final = "qmq-path"
"""The header with the names of the clusters that a message came through, comma-separated, the first one first."""
JOURNAL_BYTES_MAX: Final = MIB
JOURNAL: Final = ".journal"
RECORD: Final = ".record"


def path_of(record: TransferRecord) -> tuple[str, ...]:
    """The clusters that a message came through before this one."""
    text = record.headers.get(PATH, b"").decode(errors="replace")
    return tuple(text.split(",")) if text else ()


class MirrorSource:
    """The messages that are to be copied from cluster `here` to cluster `there`."""

    def __init__(self, mq: qmq.Client, subject: str, here: str, there: str, mark: Any) -> None:
        self._messages = MessageSource(mq, subject, MessageRange(), mark)
        self._here, self._there = here, there
        self.left_out = 0
        """Messages that came through the target."""

    async def records(self) -> AsyncIterator[TransferRecord]:
        async for message in self._messages.messages():
            record = record_of(message)
            path = path_of(record)
            if self._there in path:
                self.left_out += 1
                continue
            yield replace(record, headers={**record.headers, PATH: ",".join((*path, self._here)).encode()})

    def mark(self) -> list[list[Any]]:
        return self._messages.mark()


class MirrorSubject:
    """One subject. `folder` has the state files of the mirror; one process uses them at a time. Raises InvalidArgument."""

    def __init__(self, source: qmq.Client, target: qmq.Client, subject: str, here: str, there: str, folder: Path) -> None:
        self._source, self._target = source, target
        self.subject = subject
        self._here, self._there = here, there
        self._path = folder / f"{subject}{JOURNAL}"
        self._record_path = record_path(folder, subject)
        self._load = {"mirror": [here, there], "subject": subject}
        self._journal = LoadJournal(self._path, self._load)
        self.record = read_record(folder, subject)
        self._copied = self._left_out = 0
        self._running: tuple[RecordLoader, MirrorSource] | None = None

    @property
    def copied(self) -> int:
        """The number of copied messages, including those of a running round."""
        return self._copied + (self._running[0].sent if self._running else 0)

    @property
    def left_out(self) -> int:
        return self._left_out + (self._running[1].left_out if self._running else 0)

    async def round(self, ends: Places) -> None:
        """Copy the present messages. `ends` are the source's ends, read before this call. Raises what `RecordLoader.load` raises; another
        round then continues.
        """
        self._shorten()
        state = self._journal.state
        source = MirrorSource(self._source, self.subject, self._here, self._there, None if state is None else state.mark)
        loader = RecordLoader(self._target, self.subject, self._journal)
        self._running = loader, source
        try:
            await loader.load(source)
        finally:
            self._copied, self._left_out, self._running = self.copied, self.left_out, None
        state = self._journal.state
        if state is None:
            raise InvariantBroken("a load ended and noted nothing")
        mark = places_of(state.mark or [])
        note = MirrorNote(mark, dict(state.ends), time.time_ns() // 1_000_000)
        read_to = {queue: max(place, mark.get(queue, 0)) for queue, place in ends.items()}
        self.keep(replace(self.record, notes=with_note(self.record.notes, note), read_to=read_to))

    def keep(self, record: MirrorRecord) -> None:
        """Write the record atomically. Raises DiskFull."""
        Disk().replace(self._record_path, record.encode())
        self.record = record

    def _shorten(self) -> None:
        """Rewrite the journal's file with only its last line, when it has grown."""
        state = self._journal.state
        if state is None or self._path.stat().st_size < JOURNAL_BYTES_MAX:
            return
        shorter = self._path.with_name(self._path.name + ".new")
        shorter.unlink(missing_ok=True)
        fresh = LoadJournal(shorter, self._load)
        fresh.save(state)
        shorter.rename(self._path)
        self._journal.close()
        self._journal = fresh

    def close(self) -> None:
        self._journal.close()


def record_path(folder: Path, subject: str) -> Path:
    return folder / f"{subject}{RECORD}"


def read_record(folder: Path, subject: str) -> MirrorRecord:
    """The record of a mirror, which may be running."""
    try:
        return MirrorRecord.decode(record_path(folder, subject).read_bytes())
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return MirrorRecord()
