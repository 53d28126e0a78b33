"""Copies of stored messages: from a delay group or an outbox to a subject, into a dead-letter queue, and out of one. Pure.

A copy keeps its message's id, key, tags and create time. The create times of one batch lie within `CREATED_SPAN_MS`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from qmq.batch_columns import Columns

CREATED_SPAN_MS: Final = 1 << 32
"""The largest span of create times in a batch, which stores 32 bits of each, relative to the first."""


def columns_of_copies(
    bodies: list[bytes],
    keys: list[bytes],
    tags: list[tuple[str, ...]],
    headers: Sequence[Mapping[str, bytes]],
    created_ms: Sequence[int],
    message_ids: list[bytes],
) -> tuple[Columns, int]:
    """Build the columns of a batch, and its first create time in milliseconds since 1970. Columns without any value are left out."""
    first = min(created_ms)
    columns = Columns(
        bodies,
        keys=keys if any(keys) else None,
        tags=tags if any(tags) else None,
        headers=list(headers) if any(headers) else None,
        create_deltas=[each - first for each in created_ms] if max(created_ms) != first else None,
        message_ids=message_ids,
    )
    return columns, first


def size_of_copy(body: bytes, key: bytes, tags: Sequence[str], headers: Mapping[str, bytes]) -> int:
    """An upper bound for the bytes of one uncompressed message."""
    size = len(body) + len(key) + sum([16 + len(tag) for tag in tags])
    return size + sum([16 + len(name) + len(value) for name, value in headers.items()])
