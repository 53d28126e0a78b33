"""Arrow arrays from the buffers of batches. Pure.

A batch stores a column of byte strings in Arrow's layout: int32 offsets ("marks"), then bytes. A column of one batch is used without a
copy. Columns of several batches are concatenated, which costs far less than another record batch costs Spark.

A batch is validated even if its checksums are right: brokers check offsets at intake, but the writer of a file is unknown. Marks that
decrease or point outside the column would let Arrow and the JVM read foreign memory, so they raise CorruptBatch; one vector operation over
all lengths finds them. Invalid UTF-8 in names is replaced by U+FFFD, as consumers see it, because Spark does not check it.
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
"""The two hexadecimal digits of each byte value, as one number."""
_PLACES: Final = np.frombuffer("".join(f"{each:04x}" for each in range(65_536)).encode(), "S4")
"""The last four digits of the message id, for each position in a batch."""
ID_DIGITS: Final = 32


class Strings(NamedTuple):
    """Byte strings of one batch: item i is `data[marks[i]:marks[i + 1]]`."""

    marks: Ints
    data: Bytes


class Joined(NamedTuple):
    """Validated byte strings of several batches. `marks` begin at 0 and rise to the length of `data`."""

    marks: Ints
    data: Bytes

    def array(self, kind: pa.DataType, valid: npt.NDArray[np.bool_] | None = None) -> pa.Array:
        """An Arrow array of strings or binaries. `valid`: which items are not null (None: all)."""
        bits = None if valid is None else pa.py_buffer(np.packbits(valid, bitorder="little"))
        return pa.Array.from_buffers(kind, len(self.marks) - 1, [bits, pa.py_buffer(self.marks), pa.py_buffer(self.data)])


def marks_of(lengths: npt.NDArray[Any]) -> Ints:
    """The start of each item of the given lengths, and the end of the last one."""
    marks = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=marks[1:])
    return marks


def stacked(marks: Sequence[Ints]) -> Ints:
    """The marks of one or more batches, concatenated and starting at 0. Raises CorruptBatch if marks decrease."""
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
    """Concatenate the items of one or more batches. Raises CorruptBatch if marks decrease or point outside the column."""
    chunks = [data[_within(marks, len(data))] for marks, data in parts]
    return Joined(stacked([marks for marks, _ in parts]), chunks[0] if len(chunks) == 1 else b"".join(chunks))


def _within(marks: Ints, size: int) -> slice:
    """The range of bytes spanned by a column's marks. Raises CorruptBatch if it exceeds `size`."""
    first, last = int(marks[0]), int(marks[-1])
    if not 0 <= first <= last <= size:
        raise CorruptBatch("an offset points outside its column, although the batch's checksum holds: the program that wrote it has a bug")
    return slice(first, last)


def texts(joined: Joined) -> pa.Array:
    """An Arrow array of strings. Bytes that are not valid UTF-8 are replaced by U+FFFD."""
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
    """Rows of equally many ASCII digits, as strings."""
    rows, width = digits.shape
    marks = np.arange(0, rows * width + 1, width, dtype=np.int32)
    return Joined(marks, digits.data.cast("B", (rows * width,))).array(pa.string())


def hex_of(raw: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Rows of bytes as rows of twice as many hexadecimal digits."""
    digits: npt.NDArray[np.uint8] = np.asarray(_HEX[raw]).view(np.uint8)
    return digits


def place_digits(places: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Four hexadecimal digits for each position in a batch."""
    digits: npt.NDArray[np.uint8] = _PLACES[places].view(np.uint8).reshape(-1, 4)
    return digits


def map_array(marks: Ints, names: pa.Array, values: pa.Array, kind: pa.DataType) -> pa.Array:
    """An Arrow array with a map per message, from marks into names and values."""
    entries = pa.StructArray.from_arrays([names, values], fields=[kind.key_field, kind.item_field])
    return pa.Array.from_buffers(kind, len(marks) - 1, [None, pa.py_buffer(marks)], children=[entries])


def list_array(marks: Ints, items: pa.Array, kind: pa.DataType) -> pa.Array:
    """An Arrow array with a list per message, from marks into items."""
    return pa.Array.from_buffers(kind, len(marks) - 1, [None, pa.py_buffer(marks)], children=[items])


def last_of_each(rows: npt.NDArray[Any], names: pa.Array) -> npt.NDArray[np.bool_] | None:
    """A mask that keeps the last of equal names within a row; None if no row repeats a name. `rows` is ascending."""
    codes = pc.dictionary_encode(names)
    width = max(len(codes.dictionary), 1)
    marks = rows.astype(np.int64) * width + codes.indices.to_numpy()
    if (np.diff(marks) > 0).all():  # The common case, because messages usually have their headers in the same order.
        return None
    _, newest = np.unique(marks[::-1], return_index=True)
    if len(newest) == len(marks):
        return None
    keeps = np.zeros(len(marks), np.bool_)
    keeps[len(marks) - 1 - newest] = True
    return keeps
