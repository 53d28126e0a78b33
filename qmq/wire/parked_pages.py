"""Parked keys in portions that fit into one request or answer. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

from qmq_ordering.routes import LpRange

from qmq.limits import PARKED_PAGE_BYTES
from qmq.proto.v1 import control_pb2 as control


def first_page(keys: Iterable[control.ParkedKey], bytes_max: int) -> Iterator[control.ParkedKey]:
    """The first keys, as many as fit."""
    size = 0
    for key in keys:
        size += _size(key)
        if size > bytes_max:
            return
        yield key


def by_ranges(
    lps: LpRange, keys: Iterable[control.ParkedKey]
) -> Iterator[tuple[LpRange, list[control.ParkedKey]]]:
    """Ranges that together are `lps`, each with all of its keys: as many as fit, and at least those
    of one logical partition.

    A logical partition is in one range with all of its keys: a request that comes twice, or late,
    still says exactly what is parked there.
    """
    first, size = lps.first, 0
    held: list[control.ParkedKey] = []
    for lp, group in groupby(
        sorted(keys, key=lambda each: each.logical_partition), lambda each: each.logical_partition
    ):
        found = list(group)
        more = sum(map(_size, found))
        if held and size + more > PARKED_PAGE_BYTES:
            yield LpRange(first, lp), held
            first, size, held = lp, 0, []
        size, held = size + more, held + found
    yield LpRange(first, lps.end), held


def _size(key: control.ParkedKey) -> int:
    """The bytes of a key in a message: with its tag and its length."""
    return key.ByteSize() + 6
