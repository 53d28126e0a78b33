"""The snapshot that opens a segment: the state before it, cut by bytes into entries that every reader accepts.

    state      a MessagePack array: of a queue in the message log, of a group on a queue in the action log (docs/FORMAT.md)
    entry      a MessagePack array of states, `SNAPSHOT_BYTES` of them, or of one longer state
    pieces     a group's state that is too long for an entry, cut: [subject, partition, group, bytes, is_last], one for each entry

Each entry says how many items all entries of the snapshot have together. If a crash has left only some of them, the segment is not *opened
whole*: it can be read after older segments, but a log must not begin with it, because queues of the missing part would lose their numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import msgspec

from qmq.errors import CorruptBatch
from qmq.limits import BATCH_BYTES_MAX, KIB, MIB
from qmq.log.envelopes import PAYLOAD_AT, head_at
from qmq.log.segments import Segments
from qmq.wire.batch import ENVELOPE_BYTES, Kind

SNAPSHOT_BYTES: Final = MIB
"""The states in one entry: as much as one message between replicas carries."""
STATE_BYTES_MAX: Final = BATCH_BYTES_MAX - 64 * KIB
"""A longer state is cut into pieces. A server of release 0.2 cannot read pieces, and stops at them."""
_ARRAY_16: Final = 0xDC
_ARRAY_32: Final = 0xDD


def to_payloads(states: Iterable[Sequence[object]]) -> tuple[list[bytes], int]:
    """The payloads of a snapshot's entries, at least one, and the number of items in all of them."""
    payloads: list[bytes] = []
    items: list[msgspec.Raw] = []
    size = count = 0
    for state in states:
        for item in items_of(state):
            if items and size + len(item) > SNAPSHOT_BYTES:
                payloads.append(msgspec.msgpack.encode(items))
                items, size = [], 0
            items.append(msgspec.Raw(item))
            size += len(item)
            count += 1
    return [*payloads, msgspec.msgpack.encode(items)], count


def items_of(state: Sequence[object]) -> Iterator[bytes]:
    """A state as the items of a snapshot: one, or the pieces of a long one."""
    data = msgspec.msgpack.encode(state)
    if len(data) <= STATE_BYTES_MAX:
        yield data
        return
    for at in range(0, len(data), SNAPSHOT_BYTES):
        is_last = at + SNAPSHOT_BYTES >= len(data)
        yield msgspec.msgpack.encode([*state[:3], data[at : at + SNAPSHOT_BYTES], is_last])


class SnapshotReader:
    """Reads the entries of one snapshot, in their order."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def states(self, payload: bytes) -> Iterator[list[Any]]:
        """The states that end in an entry. Raises msgspec.DecodeError."""
        for item in msgspec.msgpack.decode(payload, strict=False):
            if not isinstance(item[3], bytes):
                yield item
                continue
            self._pieces.append(item[3])
            if item[4]:
                whole, self._pieces = b"".join(self._pieces), []
                yield msgspec.msgpack.decode(whole, strict=False)


def is_opened_whole(segments: Segments, base: int) -> bool:
    """True if the segment that begins at `base` has all of its opening snapshot. Raises ColdRead."""
    position, found, wanted = base, 0, -1
    try:
        while position < segments.segment_end(base):
            head = head_at(segments, position)
            if head is None or head.kind != Kind.SNAPSHOT:
                break
            found += _array_length(segments.read(position + ENVELOPE_BYTES + PAYLOAD_AT, 5))
            wanted = head.base_sequence
            position += head.total_bytes
    except CorruptBatch:
        return False
    return found >= wanted >= 0


def _array_length(head: bytes) -> int:
    """The length of the MessagePack array that begins so."""
    if head[0] in (_ARRAY_16, _ARRAY_32):
        return int.from_bytes(head[1 : 3 if head[0] == _ARRAY_16 else 5], "big")
    return head[0] & 0x0F
