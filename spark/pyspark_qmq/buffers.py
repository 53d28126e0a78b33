"""Arrow arrays from the buffers of batches. Pure.

A column of byte strings lies in a batch as Arrow lays it out: int32 marks, then bytes. Of one batch it is taken as it lies, without a
copy; of several, marks and bytes are put behind each other, which is far cheaper than what Spark pays for a record batch more.

Nothing of a batch is believed, although its checksums hold: brokers check offsets at intake, but who wrote a file is not known. Marks
that do not rise, or point outside, would let Arrow and the JVM read foreign memory, so they are CorruptBatch; one look at all lengths
as a vector finds them. Names that are no UTF-8 are mended (U+FFFD, as consumers see them), for Spark would pass them on unchecked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from qmq.errors import CorruptBatch

Ints = npt.NDArray[np.int32]
Bytes = bytes | memoryview

_HEX: Final = np.frombuffer("".join(f"{each:02x}" for each in range(256)).encode(), "<u2")
"""For each byte its two hexadecimal digits, as one number."""
_PLACES: Final = np.frombuffer("".join(f"{each:04x}" for each in range(65_536)).encode(), "S4")
"""For each place in a batch the last four digits of the message id."""
ID_DIGITS: Final = 32


class Strings(NamedTuple):
    """Byte strings of one batch: item i is `data[marks[i]:marks[i + 1]]`."""

    marks: Ints
    data: Bytes


class Joined(NamedTuple):
    """Byte strings of several batches, checked. `marks` begin at 0 and rise to the length of `data`."""

    marks: Ints
    data: Bytes

    def array(self, kind: pa.DataType, valid: npt.NDArray[np.bool_] | None = None) -> pa.Array:
        """As an Arrow array of strings or binaries; `valid` says which are not null (None: all)."""
        bits = None if valid is None else pa.py_buffer(np.packbits(valid, bitorder="little"))
        return pa.Array.from_buffers(kind, len(self.marks) - 1, [bits, pa.py_buffer(self.marks), pa.py_buffer(self.data)])


def marks_of(lengths: npt.NDArray[Any]) -> Ints:
    """Where items of these lengths begin, and the last one ends."""
    marks = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=marks[1:])
    return marks


def stacked(marks: Sequence[Ints]) -> Ints:
    """The marks of at least one batch as if all items lay behind each other, from 0. Raises CorruptBatch if marks fall."""
    if len(marks) == 1:
        only = marks[0]
        joined = only if only[0] == 0 and only.flags.aligned else only - only[0]
    else:
        joined = np.zeros(sum(map(len, marks)) - len(marks) + 1, np.int32)
        at = end = 0
        for each in marks:
            first, last, rows = int(each[0]), int(each[-1]), len(each) - 1
            np.add(each[1:], end - first, out=joined[at + 1 : at + 1 + rows])
            at += rows
            end += last - first
    if (joined[1:] < joined[:-1]).any():
        raise CorruptBatch("the offsets of a column do not rise, although the batch's checksum holds: the program that wrote it has a bug")
    return joined


def join(parts: Sequence[Strings]) -> Joined:
    """Put the items of at least one batch behind each other. Raises CorruptBatch if marks fall or point outside."""
    chunks = [data[_within(marks, len(data))] for marks, data in parts]
    return Joined(stacked([marks for marks, _ in parts]), chunks[0] if len(chunks) == 1 else b"".join(chunks))


def _within(marks: Ints, size: int) -> slice:
    """What of a column's bytes its marks span. Raises CorruptBatch if that is not within `size`."""
    first, last = int(marks[0]), int(marks[-1])
    if not 0 <= first <= last <= size:
        raise CorruptBatch("an offset points outside its column, although the batch's checksum holds: the program that wrote it has a bug")
    return slice(first, last)


def texts(joined: Joined) -> pa.Array:
    """As an Arrow array of strings. What is no UTF-8 gets U+FFFD in the place of its wrong bytes."""
    if bytes(joined.data).isascii():
        return joined.array(pa.string())
    found = joined.array(pa.binary())
    try:
        return found.cast(pa.string())
    except pa.ArrowInvalid:
        distinct = found.dictionary_encode()
        mended = [each.decode(errors="replace") for each in distinct.dictionary.to_pylist()]
        return pa.array(mended, pa.string()).take(distinct.indices)


def hex_texts(digits: npt.NDArray[np.uint8]) -> pa.Array:
    """Rows of as many ASCII digits each, as strings."""
    rows, width = digits.shape
    marks = np.arange(0, rows * width + 1, width, dtype=np.int32)
    return Joined(marks, digits.data.cast("B", (rows * width,))).array(pa.string())


def hex_of(raw: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Rows of bytes as rows of twice as many hexadecimal digits."""
    digits: npt.NDArray[np.uint8] = np.asarray(_HEX[raw]).view(np.uint8)
    return digits


def place_digits(places: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Four hexadecimal digits for each place in a batch."""
    digits: npt.NDArray[np.uint8] = _PLACES[places].view(np.uint8).reshape(-1, 4)
    return digits


def map_array(marks: Ints, names: pa.Array, values: pa.Array, kind: pa.DataType) -> pa.Array:
    """A map for each message, from marks into names and values."""
    entries = pa.StructArray.from_arrays([names, values], fields=[kind.key_field, kind.item_field])
    return pa.Array.from_buffers(kind, len(marks) - 1, [None, pa.py_buffer(marks)], children=[entries])


def list_array(marks: Ints, items: pa.Array, kind: pa.DataType) -> pa.Array:
    """A list for each message, from marks into items."""
    return pa.Array.from_buffers(kind, len(marks) - 1, [None, pa.py_buffer(marks)], children=[items])


def last_of_each(rows: npt.NDArray[Any], names: pa.Array) -> npt.NDArray[np.bool_] | None:
    """Of names that occur twice in one row, the last of each; None if no row has one twice. `rows` rise."""
    codes = pc.dictionary_encode(names)
    width = max(len(codes.dictionary), 1)
    marks = rows.astype(np.int64) * width + codes.indices.to_numpy()
    if (np.diff(marks) > 0).all():  # nearly always: headers come in one order
        return None
    _, newest = np.unique(marks[::-1], return_index=True)
    if len(newest) == len(marks):
        return None
    keeps = np.zeros(len(marks), np.bool_)
    keeps[len(marks) - 1 - newest] = True
    return keeps
