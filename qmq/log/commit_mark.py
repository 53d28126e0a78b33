"""The commit mark: a small file in a store's folder that says up to where both logs are committed, for those who read the log's files.

    committed.qmm     magic "QMM1" | CRC-32C of the rest | version | index | epoch | message_position | action_position | time_ms

It *may lag, never lead*: what it names was committed when it was written, and what is committed stays at its place, on every replica, for
ever. Rules that keep this true:

* Entries are written before they are committed. So a place is noted first, together with its index, and is named by the mark only when the
  commit index has reached it in the same store, with nothing cut meanwhile (`Marker`).
* It is written in place by one write, and not synced: losing it only makes it lag. Whoever meets it torn reads it again (`read`).
* A power cut may keep the mark and lose the end of a log that nobody flushed; then other bytes will lie where the mark points. So whoever
  opens a store takes such a mark back, durably, before anything is appended (`take_back`); a store that is begun anew has none.
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
"""Between two writes of the mark, at least."""
READ_TRIES: Final = 5

_MAGIC: Final = b"QMM1"
_VERSION: Final = 1
_HEAD: Final = Struct("<4sI")
_BODY: Final = Struct("<IIqqqqqq")
MARK_BYTES: Final = _HEAD.size + _BODY.size


class CommitMark(NamedTuple):
    """Every entry up to `index` (which was written in `epoch`) is committed; they end at these positions of the two logs."""

    index: int  # type: ignore[assignment]
    epoch: int
    message_position: int
    action_position: int
    time_ms: int


def encode(mark: CommitMark) -> bytes:
    body = _BODY.pack(_VERSION, 0, mark.index, mark.epoch, mark.message_position, mark.action_position, mark.time_ms, 0)
    return _HEAD.pack(_MAGIC, crc32c(body)) + body


def decode(data: bytes) -> CommitMark | None:
    """The inverse; None if it is torn, damaged or of another version."""
    if len(data) != MARK_BYTES:
        return None
    magic, crc = _HEAD.unpack_from(data)
    body = data[_HEAD.size :]
    if magic != _MAGIC or crc32c(body) != crc:
        return None
    version, _, *fields = _BODY.unpack(body)
    return CommitMark._make(fields[:5]) if version == _VERSION else None


def read(folder: Path, pause: Callable[[], None] = lambda: None) -> CommitMark | None:
    """The folder's mark; None if it has none, or it stays torn. `pause` is called before each new try. Raises OSError."""
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
    """In place. Raises DiskFull."""
    fd = disk.open_append(folder / FILE)
    try:
        disk.write(fd, [encode(mark)], 0)
    finally:
        disk.close(fd)


def take_back(store: Store) -> None:
    """The store was opened, and nothing is appended yet: a mark that names what is not there goes, and does not come back."""
    path = store.folder / FILE
    if not path.exists():
        return
    found = decode(store.disk.read_file(path))
    leads = found is None or (
        found.index > store.index or found.message_position > store.messages.end or found.action_position > store.actions.end
    )
    if leads:
        path.unlink()
        store.disk.sync_folder(store.folder)


def forget(folder: Path) -> None:
    """The folder's logs are about to begin anew."""
    (folder / FILE).unlink(missing_ok=True)


def note(store: Store) -> CommitMark:
    """What the mark may say once `store.committed_index` has reached its index."""
    messages, actions = store.applied_place()
    index = store.applied_index
    return CommitMark(index, store.epoch_at(index), messages, actions, max(store.clock.time_ms(), 0))


class Marker:
    """Writes one store's mark while the broker works; make another one when the store was opened anew. Called between two turns."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._noted: CommitMark | None = None
        self._cuts = self._cuts_now()
        self._reached: CommitMark | None = None
        self._written: CommitMark | None = None
        self._written_ms = 0

    def tick(self, now_ms: int) -> None:
        """Time has passed: `now_ms` is monotonic. A full disk makes the mark lag."""
        self._look()
        if self._reached is None or not self._is_due(self._reached, now_ms):
            return
        with suppress(DiskFull):
            write(self.store.disk, self.store.folder, self._reached)
            self._written, self._written_ms = self._reached, now_ms

    def _is_due(self, reached: CommitMark, now_ms: int) -> bool:
        if self._written is None:
            return True
        return reached.index > self._written.index and now_ms - self._written_ms >= INTERVAL_MS

    def _look(self) -> None:
        if self._noted is None or self._cuts != self._cuts_now():
            self._noted, self._cuts = note(self.store), self._cuts_now()
        if self.store.committed_index >= self._noted.index:
            self._reached, self._noted = self._noted, None

    def _cuts_now(self) -> tuple[int, int]:
        return self.store.messages.cuts, self.store.actions.cuts
