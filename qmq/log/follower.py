"""The slave's part of the store: writes the master's entries, cuts a diverged tail, starts over.

A slave's files are identical to the master's, so this module only checks and makes no decisions:

* An entry is accepted if its checksums match, its index is the next one, and its position is the
  end of our log. A stretch with an invalid entry is refused as a whole.
* Accepted entries are written immediately, and change the derived state when they are committed
  (`Store.commit`).
* Cutting applied entries needs an older state: the store is reopened from its last checkpoint,
  which contains only committed entries.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from struct import Struct
from typing import Final

from google_crc32c import value as crc32c

from qmq.errors import CorruptBatch
from qmq.log import commit_mark
from qmq.log.recent_writes import ACTIONS, Place, Write, WriteRun
from qmq.log.segments import Segments, segment_name
from qmq.log.store import PendingEntry, Store
from qmq.process.files import FILE_MODE, make_private
from qmq.wire.batch import ENVELOPE_BYTES, Kind, entry_bytes, parse_envelope
from qmq.wire.batch_columns import check_region

_RUN: Final = Struct("<IIQQ")
_CRC: Final = Struct("<I")
_RUN_HEAD_BYTES: Final = _RUN.size + _CRC.size
_KINDS: Final = (
    (Kind.DATA, Kind.SNAPSHOT, Kind.BARRIER, Kind.COMMAND),
    (Kind.ACTIONS, Kind.SNAPSHOT),
)
"""The kinds of entries of each log."""


class Diverged(Exception):
    """The master's entries do not begin where our log ends, although the core accepted them: an
    invariant is broken.
    """


# --- runs as bytes --------------------------------------------------------------------------------


def pack_runs(runs: Iterable[WriteRun]) -> list[bytes]:
    """Encode runs: a header with its own checksum, and the bytes, one run after another."""
    found: list[bytes] = []
    for run in runs:
        head = _RUN.pack(run.log, run.size, run.base, run.position)
        found += (head, _CRC.pack(crc32c(head)), *run.buffers)
    return found


def unpack_runs(data: memoryview | bytes) -> list[WriteRun]:
    """Decode what `pack_runs` made. `data` may be reused afterwards: the bytes are copied, once.
    Raises CorruptBatch.
    """
    runs: list[WriteRun] = []
    at = 0
    while at < len(data):
        if at + _RUN_HEAD_BYTES > len(data):
            raise CorruptBatch("the head of a run is incomplete")
        log, size, base, position = _RUN.unpack_from(data, at)
        if _CRC.unpack_from(data, at + _RUN.size)[0] != crc32c(bytes(data[at : at + _RUN.size])):
            raise CorruptBatch("the checksum of a run's head is wrong")
        at += _RUN_HEAD_BYTES
        if log > ACTIONS or not size or at + size > len(data) or position < base:
            raise CorruptBatch(f"log {log} cannot have a run of {size} bytes at {position}")
        runs.append(WriteRun(log, base, position, size, split_entries(data[at : at + size])))
        at += size
    return runs


def split_entries(data: memoryview | bytes) -> tuple[bytes, ...]:
    """Cut a run's bytes into each entry's envelope and region. The slave checks, writes and
    remembers these same objects.

    Only the sizes are checked here. Raises CorruptBatch.
    """
    found: list[bytes] = []
    at, size = 0, len(data)
    while at < size:
        region_at, end = at + ENVELOPE_BYTES, at + entry_bytes(data, at)
        if end > size or end < region_at:
            raise CorruptBatch("a run ends within an entry")
        found += (bytes(data[at:region_at]), bytes(data[region_at:end]))
        at = end
    return tuple(found)


def entries_of(run: WriteRun) -> list[PendingEntry]:
    """The entries of a run whose buffers `split_entries` made, every checksum checked.
    Raises CorruptBatch.
    """
    found: list[PendingEntry] = []
    position = run.position
    for head, region in zip(run.buffers[::2], run.buffers[1::2], strict=True):
        envelope = parse_envelope(head)
        if envelope.kind not in _KINDS[run.log]:
            raise CorruptBatch(f"an entry of kind {envelope.kind} does not belong in log {run.log}")
        check_region(region, envelope.region_crc)
        found.append(PendingEntry(run.log, position, envelope, region))
        position += envelope.total_bytes
    return found


# --- taking ---------------------------------------------------------------------------------------


def check_stretch(runs: list[WriteRun], after: int, last: int) -> list[list[PendingEntry]]:
    """Return the entries of each run. Together they must be the entries behind `after` up to
    `last`. Raises CorruptBatch.

    At the beginning of a log that started over, indexes may be missing, because retention deleted
    them from the other log.
    """
    found = [entries_of(run) for run in runs]
    index, epoch = after, 0
    for entry in chain.from_iterable(found):
        if entry.envelope.index <= index or entry.envelope.epoch < epoch:
            raise CorruptBatch(
                f"{(entry.envelope.epoch, entry.envelope.index)} follows {(epoch, index)}"
            )
        index, epoch = entry.envelope.index, entry.envelope.epoch
    if index != last:
        raise CorruptBatch(f"a stretch up to index {last} ends at {index}")
    return found


def take(store: Store, runs: list[WriteRun], found: list[list[PendingEntry]]) -> None:
    """Write the checked runs. Raises Diverged if nothing was written, DiskFull if a part was
    written: a second call writes the rest.
    """
    for segments in store.logs:
        segments.drop_empty()
    rest = [
        (run, entries)
        for run, entries in zip(runs, found, strict=True)
        if entries[-1].envelope.index > store.index
    ]
    _require_places(store.logs, [run for run, _ in rest])
    for run, entries in rest:
        segments = store.logs[run.log]
        if run.base > segments.bases[-1]:
            segments.roll()
        segments.append(run.buffers, run.size)
        _note(store, run, entries)


def _require_places(logs: tuple[Segments, Segments], runs: list[WriteRun]) -> None:
    """Raise Diverged unless each run begins where its log ends,
    in the open segment or in a new one.
    """
    ends = [segments.end for segments in logs]
    bases = [segments.bases[-1] for segments in logs]
    for run in runs:
        name = logs[run.log].folder.name
        if run.position != ends[run.log]:
            raise Diverged(
                f"{name} ends at {ends[run.log]}, the master's entry lies at {run.position}"
            )
        if run.base not in (bases[run.log], run.position):
            raise Diverged(
                f"{name}: our segment begins at {bases[run.log]}, the master's at {run.base}"
            )
        ends[run.log], bases[run.log] = run.position + run.size, run.base


def _note(store: Store, run: WriteRun, entries: list[PendingEntry]) -> None:
    first = store.index + 1
    for entry in entries:
        store.note_epoch(entry.envelope.epoch, entry.envelope.index)
        store.pending.append(entry)
    store.unflushed.wrote(first, store.clock.monotonic_ms())
    store.index = entries[-1].envelope.index
    store.epoch = entries[-1].envelope.epoch
    store.last_time_ms = max(store.last_time_ms, entries[-1].envelope.append_time_ms)
    if store.index - first + 1 == len(entries):
        store.tail.add(Write(first, store.index, run))
    else:
        # entries between them are in the other log already: slaves that have neither read both from
        # the files
        store.tail.clear()


# --- cutting and starting over --------------------------------------------------------------------


def truncate(store: Store, index: int) -> bool:
    """Cut everything after `index`. Returns False and does nothing if the cut would
    remove applied entries.
    """
    if index < store.applied_index:
        return False
    place = [store.messages.end, store.actions.end]
    while store.pending and store.pending[-1].envelope.index > index:
        entry = store.pending.pop()
        place[entry.log] = entry.position
    for segments, position in zip(store.logs, place, strict=True):
        if position < segments.end:
            segments.truncate(position)
    _forget_behind(store, index)
    return True


def _forget_behind(store: Store, index: int) -> None:
    store.index = index
    store.flushed_index, store.flush_wanted = (
        min(store.flushed_index, index),
        min(store.flush_wanted, index),
    )
    store.unflushed.clear()
    store.epochs = [each for each in store.epochs if each[1] <= index]
    store.epoch = store.epochs[-1][0] if store.epochs else store.epoch
    store.tail.clear()


def start_over(folder: Path, place: Place) -> None:
    """Replace a closed store's folder by empty logs that begin at `place`; the commit mark is
    removed first.
    """
    commit_mark.forget(folder)
    for name in ("checkpoint", "consume", "message", "action"):
        shutil.rmtree(folder / name, ignore_errors=True)
    for name, position in zip(("message", "action"), place, strict=True):
        make_private(folder / name)
        (folder / name / segment_name(position)).touch(FILE_MODE)
