"""The questions of a subject's core, and their answers. Values only.

The fingerprints of rows compare the rows of an attempt with those that an earlier attempt stored.

A row with its own message id is known by the id; other rows by key and body. Create times, tags and
headers are not compared: a plan may compute them again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import pairwise, repeat
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from pyspark_qmq.sink import arrow_vectors
from pyspark_qmq.sink.options import Fields
from pyspark_qmq.sink.packets import Load
from pyspark_qmq.sink.row_identity import Ids, Rows, RowTarget
from qmq.columns.model import Routes
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
    marks, data = arrow_vectors.strings(
        arrow_vectors.taken(load.chunk.batch.column(column), load.places)
    )
    return (data[a:b] for a, b in pairwise(marks.tolist()))


def _of_rows(keys: Iterable[Any], bodies: Iterable[Any], rows: int) -> Prints:
    """Only rows that an earlier attempt stored are compared,
    so this loop over rows runs after a crash.
    """
    found = bytearray()
    for key, body in zip(keys, bodies, strict=False):
        digest = blake2b(b"%d " % len(key), digest_size=8)
        digest.update(key)
        digest.update(body)
        found += digest.digest()
    prints: Prints = np.frombuffer(bytes(found), "<u8", rows) | np.uint64(1)
    return prints


@dataclass(frozen=True, slots=True)
class Locate:
    """Asks for the queues that may get the subject's rows or may have some.
    Answered by `located`.
    """

    subject: str
    is_delayed: bool = False


@dataclass(frozen=True, slots=True)
class Look:
    """Asks which rows of this epoch are in the queue. Answered by `looked`."""

    target: RowTarget
    is_final: bool = False
    """Whether the partition must be sealed, so that no row can be added after the answer."""
    from_number: int = 0
    """Batches with lower numbers are known."""


@dataclass(frozen=True, slots=True)
class Glance:
    """Asks what the newest row of the writer in the queue tells: `has_any` and `has_later`. No core
    asks this.
    """

    target: RowTarget


Ask: TypeAlias = Locate | Look


@dataclass(frozen=True, slots=True)
class LookedUp:
    """The rows of this writer and epoch in a queue."""

    number: int = 0
    """For partitions: the next number."""
    runs: Mapping[int, Prints] = field(default_factory=dict)
    """For other queues: first row of each batch → the fingerprint of each of its rows."""
    rows: Rows = field(default_factory=lambda: np.empty(0, np.int64))
    """For partitions: the rows, ascending."""
    prints: Prints = field(default_factory=lambda: unknown(0))
    """For partitions: the fingerprints of `rows`."""
    ids: frozenset[bytes] = frozenset()
    """For rows with their own ids: the ids."""
    has_later: bool = False
    """Whether the queue has rows of later epochs of this writer. For partitions and rows with their
    own ids it is never known.
    """
    has_any: bool = False
    """For a `Glance`: whether the queue has rows of any epoch of this writer."""


Where: TypeAlias = Mapping[str, bool] | Routes
"""For an unordered subject or delayed rows: the broker groups that may have rows, and whether each
accepts new ones. For an ordered subject: its routes."""
