"""Directed messages: each is for one consumer group, and all other groups skip it. This module marks and recognises them. Pure.

Rules:
* A batch is directed as a whole (`BatchFlag.DIRECTED`), to the group that the header `qmq-group` names, the same in all its messages.
* The broker need not read each batch: the consume log's entry of a directed batch has all bits of its tag bloom filter set, `LOOK_INSIDE`,
  and only then is the batch read. An undirected batch whose tags set all bits is read as well, at no other cost.
* Messages of ordered subjects are never directed: a key's order holds for all groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from struct import unpack_from
from typing import Final

from qmq.batch import BatchView, Envelope
from qmq.batch_columns import BatchFlag, Layout, RegionHeader, bytes_column, parse_header
from qmq.errors import InvalidArgument, InvalidName, OrderMismatch
from qmq.headers import ATTEMPT, GROUP
from qmq.model import check_group
from qmq.text_numbers import whole_number

LOOK_INSIDE: Final = 0xFFFF_FFFF_FFFF_FFFF
"""The value of the bloom filter of a directed batch."""
_ORDERED = int(BatchFlag.ORDERED)
_ATTEMPTS_MAX: Final = 999_999_999
_NOWHERE: Final = Envelope(0, 0, 0, -1, 0, 0, 0, 0)


def group_of(region: bytes) -> bytes | None:
    """The group that a stored batch is for, from its first message; None if it is for all."""
    header = parse_header(region)
    if not header.is_directed:
        return None
    layout = Layout.walk(region, header)
    if layout.header_list < 0:
        return b""
    count: int = unpack_from("<i", region, layout.header_list + 4)[0]
    names = bytes_column(region, layout.header_name, layout.header_name_data, count)
    values = bytes_column(region, layout.header_value, layout.header_value_data, count)
    return dict(zip(names, values, strict=True)).get(GROUP.encode(), b"")


def check(region: bytes, header: RegionHeader, *, to_partition: bool) -> None:
    """Check a directed batch before it is stored. Its columns have been checked.

    Raises:
        OrderMismatch: the subject is ordered.
        InvalidArgument: a message does not name its group, or the messages name different groups.
    """
    if to_partition or header.flags & _ORDERED:
        raise OrderMismatch(
            "a directed message is for one group, but all groups of an ordered subject see the same messages: send it undirected"
        )
    found = BatchView(_NOWHERE, region).headers() or [{}]
    groups = {each.get(GROUP) for each in found}
    group = groups.pop()
    if group is None or groups:
        raise InvalidArgument(f"all messages of a directed batch must name the same group in the header {GROUP}")
    try:
        check_group(group.decode())
    except (UnicodeDecodeError, InvalidName):
        raise InvalidArgument(f"the header {GROUP} of a directed message is a group's name, not {group[:200]!r}") from None


def failures(headers: Mapping[str, bytes]) -> int:
    """The number of failed deliveries of a directed message before it was sent again, from its headers."""
    return whole_number(headers.get(ATTEMPT, b""), _ATTEMPTS_MAX) or 0
