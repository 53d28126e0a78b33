"""Reads a piece from mapped segments: whole, checked batches, without those that cannot match.

The Bloom filter is tested before a batch is read. All other fields are used only after both checksums were verified, so that a flipped bit
never causes a batch to be skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pyspark_qmq.files.log_walk import WalkedBatch, entry_at
from pyspark_qmq.files.mapped_segments import Mapped, SegmentFiles, map_part
from pyspark_qmq.files.piece_location import FileStretch, PieceLocation
from pyspark_qmq.source_model import QueuePiece, ReadSelection, SourceBatch
from qmq.batch import Kind
from qmq.batch_columns import Column, Layout, RegionHeader, tag_hash
from qmq.errors import LogDamaged, MessagesExpired, NotConnected
from qmq.log.batch_filter import has_lps, has_tags
from qmq.log.segments import segment_name

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
        """The segment of a stretch; None if it is gone and lost messages are allowed. Raises MessagesExpired, LogDamaged."""
        folder = Path(self._place.folder)
        path = folder / segment_name(stretch.base)
        try:
            return map_part(path, stretch.base, stretch.end)
        except FileNotFoundError:
            if not folder.is_dir():
                raise NotConnected(f"{folder} does not exist here: driver and executors must see qmq.path under the same names") from None
            left = SegmentFiles.list(folder).bases
        if not left or left[0] < stretch.base:
            raise LogDamaged(
                f"{path} is missing, although retention deletes only the oldest segments and never all: restore it from a copy"
            )
        if not self._skips_lost:
            raise self._expired(f"segment {path} is deleted")
        return None

    def _expired(self, what: str) -> MessagesExpired:
        piece = self._piece
        return MessagesExpired(
            f"{piece.queue}: messages {piece.first} to {piece.end - 1} are needed, but retention has deleted some of them ({what}); "
            "failOnDataLoss=false continues with the remaining ones"
        )

    def _read(self, mapped: Mapped, stretch: FileStretch) -> Iterator[SourceBatch]:
        piece = self._piece
        look = self._look_up if stretch.positions else self._look_through
        for found, header in look(mapped, stretch):
            envelope = found.envelope
            region = mapped.region(found.position, envelope)
            is_inside = envelope.base_sequence < piece.end and envelope.base_sequence + header.count > piece.first
            if is_inside and self._may_match(region, header):
                yield SourceBatch(envelope, region)

    def _look_up(self, mapped: Mapped, stretch: FileStretch) -> Iterator[tuple[WalkedBatch, RegionHeader]]:
        """Read the batches at known positions that may have the wanted tags. Raises LogDamaged."""
        for position in stretch.wanted(self._any, self._all).tolist():
            found = entry_at(mapped, position)
            header = self._header(found)
            if header is None:
                mapped.region(position, found.envelope)  # Damage is the more likely reason.
                raise self._other(mapped, position)
            yield found, header

    def _look_through(self, mapped: Mapped, stretch: FileStretch) -> Iterator[tuple[WalkedBatch, RegionHeader]]:
        """Read all batches of a stretch and keep the queue's. Raises LogDamaged if their number differs from the plan's."""
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
        is_ours = header is not None and found.subject == self._subject and header.partition == queue.partition
        return header if is_ours and found.envelope.kind == Kind.DATA else None

    def _other(self, mapped: Mapped, position: int) -> LogDamaged:
        return LogDamaged(
            f"{mapped.path}: from byte {position - mapped.base} on it no longer has the batches of {self._piece.queue} that it had when "
            "the piece was planned: it is damaged, or the folder now has another log. Read again; if that does not help, restore "
            "the file from a copy"
        )

    # --- what cannot match ---------------------------------------------------------------------------------------------

    def _may_match(self, region: memoryview, header: RegionHeader) -> bool:
        selection = self._selection
        if header.is_directed and not selection.with_directed:
            return False
        if selection.has_keys and not header.columns & _KEY and b"" not in selection.keys:
            return False
        if not (self._piece.lps or self._any or self._all):
            return True
        layout = Layout.walk(region, header)
        return has_lps(region, header, layout, self._piece.lps) and has_tags(region, header, layout, self._any, self._all)
