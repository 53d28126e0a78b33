"""Selects the rows of a chunk exactly, with vector operations. Pure.

The log skips whole batches that cannot match. This module decides about the remaining rows:

* A tag is looked up by its hash and then compared as a string, because two tags may have the same hash.
* Keys compare as unsigned bytes. A message without a key matches no set of keys and no range.
* The logical partition is taken from the batch. Rows of a batch without that column do not match.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from qmq_ordering.route import LpRange

from pyspark_qmq.coalescing import Span
from pyspark_qmq.joined_batches import JoinedBatches
from pyspark_qmq.source_model import ReadSelection
from qmq.batch_columns import tag_hash

Mask = npt.NDArray[np.bool_]


def wanted(chunk: JoinedBatches, selection: ReadSelection, lps: Sequence[LpRange]) -> Mask | None:
    """A mask of the selected rows; None if all are selected. `lps` empty: any logical partition. Raises CorruptBatch."""
    masks: list[Mask] = []
    if selection.has_keys:
        masks.append(_by_key(chunk, selection))
    if lps:
        masks.append(_by_lp(chunk, lps))
    if selection.tags_any:
        masks.append(np.logical_or.reduce([_with_tag(chunk, tag) for tag in selection.tags_any]))
    masks += [_with_tag(chunk, tag) for tag in selection.tags_all]
    if not masks:
        return None
    mask: Mask = np.logical_and.reduce(masks)
    return None if mask.all() else mask


def narrowed(chunk: JoinedBatches, mask: Mask) -> tuple[list[Span], Mask]:
    """The spans cut to their first and last selected rows, and the mask of the rest. Spans without selected rows are dropped."""
    spans: list[Span] = []
    parts: list[Mask] = []
    for span, part in zip(chunk.spans, np.split(mask, np.cumsum(chunk.counts)[:-1]), strict=True):
        found = np.flatnonzero(part)
        if len(found):
            first, end = int(found[0]), int(found[-1]) + 1
            spans.append(span._replace(first=span.first + first, end=span.first + end))
            parts.append(part[first:end])
    return spans, np.concatenate(parts) if parts else mask[:0]


def _by_key(chunk: JoinedBatches, selection: ReadSelection) -> Mask:
    keys = chunk.keys.array(pa.binary())
    masks: list[Mask] = [np.diff(chunk.keys.marks) > 0]
    if selection.keys:
        masks.append(_mask(pc.is_in(keys, pa.array(selection.keys, pa.binary()))))
    if selection.key_from is not None:
        masks.append(_mask(pc.greater_equal(keys, pa.scalar(selection.key_from, pa.binary()))))
    if selection.key_until is not None:
        masks.append(_mask(pc.less(keys, pa.scalar(selection.key_until, pa.binary()))))
    found: Mask = np.logical_and.reduce(masks)
    return found


def _by_lp(chunk: JoinedBatches, lps: Sequence[LpRange]) -> Mask:
    found = chunk.lps()
    mask: Mask = np.logical_or.reduce([(found >= each.first) & (found < each.end) for each in lps])
    return mask


def _with_tag(chunk: JoinedBatches, tag: str) -> Mask:
    (marks, names), hashes = chunk.tags, chunk.tag_hashes
    mask = np.zeros(len(marks) - 1, np.bool_)
    near = np.flatnonzero(hashes == np.uint64(tag_hash(tag)))
    if len(near):
        is_it = pc.equal(names.array(pa.binary()).take(pa.array(near)), pa.scalar(tag.encode(), pa.binary()))
        mask[np.searchsorted(marks, near[_mask(is_it)], side="right") - 1] = True
    return mask


def _mask(found: pa.Array) -> Mask:
    mask: Mask = found.to_numpy(zero_copy_only=False)
    return mask
