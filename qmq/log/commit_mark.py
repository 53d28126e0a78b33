"""The commit mark: a small file in a store's folder with the committed ends of both logs, for
programs that read the log's files.

    committed.qmm     magic "QMM1" | CRC-32C of the rest | version | index | epoch |
                      message_position | action_position | time_ms

The mark *may lag, never lead*: the entries that it names are committed, and committed entries never
move, on any replica. Rules that ensure this:

* Entries are written before they are committed. So `Marker` first remembers a place with its index,
  and writes it into the mark only when the commit index has reached this index in the same store,
  without a cut in between.
* The mark is overwritten by one write and not synced: after a lost write it only lags. A reader
  that finds a torn mark reads again (`read`).
* A power cut may keep the mark and lose the unflushed end of a log; other bytes will then lie where
  the mark points. So opening a store removes such a mark, durably, before anything is appended
  (`settle`); a store that starts over has none.

A replica that is opened again takes the mark's index for committed, because its checkpoint is
older: it must not cut these entries.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from struct import Struct
from typing import TYPE_CHECKING, Final, NamedTuple

from google_crc32c import value as crc32c

from qmq.errors import DiskFull
from qmq.log.disk import Disk

if TYPE_CHECKING:
    from qmq.log.store import Store

FILE: Final = "committed.qmm"
INTERVAL_MS: Final = 1_000
"""The shortest time between two writes of the mark."""
READ_TRIES: Final = 5

_MAGIC: Final = b"QMM1"
_VERSION: Final = 1
_HEAD: Final = Struct("<4sI")
_BODY: Final = Struct("<IIqqqqqq")
MARK_BYTES: Final = _HEAD.size + _BODY.size


class CommitMark(NamedTuple):
    """Every entry up to `index` (which was written in `epoch`) is committed; they end at these
    positions of the two logs.
    """

    index: int  # type: ignore[assignment]
    epoch: int
    message_position: int
    action_position: int
    time_ms: int


def encode(mark: CommitMark) -> bytes:
    body = _BODY.pack(
        _VERSION,
        0,
        mark.index,
        mark.epoch,
        mark.message_position,
        mark.action_position,
        mark.time_ms,
        0,
    )
    return _HEAD.pack(_MAGIC, crc32c(body)) + body


def decode(data: bytes) -> CommitMark | None:
    """Decode a mark; None if it is torn, damaged or of another version."""
    if len(data) != MARK_BYTES:
        return None
    magic, crc = _HEAD.unpack_from(data)
    body = data[_HEAD.size :]
    if magic != _MAGIC or crc32c(body) != crc:
        return None
    version, _, *fields = _BODY.unpack(body)
    return CommitMark._make(fields[:5]) if version == _VERSION else None


def read(folder: Path, pause: Callable[[], None] = lambda: None) -> CommitMark | None:
    """Read the folder's mark. None if there is none, or the mark stays torn. `pause` is called
    before each new try. Raises OSError.
    """
    for _ in range(READ_TRIES):
        try:
            found = decode((folder / FILE).read_bytes())
        except FileNotFoundError:
            return None
        if found is not None:
            return found
        pause()
    return None


def write(disk: Disk, folder: Path, mark: CommitMark) -> None:
    """Overwrite the mark. Raises DiskFull."""
    fd = disk.open_append(folder / FILE)
    try:
        disk.write(fd, [encode(mark)], 0)
    finally:
        disk.close(fd)


def settle(store: Store) -> bool:
    """Take over the commit index of the mark, or remove a mark that names missing entries. Call
    this after opening, before anything is appended. Returns True if the removed mark was valid:
    committed entries are lost then.
    """
    path = store.folder / FILE
    if not path.exists():
        return False
    found = decode(store.disk.read_file(path))
    if found is not None and _names_entries_of(store, found):
        store.committed_index = max(store.committed_index, found.index)
        return False
    path.unlink()
    store.disk.sync_folder(store.folder)
    return found is not None


def _names_entries_of(store: Store, mark: CommitMark) -> bool:
    is_within = (
        mark.index <= store.index
        and mark.message_position <= store.messages.end
        and mark.action_position <= store.actions.end
    )
    epochs = {mark.epoch, store.epoch_at(mark.index)} - {
        -1
    }  # -1: a history that does not go back so far
    return is_within and len(epochs) <= 1


def forget(folder: Path) -> None:
    """Remove the mark, because the folder's logs start over."""
    (folder / FILE).unlink(missing_ok=True)


def note(store: Store) -> CommitMark:
    """Make the mark to write once `store.committed_index` has reached its index."""
    messages, actions = store.applied_place()
    index = store.applied_index
    return CommitMark(
        index, store.epoch_at(index), messages, actions, max(store.clock.time_ms(), 0)
    )


class Marker:
    """Writes one store's mark while the broker works. A reopened store needs a new Marker. Call it
    between two turns.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self._noted: CommitMark | None = None
        self._cuts = self._cuts_now()
        self._reached: CommitMark | None = None
        self._written: CommitMark | None = None
        self._written_ms = 0

    def tick(self, now_ms: int) -> None:
        """Write the mark if it is due. `now_ms` is monotonic. On a full disk the mark lags."""
        self._update()
        if self._reached is None or not self._is_due(self._reached, now_ms):
            return
        with suppress(DiskFull):
            write(self.store.disk, self.store.folder, self._reached)
            self._written, self._written_ms = self._reached, now_ms

    def _is_due(self, reached: CommitMark, now_ms: int) -> bool:
        if self._written is None:
            return True
        return reached.index > self._written.index and now_ms - self._written_ms >= INTERVAL_MS

    def _update(self) -> None:
        if self._noted is None or self._cuts != self._cuts_now():
            self._noted, self._cuts = note(self.store), self._cuts_now()
        if self.store.committed_index >= self._noted.index:
            self._reached, self._noted = self._noted, None

    def _cuts_now(self) -> tuple[int, int]:
        return self.store.messages.cuts, self.store.actions.cuts
