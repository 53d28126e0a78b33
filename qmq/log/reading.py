"""Which stored batches have wanted messages, and how batches are read whose bytes are in an object
store. Pure.

A sealed segment may have no local file (docs/TIERING.md). The event loop never waits for the store.
A read of bytes that are not in the local cache raises `ColdRead`, and the bytes are fetched. The
caller repeats its whole operation when they have arrived; so the read must come before any change
of state.

Wanted batches are found without decoding messages: by brokers, for consumers and for readers of the
log, and by programs that read the log's files. By a bloom filter, a batch *may* contain a tag. By
its columns of hashes and of logical partitions, a batch *does* contain the tags or logical
partitions, in one message or spread over several.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from qmq.errors import LogDamaged, Overloaded, QmqError
from qmq.log.segment_index import SegmentIndex
from qmq.wire.batch_columns import Layout, RegionHeader, last_offset, tag_bloom

Ended = Callable[[QmqError | None], None]
"""Called at the end of a fetch with None, or with the reason of its failure."""


class ColdRead(Overloaded):
    """The bytes are being fetched from the object store. A caller that cannot wait passes this
    error on, and the request is repeated.
    """

    retry_after_ms = 100

    def __init__(self, message: str, wait: Callable[[object, Ended], None]) -> None:
        super().__init__(message)
        self._wait = wait

    def then(self, owner: object, ended: Ended) -> None:
        """Call `ended` in the event loop when the fetch has ended; once for each owner, with its
        last `ended`.
        """
        self._wait(owner, ended)


class ObjectDamaged(LogDamaged):
    """The object store has lost bytes of the log, or has other ones. The log's next bytes may be
    readable from position `end` on.

    `position` stays -1: another replica cannot repair an object.
    """

    def __init__(self, message: str, end: int) -> None:
        super().__init__(message)
        self.end = end


class StoredBytes:
    """Reads segments that are in the object store. This one belongs to a log without an object
    store.
    """

    def read(self, index: SegmentIndex, at: int, size: int) -> bytes:
        """Cached bytes of a segment. Raises ColdRead while they are being fetched, ObjectDamaged.
        Only in the event loop.
        """
        raise LogDamaged(
            f"the segment at {index.base} is only in the object store, byte {at} and {size} bytes "
            "from there: start with --object-store, and the URL that the group used"
        )

    def read_waiting(self, index: SegmentIndex, at: int, size: int) -> bytes:
        """Read bytes of a segment, and wait for the store. Raises Overloaded, ObjectDamaged."""
        return self.read(index, at, size)

    def damaged(self) -> list[tuple[int, str]]:
        """(base of the segment, name) of each object that is known to be damaged."""
        return []


def may_have_tags(
    blooms: npt.NDArray[np.uint64], any_of: Sequence[int], all_of: Sequence[int]
) -> npt.NDArray[np.bool_]:
    """For each bloom filter: True if its batch may have a message with any of some tags and all of
    others, by their hashes. Without tags, all are True.
    """
    needed = np.uint64(tag_bloom(all_of))
    found: npt.NDArray[np.bool_] = (blooms & needed) == needed
    if any_of:
        each = np.array([tag_bloom((tag,)) for tag in any_of], np.uint64)
        found &= ((blooms[:, np.newaxis] & each) == each).any(axis=1)
    return found


def has_tags(
    region: bytes | memoryview,
    header: RegionHeader,
    layout: Layout,
    any_of: Sequence[int],
    all_of: Sequence[int],
) -> bool:
    """True if the batch's column of hashes has any of some tags, and all of others. Without tags it
    is True.
    """
    if not any_of and not all_of:
        return True
    if layout.tag_list < 0:
        return False
    hashes = np.frombuffer(
        region, "<u8", last_offset(region, layout.tag_list, header.count), layout.tag_hash
    )
    if any_of and not np.isin(hashes, np.array(any_of, np.uint64)).any():
        return False
    return all(bool((hashes == np.uint64(each)).any()) for each in all_of)


def matching(
    region: bytes | memoryview,
    header: RegionHeader,
    layout: Layout,
    any_of: Sequence[int],
    all_of: Sequence[int],
) -> npt.NDArray[np.bool_]:
    """For each message of the batch: True if it has any of some tags, and all of others. Raises
    IndexError for a damaged column.
    """
    if not any_of and not all_of:
        return np.ones(header.count, np.bool_)
    if layout.tag_list < 0:
        return np.zeros(header.count, np.bool_)
    ends = np.frombuffer(region, "<u4", header.count + 1, layout.tag_list)
    hashes = np.frombuffer(
        region, "<u8", last_offset(region, layout.tag_list, header.count), layout.tag_hash
    )
    found = np.ones(header.count, np.bool_)
    for wanted in (*([any_of] if any_of else []), *[(each,) for each in all_of]):
        before = np.concatenate(([0], np.cumsum(np.isin(hashes, np.array(wanted, np.uint64)))))
        found &= before[ends[1:]] > before[ends[:-1]]
    return found


def has_lps(
    region: bytes | memoryview,
    header: RegionHeader,
    layout: Layout,
    ranges: Sequence[tuple[int, int]],
) -> bool:
    """True if a message is in one of these ranges of logical partitions (first, end). Without
    ranges or without the column it is True.
    """
    if not ranges or layout.logical_partition < 0:
        return True
    lps = logical_partitions(region, layout, header.count)
    return any(bool(((lps >= first) & (lps < end)).any()) for first, end in ranges)


def logical_partitions(
    region: bytes | memoryview, layout: Layout, count: int
) -> npt.NDArray[np.uint16]:
    """The column of logical partitions of a batch on an ordered subject."""
    return np.frombuffer(region, "<u2", count, layout.logical_partition)
