"""Finds stored batches with wanted messages, without decoding the messages. Pure.

Brokers use these functions for consumers and for readers of the log, and so do programs that read the log's files. By a bloom filter, a
batch *may* contain a tag. By its columns of hashes and of logical partitions, a batch *does* contain the tags or logical partitions, in one
message or spread over several.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from qmq.batch_columns import Layout, RegionHeader, last_offset, tag_bloom


def may_have_tags(blooms: npt.NDArray[np.uint64], any_of: Sequence[int], all_of: Sequence[int]) -> npt.NDArray[np.bool_]:
    """For each bloom filter: True if its batch may have a message with any of some tags and all of others, by their hashes. Without tags,
    all are True.
    """
    needed = np.uint64(tag_bloom(all_of))
    found: npt.NDArray[np.bool_] = (blooms & needed) == needed
    if any_of:
        each = np.array([tag_bloom((tag,)) for tag in any_of], np.uint64)
        found &= ((blooms[:, np.newaxis] & each) == each).any(axis=1)
    return found


def has_tags(region: bytes | memoryview, header: RegionHeader, layout: Layout, any_of: Sequence[int], all_of: Sequence[int]) -> bool:
    """True if the batch's column of hashes has any of some tags, and all of others. Without tags it is True."""
    if not any_of and not all_of:
        return True
    if layout.tag_list < 0:
        return False
    hashes = np.frombuffer(region, "<u8", last_offset(region, layout.tag_list, header.count), layout.tag_hash)
    if any_of and not np.isin(hashes, np.array(any_of, np.uint64)).any():
        return False
    return all(bool((hashes == np.uint64(each)).any()) for each in all_of)


def matching(
    region: bytes | memoryview, header: RegionHeader, layout: Layout, any_of: Sequence[int], all_of: Sequence[int]
) -> npt.NDArray[np.bool_]:
    """For each message of the batch: True if it has any of some tags, and all of others. Raises IndexError for a damaged column."""
    if not any_of and not all_of:
        return np.ones(header.count, np.bool_)
    if layout.tag_list < 0:
        return np.zeros(header.count, np.bool_)
    ends = np.frombuffer(region, "<u4", header.count + 1, layout.tag_list)
    hashes = np.frombuffer(region, "<u8", last_offset(region, layout.tag_list, header.count), layout.tag_hash)
    found = np.ones(header.count, np.bool_)
    for wanted in (*([any_of] if any_of else []), *[(each,) for each in all_of]):
        before = np.concatenate(([0], np.cumsum(np.isin(hashes, np.array(wanted, np.uint64)))))
        found &= before[ends[1:]] > before[ends[:-1]]
    return found


def has_lps(region: bytes | memoryview, header: RegionHeader, layout: Layout, ranges: Sequence[tuple[int, int]]) -> bool:
    """True if a message is in one of these ranges of logical partitions (first, end). Without ranges or without the column it is True."""
    if not ranges or layout.logical_partition < 0:
        return True
    lps = logical_partitions(region, layout, header.count)
    return any(bool(((lps >= first) & (lps < end)).any()) for first, end in ranges)


def logical_partitions(region: bytes | memoryview, layout: Layout, count: int) -> npt.NDArray[np.uint16]:
    """The column of logical partitions of a batch on an ordered subject."""
    return np.frombuffer(region, "<u2", count, layout.logical_partition)
