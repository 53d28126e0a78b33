"""Reads a piece from mapped segments: whole, checked batches, without those that cannot match.

The Bloom filter is tested before a batch is read. All other fields are used only after both
checksums were verified, so that a flipped bit never causes a batch to be skipped.

The location of a piece is all that a task needs to read it, without a checkpoint and without a
walk. It is small and picklable, and has one of two forms. For a moderate number of batches, it has
the position and the Bloom filter of tags of each batch, so that batches without the wanted tags are
not read. If the queue has most batches of a stretch of the log, it has only the stretch, and the
task skips the batches of other queues.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from qmq.columns.files.index import Entries, WalkedBatch, entry_at
from qmq.columns.files.segments import Mapped, SegmentFiles, map_part
from qmq.columns.model import QueuePiece, ReadSelection, SourceBatch
from qmq.errors import LogDamaged, MessagesExpired, NotConnected
from qmq.log.reading import has_lps, has_tags, may_have_tags
from qmq.log.segments import segment_name
from qmq.wire.batch import Kind
from qmq.wire.batch_columns import Column, Layout, RegionHeader, tag_hash

_POSITIONS_MAX: Final = 32_768
_FILL_MIN: Final = 0.5


@dataclass(frozen=True, slots=True)
class FileStretch:
    """A range of one segment."""

    base: int
    begin: int
    """The position of the first batch of the piece."""
    end: int
    """The end of the last batch."""
    count: int
    """The number of the queue's batches in the stretch."""
    positions: bytes = b""
    """The positions of the batches, i64 each; empty if the whole stretch must be read."""
    blooms: bytes = b""
    """The Bloom filters of their tags, u64 each."""

    def wanted(self, any_of: Sequence[int], all_of: Sequence[int]) -> NDArray[np.int64]:
        """The positions of batches that may have tags with these hashes."""
        may_have = may_have_tags(np.frombuffer(self.blooms, np.uint64), any_of, all_of)
        return np.frombuffer(self.positions, np.int64)[may_have]


@dataclass(frozen=True, slots=True)
class PieceLocation:
    """A piece's stretches in the segments of `folder`. Sequences before `start` had been deleted
    when the piece was planned.
    """

    folder: str
    start: int
    stretches: tuple[FileStretch, ...]


def place_of(files: SegmentFiles, start: int, entries: Entries) -> PieceLocation:
    """The location of these batches of a queue."""
    return PieceLocation(
        str(files.folder),
        start,
        tuple(_stretch(base, part) for base, part in _by_segment(files, entries)),
    )


def _by_segment(files: SegmentFiles, entries: Entries) -> Iterator[tuple[int, Entries]]:
    done, count = 0, len(entries)
    while done < count:
        base = files.base_of(int(entries["position"][done]))
        after = bisect_right(files.bases, base)
        until = (
            int(np.searchsorted(entries["position"], files.bases[after]))
            if after < len(files.bases)
            else count
        )
        yield base, entries[done:until]
        done = until


def _stretch(base: int, entries: Entries) -> FileStretch:
    begin = int(entries["position"][0])
    end = int(entries["position"][-1]) + int(entries["bytes"][-1])
    is_full = int(entries["bytes"].sum(dtype=np.int64)) >= _FILL_MIN * (end - begin)
    if len(entries) > _POSITIONS_MAX and is_full:
        return FileStretch(base, begin, end, len(entries))
    return FileStretch(
        base, begin, end, len(entries), entries["position"].tobytes(), entries["bloom"].tobytes()
    )


_KEY = int(Column.KEY)


class FilePieceReader:
    """Reads one piece."""

    def __init__(self, piece: QueuePiece, selection: ReadSelection, *, skips_lost: bool) -> None:
        assert isinstance(piece.place, PieceLocation), "the piece was planned by another log"
        self._piece = piece
        self._place: PieceLocation = piece.place
        self._selection = selection
        self._skips_lost = skips_lost
        self._subject = piece.queue.subject.encode()
        self._any = [tag_hash(tag) for tag in selection.tags_any]
        self._all = [tag_hash(tag) for tag in selection.tags_all]

    def batches(self) -> Iterator[SourceBatch]:
        piece, place = self._piece, self._place
        if piece.first < place.start and not self._skips_lost:
            raise self._expired(f"the oldest kept message is {place.start}")
        for stretch in place.stretches:
            mapped = self._map(stretch)
            if mapped is not None:
                yield from self._read(mapped, stretch)

    def _map(self, stretch: FileStretch) -> Mapped | None:
        """The segment of a stretch; None if it is gone and lost messages are allowed. Raises
        MessagesExpired, LogDamaged.
        """
        folder = Path(self._place.folder)
        path = folder / segment_name(stretch.base)
        try:
            return map_part(path, stretch.base, stretch.end)
        except FileNotFoundError:
            if not folder.is_dir():
                raise NotConnected(
                    f"{folder} does not exist here: driver and executors must see qmq.path "
                    "under the same names"
                ) from None
            left = SegmentFiles.list(folder).bases
        if not left or left[0] < stretch.base:
            raise LogDamaged(
                f"{path} is missing, although retention deletes only the oldest segments and "
                "never all: restore it from a copy"
            )
        if not self._skips_lost:
            raise self._expired(f"segment {path} is deleted")
        return None

    def _expired(self, what: str) -> MessagesExpired:
        piece = self._piece
        return MessagesExpired(
            f"{piece.queue}: messages {piece.first} to {piece.end - 1} are needed, but "
            f"retention has deleted some of them ({what}); "
            "failOnDataLoss=false continues with the remaining ones"
        )

    def _read(self, mapped: Mapped, stretch: FileStretch) -> Iterator[SourceBatch]:
        piece = self._piece
        look = self._look_up if stretch.positions else self._look_through
        for found, header in look(mapped, stretch):
            envelope = found.envelope
            region = mapped.region(found.position, envelope)
            is_inside = (
                envelope.base_sequence < piece.end
                and envelope.base_sequence + header.count > piece.first
            )
            if is_inside and self._may_match(region, header):
                yield SourceBatch(envelope, region)

    def _look_up(
        self, mapped: Mapped, stretch: FileStretch
    ) -> Iterator[tuple[WalkedBatch, RegionHeader]]:
        """Read the batches at known positions that may have the wanted tags. Raises LogDamaged."""
        for position in stretch.wanted(self._any, self._all).tolist():
            found = entry_at(mapped, position)
            header = self._header(found)
            if header is None:
                mapped.region(position, found.envelope)  # Damage is the more likely reason.
                raise self._other(mapped, position)
            yield found, header

    def _look_through(
        self, mapped: Mapped, stretch: FileStretch
    ) -> Iterator[tuple[WalkedBatch, RegionHeader]]:
        """Read all batches of a stretch and keep the queue's. Raises LogDamaged if their number
        differs from the plan's.
        """
        position, count = stretch.begin, 0
        while position < stretch.end:
            found = entry_at(mapped, position)
            header = self._header(found)
            if header is not None:
                count += 1
                yield found, header
            position = found.end
        if count != stretch.count:
            raise self._other(mapped, stretch.begin)

    def _header(self, found: WalkedBatch) -> RegionHeader | None:
        """The header of a batch of the queue."""
        header, queue = found.header, self._piece.queue
        is_ours = (
            header is not None
            and found.subject == self._subject
            and header.partition == queue.partition
        )
        return header if is_ours and found.envelope.kind == Kind.DATA else None

    def _other(self, mapped: Mapped, position: int) -> LogDamaged:
        return LogDamaged(
            f"{mapped.path}: from byte {position - mapped.base} on it no longer has the "
            f"batches of {self._piece.queue} that it had when the piece was planned: "
            "it is damaged, or the folder now has another log. Read again; "
            "if that does not help, restore the file from a copy"
        )

    # --- what cannot match ------------------------------------------------------------------------

    def _may_match(self, region: memoryview, header: RegionHeader) -> bool:
        selection = self._selection
        if header.is_directed and not selection.with_directed:
            return False
        if selection.has_keys and not header.columns & _KEY and b"" not in selection.keys:
            return False
        if not (self._piece.lps or self._any or self._all):
            return True
        layout = Layout.walk(region, header)
        return has_lps(region, header, layout, self._piece.lps) and has_tags(
            region, header, layout, self._any, self._all
        )
