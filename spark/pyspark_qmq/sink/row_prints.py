"""Fingerprints of rows, to compare the rows of an attempt with those that an earlier attempt stored. Pure.

A row with its own message id is known by the id; other rows by key and body. Create times, tags and headers are not compared: a plan may
compute them again.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from itertools import pairwise, repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from pyspark_qmq.sink import arrow_vectors
from pyspark_qmq.sink.options import Fields
from pyspark_qmq.sink.packets import Load
from pyspark_qmq.sink.row_identity import Ids
from qmq.wire.batch import BatchView

Prints = npt.NDArray[np.uint64]
"""8 bytes per row; 0: not known, so not compared."""


def unknown(rows: int) -> Prints:
    return np.zeros(rows, np.uint64)


def of_ids(ids: Ids) -> Prints:
    """Of rows with their own ids."""
    halves = np.ascontiguousarray(ids).view("<u8").reshape(-1, 2)
    found: Prints = (halves[:, 0] ^ (halves[:, 1] * np.uint64(0x9E3779B97F4A7C15))) | np.uint64(1)
    return found


def of_load(load: Load, fields: Fields) -> Prints:
    """Of an attempt's rows."""
    if load.ids is not None:
        return of_ids(load.ids)
    keys = repeat(b"") if fields.key < 0 else _items(load, fields.key)
    return _of_rows(keys, _items(load, fields.body), len(load.rows))


def of_batch(view: BatchView) -> Prints:
    """Of the rows of a stored batch without their own ids. Raises CorruptBatch."""
    return _of_rows(view.keys() or repeat(b""), view.bodies(), view.count)


def _items(load: Load, column: int) -> Iterable[Any]:
    assert load.places is not None
    marks, data = arrow_vectors.strings(arrow_vectors.taken(load.chunk.batch.column(column), load.places))
    return (data[a:b] for a, b in pairwise(marks.tolist()))


def _of_rows(keys: Iterable[Any], bodies: Iterable[Any], rows: int) -> Prints:
    """Only rows that an earlier attempt stored are compared, so this loop over rows runs after a crash."""
    found = bytearray()
    for key, body in zip(keys, bodies, strict=False):
        digest = blake2b(b"%d " % len(key), digest_size=8)
        digest.update(key)
        digest.update(body)
        found += digest.digest()
    prints: Prints = np.frombuffer(bytes(found), "<u8", rows) | np.uint64(1)
    return prints
