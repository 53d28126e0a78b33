"""Reading what a pull of a lane brought: ranges, and the whole batches in which they lie. Pure."""

from __future__ import annotations

from typing import NamedTuple

from qmq.batch import BatchView
from qmq.client.message import Decoded
from qmq.client.ordered.lane_core import Arrival
from qmq.errors import ProtocolViolation
from qmq.wire import messages as wire


class Place(NamedTuple):
    """Where a message is."""

    batch: Decoded
    index: int  # type: ignore[assignment]


class Brought(NamedTuple):
    """A delivery. `places` has the place of each arrival."""

    next_sequence: int
    is_end: bool
    arrivals: list[Arrival]
    places: list[Place]


def unpack(payload: memoryview | bytes, session: int) -> Brought:
    """What LANE_MESSAGES brought to a session. Raises ProtocolViolation, CorruptBatch."""
    delivery, at = wire.unpack_lane_delivery(payload)
    if delivery.session != session:
        raise ProtocolViolation(f"messages came for lane session {delivery.session}, where {session} had asked")
    batches: list[Decoded] = []
    for _ in range(delivery.batches):
        view = BatchView.parse(payload, at)
        at += view.envelope.total_bytes
        batches.append(Decoded(view))
    arrivals: list[Arrival] = []
    places: list[Place] = []
    for each in delivery.ranges:
        batch, offset = _find(each, batches)
        keys: list[bytes] | None = batch.column("keys")
        for index in range(offset, offset + each.count):
            arrivals.append(Arrival(batch.view.base_sequence + index, keys[index] if keys else b"", each.attempt))
            places.append(Place(batch, index))
    return Brought(delivery.next_sequence, delivery.is_end, arrivals, places)


def _find(each: wire.Range, batches: list[Decoded]) -> tuple[Decoded, int]:
    """The batch of a range, and where it begins there."""
    if each.batch >= len(batches):
        raise ProtocolViolation(f"{each} lies in no batch that came")
    batch = batches[each.batch]
    offset = each.first_sequence - batch.view.base_sequence
    if not 0 <= offset <= batch.view.count - each.count:
        raise ProtocolViolation(f"{each} lies outside its batch")
    return batch, offset


def unpack_keys(parked: list[str]) -> list[bytes]:
    """The parked keys of LANE_ATTACHED. Raises ProtocolViolation."""
    try:
        return [bytes.fromhex(each) for each in parked]
    except (ValueError, TypeError):
        raise ProtocolViolation("LANE_ATTACHED names parked keys that are no hexadecimal digits") from None
