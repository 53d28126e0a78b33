"""Parses the answer to a pull of a lane: ranges, and the whole batches that contain them. Pure.

For single messages there is a place for each; for bulk reading there are *runs*: all delivered messages of a batch, over any number of
ranges. A run ends where the attempt changes, and messages of parked keys are separate.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import chain, repeat
from typing import NamedTuple

from qmq.client.consuming.message import DecodedBatch, ReceivedBatches
from qmq.client.consuming.ordered.lane import Arrived, LaneArrival
from qmq.errors import ProtocolViolation
from qmq.wire import frame_payloads as wire


class LanePart(NamedTuple):
    """Messages of one batch."""

    batch: DecodedBatch
    indices: Sequence[int]


class Brought(NamedTuple):
    """A delivery. `arrivals` are as `LaneArrival`; `places` has the batch of each, and its index there. Both can be read once. Nothing is
    kept, because long-lived objects cost garbage collection.
    """

    next_sequence: int
    is_end: bool
    arrivals: Iterator[Arrived]
    places: Iterator[tuple[DecodedBatch, int]]


class BroughtRuns(NamedTuple):
    """The content of a delivery in runs. `parts` has the messages of each arrival."""

    next_sequence: int
    is_end: bool
    arrivals: list[LaneArrival]
    parts: list[LanePart]


def unpack(payload: memoryview | bytes, session: int, received: ReceivedBatches, server: str) -> Brought:
    """Parse LANE_MESSAGES of a session, which `server` sent. Raises ProtocolViolation, CorruptBatch."""
    delivery, batches = _open(payload, session, received, server)
    arrivals: list[Iterator[Arrived]] = []
    places: list[Iterator[tuple[DecodedBatch, int]]] = []
    for each in delivery.ranges:
        batch, offset = _find(each, batches)
        keys: list[bytes] | None = batch.column("keys")
        end, first = offset + each.count, each.first_sequence
        sequences = range(first, first + each.count)
        own = keys[offset:end] if keys else repeat(b"")
        arrivals.append(zip(sequences, own, repeat(each.attempt), repeat(0), repeat(1), repeat(batch.message_bytes)))
        places.append(zip(repeat(batch), range(offset, end)))
    return Brought(delivery.next_sequence, delivery.is_end, chain.from_iterable(arrivals), chain.from_iterable(places))


def unpack_runs(
    payload: memoryview | bytes, session: int, parked: Collection[bytes], received: ReceivedBatches, server: str
) -> BroughtRuns:
    """Parse LANE_MESSAGES in bulk; `parked` are the parked keys. Raises ProtocolViolation, CorruptBatch."""
    delivery, batches = _open(payload, session, received, server)
    arrivals: list[LaneArrival] = []
    parts: list[LanePart] = []
    for batch, indices, attempt in _gather(delivery.ranges, batches):
        for key, chosen in _without_parked(batch, indices, parked):
            base = batch.view.base_sequence
            size = batch.message_bytes * len(chosen)
            arrivals.append(LaneArrival(base + chosen[-1], key, attempt, chosen[-1] - chosen[0], len(chosen), size))
            parts.append(LanePart(batch, chosen))
    return BroughtRuns(delivery.next_sequence, delivery.is_end, arrivals, parts)


def _open(
    payload: memoryview | bytes, session: int, received: ReceivedBatches, server: str
) -> tuple[wire.LaneDelivery, list[DecodedBatch]]:
    delivery, at = wire.unpack_lane_delivery(payload)
    if delivery.session != session:
        raise ProtocolViolation(f"received messages for lane session {delivery.session} instead of {session}")
    return delivery, received.read(payload, at, delivery.batches, delivery.ranges, server)


def _find(each: wire.Range, batches: list[DecodedBatch]) -> tuple[DecodedBatch, int]:
    """The batch of a range, and the range's first place in it."""
    if each.batch >= len(batches):
        raise ProtocolViolation(f"{each} is in no batch of the answer")
    batch = batches[each.batch]
    offset = each.first_sequence - batch.view.base_sequence
    if not each.count or not 0 <= offset <= batch.view.count - each.count:
        raise ProtocolViolation(f"{each} is outside its batch")
    return batch, offset


def _gather(ranges: list[wire.Range], batches: list[DecodedBatch]) -> Iterator[tuple[DecodedBatch, Sequence[int], int]]:
    """(batch, places, attempt): adjacent ranges with the same batch and attempt together."""
    begun: DecodedBatch | None = None
    indices: list[int] | range = range(0)
    attempt = 0
    for each in ranges:
        batch, offset = _find(each, batches)
        more = range(offset, offset + each.count)
        if batch is begun and each.attempt == attempt:
            if more[0] <= indices[-1]:
                raise ProtocolViolation(f"{each} is not after the range before it")
            if isinstance(indices, range):
                indices = list(indices)
            indices += more
            continue
        if begun is not None:
            yield begun, indices, attempt
        begun, indices, attempt = batch, more, each.attempt
    if begun is not None:
        yield begun, indices, attempt


def _without_parked(batch: DecodedBatch, indices: Sequence[int], parked: Collection[bytes]) -> Iterator[tuple[bytes, Sequence[int]]]:
    """Runs of messages that may be handed out (without key), and the messages of parked keys, each with its key."""
    keys: list[bytes] = (batch.column("keys") if parked else None) or []
    begin = 0
    for at in [at for at, index in enumerate(indices) if keys[index] in parked] if keys else ():
        if begin < at:
            yield b"", indices[begin:at]
        yield keys[indices[at]], indices[at : at + 1]
        begin = at + 1
    if begin < len(indices):
        yield b"", indices[begin:]


def unpack_keys(parked: list[str]) -> list[bytes]:
    """Parse the parked keys of LANE_ATTACHED. Raises ProtocolViolation."""
    try:
        return [bytes.fromhex(each) for each in parked]
    except (ValueError, TypeError):
        raise ProtocolViolation("LANE_ATTACHED names parked keys that are no hexadecimal digits") from None
