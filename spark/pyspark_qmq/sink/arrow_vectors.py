"""Converts Arrow arrays to the vectors of a batch: marks and bytes. Pure.

An array may be a slice, have nulls, or 64-bit offsets. The resulting marks begin at 0, have 32
bits, and there are no nulls.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Marks = npt.NDArray[np.int32]


class StringVector(NamedTuple):
    """Byte strings: item i is `data[marks[i]:marks[i + 1]]`."""

    marks: Marks
    data: bytes | memoryview


class Lists(NamedTuple):
    """A list of items per row, concatenated.
    `marks` point into the `parts`, which have equal length.
    """

    marks: Marks
    parts: tuple[pa.Array, ...]


def strings(array: pa.Array) -> StringVector:
    """A vector of strings or binaries; a null becomes an empty string. The total must be below 2
    GiB, as for every chunk.
    """
    if not len(array):
        return StringVector(np.zeros(1, np.int32), b"")
    if array.null_count:
        is_text = pa.types.is_string(array.type) or pa.types.is_large_string(array.type)
        array = pc.fill_null(array, "" if is_text else b"")
    is_large = pa.types.is_large_string(array.type) or pa.types.is_large_binary(array.type)
    _, offsets, data = array.buffers()
    kind = np.dtype(np.int64 if is_large else np.int32)
    marks = np.frombuffer(offsets, kind, len(array) + 1, array.offset * kind.itemsize)
    first, last = int(marks[0]), int(marks[-1])
    found = marks if first == 0 and not is_large else (marks - first).astype(np.int32)
    return StringVector(found, memoryview(data)[first:last] if last > first else b"")


def lists(array: pa.Array) -> Lists:
    """Vectors of lists or maps; a null becomes an empty list."""
    if array.null_count:
        array = _compact(array)
    marks = array.offsets.to_numpy()
    first, last = int(marks[0]), int(marks[-1])
    children = (array.keys, array.items) if pa.types.is_map(array.type) else (array.values,)
    return Lists(
        (marks - first).astype(np.int32),
        tuple(child.slice(first, last - first) for child in children),
    )


def _compact(array: pa.Array) -> pa.Array:
    """Remove items of null rows, which Arrow may keep."""
    hidden = np.diff(array.offsets.to_numpy())[array.is_null().to_numpy(zero_copy_only=False)]
    return array.take(pa.array(np.arange(len(array)))) if hidden.any() else array


def lengths(array: pa.Array) -> npt.NDArray[np.int64]:
    """The number of bytes of each row's strings, including strings in lists or maps."""
    if (
        pa.types.is_map(array.type)
        or pa.types.is_list(array.type)
        or pa.types.is_large_list(array.type)
    ):
        found = lists(array)
        total = np.zeros(len(found.marks), np.int64)
        for part in found.parts:
            total += strings(part).marks[found.marks]
        return np.diff(total)
    return np.diff(strings(array).marks).astype(np.int64)


def milliseconds(array: pa.Array, *, up: bool) -> npt.NDArray[np.int64]:
    """Milliseconds of timestamps in microseconds, rounded down or up; a null becomes 0."""
    found: npt.NDArray[np.int64] = pc.fill_null(array.cast(pa.int64()), 0).to_numpy()
    return -(-found // 1000) if up else found // 1000


def valid(array: pa.Array) -> npt.NDArray[np.bool_]:
    """A mask of the rows that are not null."""
    found: npt.NDArray[np.bool_] = array.is_valid().to_numpy(zero_copy_only=False)
    return found


def taken(array: pa.Array, places: npt.NDArray[np.int64]) -> pa.Array:
    """The rows at ascending positions; adjacent rows are not copied."""
    first, last = int(places[0]), int(places[-1])
    if last - first + 1 == len(places):
        return array.slice(first, len(places))
    return array.take(pa.array(places))


def table_of(digits: str) -> npt.NDArray[np.uint8]:
    """The value of each byte as a digit; 255: not a digit."""
    found = np.full(256, 255, np.uint8)
    found[np.frombuffer(digits.encode(), np.uint8)] = np.arange(len(digits))
    return found


def unhex(found: StringVector) -> Any:
    """Rows of 32 hexadecimal digits as rows of 16 bytes; None if a character is not a digit."""
    if not (np.diff(found.marks) == 32).all():
        return None
    values = _HEX[np.frombuffer(found.data, np.uint8)].reshape(-1, 16, 2)
    if values.size and int(values.max()) == 255:
        return None
    return (values[:, :, 0] << 4 | values[:, :, 1]).astype(np.uint8)


_HEX = table_of("0123456789abcdef")
