"""All buckets of a schedule, and the bytes of them that are only in memory."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from qmq.delay.append_files import TAIL_BYTES_MAX, AppendFiles, Grown
from qmq.delay.bucket import ROW_BYTES, Bucket, name_of
from qmq.errors import DiskFull, MessageNotFound

log = logging.getLogger("qmq.delay")


class Buckets:
    """The buckets of a schedule. Their unwritten tails take at most `bytes_max`."""

    def __init__(self, files: AppendFiles, bucket_ms: int, bytes_max: int) -> None:
        self.files = files
        self.bucket_ms = bucket_ms
        self._bytes_max = bytes_max
        self._buckets: dict[int, Bucket] = {}
        self._is_sorted = True
        self._dirty: dict[int, int] = {}
        """Buckets with tails and their bytes; the one with the oldest tail comes first."""
        self._tail_bytes = 0

    # --- which there are -----------------------------------------------------------------------------------------------

    def __contains__(self, number: object) -> bool:
        return number in self._buckets

    def __iter__(self) -> Iterator[Bucket]:
        """The buckets in ascending order."""
        if not self._is_sorted:
            self._buckets = dict(sorted(self._buckets.items()))
            self._is_sorted = True
        return iter(self._buckets.values())

    def get(self, number: int) -> Bucket | None:
        """The bucket, if it is here."""
        return self._buckets.get(number)

    def require(self, number: int) -> Bucket:
        """The bucket. Raises MessageNotFound."""
        bucket = self._buckets.get(number)
        if bucket is None:
            raise MessageNotFound(f"there is no bucket {name_of(number, self.bucket_ms)}, or it was deleted")
        return bucket

    def _new(self, number: int) -> Bucket:
        bucket = self._buckets[number] = Bucket(self.files, number, name_of(number, self.bucket_ms))
        self._is_sorted = False
        return bucket

    def restore(self, rows: Iterable[tuple[int, int, int, int, int]]) -> None:
        """Load a state: (bucket, log_bytes, count, done_bytes, settled), ascending."""
        for number, log_bytes, count, done_bytes, settled in rows:
            bucket = self._new(number)
            bucket.count, bucket.settled = count, settled
            bucket.log.written, bucket.idx.written, bucket.done.written = log_bytes, count * ROW_BYTES, done_bytes

    def drop_before(self, before: int) -> list[str]:
        """Remove buckets, and return the names of their files."""
        names: list[str] = []
        for number in [each for each in self._buckets if each < before]:
            bucket = self._buckets.pop(number)
            self._tail_bytes -= self._dirty.pop(number, 0)
            for file in bucket.growing:
                self.files.forget(file.name)
                names.append(file.name)
        return names

    # --- storing, and what waits in memory -----------------------------------------------------------------------------

    def add(
        self, number: int, index: int, append_ms: int, region: bytes, crc: int, flags: int, due_times_ms: npt.NDArray[np.int64] | int
    ) -> int:
        """Store a batch that is all of one bucket; see `Bucket.add`."""
        bucket = self._buckets.get(number) or self._new(number)
        ordinal = bucket.add(index, append_ms, region, crc, flags, due_times_ms)
        self.grew(bucket)
        return ordinal

    def grew(self, bucket: Bucket) -> None:
        """A bucket's tails have grown: write them if they, or all together, are too large."""
        self._count(bucket)
        try:
            if bucket.tail_bytes > TAIL_BYTES_MAX:
                self._write(bucket)
            while self._tail_bytes > self._bytes_max:
                self._write(self._buckets[next(iter(self._dirty))])
        except DiskFull as cause:  # the entry is in the log already, and the log itself refuses more
            log.warning("writing the newest part of the schedule failed, it stays in memory: %s", cause)

    def _write(self, bucket: Bucket) -> None:
        try:
            for file in bucket.growing:
                self.files.write(file)
        finally:  # the disk may fill between two files
            self._count(bucket)

    def _count(self, bucket: Bucket) -> None:
        size = bucket.tail_bytes
        self._tail_bytes += size - self._dirty.get(bucket.number, 0)
        if size:
            self._dirty[bucket.number] = size
        else:
            self._dirty.pop(bucket.number, None)

    def tails(self) -> list[Grown]:
        """All tails."""
        return [
            Grown(file, file.written, bytes(file.tail)) for number in self._dirty for file in self._buckets[number].growing if file.tail
        ]

    def wrote(self, tails: Iterable[Grown]) -> None:
        """The bytes that are only in memory, of all buckets."""
        for tail in tails:
            tail.file.wrote(tail.at + len(tail.data))
        self._dirty = {number: size for number in self._dirty if (size := self._buckets[number].tail_bytes)}
        self._tail_bytes = sum(self._dirty.values())

    def check(self) -> None:
        """Raises AssertionError unless the counts agree with the buckets. For tests."""
        assert self._tail_bytes == sum(self._dirty.values())
        assert {each.number: each.tail_bytes for each in self if each.tail_bytes} == {
            key: size for key, size in self._dirty.items() if size
        }
        assert [each.number for each in self] == sorted(self._buckets)
