"""The record of a step: which messages are settled and what is sent, decided together by one entry
of the log (docs/adr/0025). Pure.

A step is a batch of the queue `%steps` with one message. The batch's producer id and number are the
step's number, its tags are the targets, and its body is the record, a MessagePack array:

    version      1
    settlements  SETTLE and LANE_DONE actions (qmq/log/actions.py); all are acknowledgements
    effects      [subject, is_ordered, first, count, region]: the batch for a target, as its
                 producer made it; its messages have the numbers from `first` on among the target's
                 effects

Targets of a step differ. `decode_record` refuses everything else. A record in the log that cannot
be read changes nothing, on any replica.
"""

from __future__ import annotations

from typing import Final

import msgspec

from qmq import limits
from qmq.errors import CorruptBatch, InvalidArgument
from qmq.log.actions import Cause, LaneDone, SettleAction
from qmq.log.segment_index import UNREADABLE
from qmq.model import STEPS
from qmq.wire.batch import BatchView, Envelope, encode
from qmq.wire.batch_columns import BatchFlag, Columns, parse_header
from qmq.wire.frame_payloads import Verdict

VERSION: Final = 1
_NUMBER_MAX: Final = (1 << 63) - 1
_UNPLACED: Final = Envelope(0, 0, 0, -1, 0, 0, 0, 0)

Settlement = SettleAction | LaneDone


class Effect(msgspec.Struct, array_like=True, frozen=True):
    """The messages for one target: numbers `first` to `end` - 1 among its effects."""

    subject: str
    is_ordered: bool
    first: int
    count: int
    region: bytes

    @property
    def end(self) -> int:
        return self.first + self.count


class StepRecord(msgspec.Struct, array_like=True, frozen=True):
    """What a step does."""

    version: int
    settlements: tuple[Settlement, ...]
    effects: tuple[Effect, ...]


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(StepRecord)


def decode_record(body: bytes) -> StepRecord:
    """Decode the body of a step's message. Raises CorruptBatch."""
    try:
        record = _DECODER.decode(body)
    except UNREADABLE as cause:
        raise CorruptBatch(f"the record of a step cannot be read: {cause}") from cause
    if record.version != VERSION:
        raise CorruptBatch(f"the record of a step has version {record.version}, not {VERSION}")
    try:
        check_step(record)
    except InvalidArgument as cause:
        raise CorruptBatch(f"the record of a step is none: {cause.message}") from cause
    return record


def check_step(record: StepRecord) -> None:
    """Check the limits, and that the parts agree. Raises InvalidArgument, CorruptBatch."""
    ranges = 0
    for each in record.settlements:
        spans = _acknowledged(each)
        ranges += len(spans)
        if not spans or not all(0 <= first <= last <= _NUMBER_MAX for first, last in spans):
            raise InvalidArgument(f"a step cannot settle {spans[:3]}")
    if not 0 < ranges <= limits.SETTLE_RANGES_MAX:
        raise InvalidArgument(
            f"a step settles 1 to {limits.SETTLE_RANGES_MAX} ranges of messages, not {ranges}"
        )
    check_effects(record.effects)


def check_effects(effects: tuple[Effect, ...]) -> None:
    """As `check_step`, of the effects alone."""
    targets = {each.subject for each in effects}
    if len(effects) > limits.STEP_TARGETS_MAX or len(targets) < len(effects):
        raise InvalidArgument(
            f"a step sends to {limits.STEP_TARGETS_MAX} subjects at most, one batch each; this "
            f"one has {len(effects)} batches for {len(targets)} subjects"
        )
    count = sum([each.count for each in effects])
    if count > limits.STEP_MESSAGES_MAX:
        raise InvalidArgument(
            f"a step sends {limits.STEP_MESSAGES_MAX} messages at most, not {count}"
        )
    size = sum([len(each.region) for each in effects])
    if size > limits.STEP_BYTES_MAX:
        raise InvalidArgument(f"a step sends {limits.STEP_BYTES_MAX} bytes at most, not {size}")
    for each in effects:
        _check_effect(each)


def _acknowledged(settlement: Settlement) -> list[tuple[int, int]]:
    if isinstance(settlement, LaneDone):
        return list(settlement.ranges)
    if settlement.errors or settlement.cause != Cause.VERDICT:
        raise InvalidArgument("a step only acknowledges messages")
    for _, _, verdict, delay_ms in settlement.settlements:
        if verdict != Verdict.ACK or delay_ms:
            raise InvalidArgument("a step only acknowledges messages")
    return [(first, last) for first, last, _, _ in settlement.settlements]


def _check_effect(effect: Effect) -> None:
    header = parse_header(effect.region)
    view = BatchView(_UNPLACED, effect.region)
    if header.count != effect.count or view.subject != effect.subject:
        raise InvalidArgument(
            f"an effect has {effect.count} messages for {effect.subject!r}, and its batch "
            f"{header.count} for {view.subject!r}"
        )
    if not 0 <= effect.first <= _NUMBER_MAX - effect.count:
        raise InvalidArgument(f"an effect cannot have number {effect.first}")
    if view.layout.due >= 0:
        raise InvalidArgument("a delayed message cannot be sent in a step yet")


# --- the batch ------------------------------------------------------------------------------------


def step_batch(
    effects: tuple[Effect, ...],
    settlements: tuple[Settlement, ...],
    producer_id: int,
    number: int,
    time_ms: int,
    *,
    is_again: bool,
) -> tuple[bytes, bytes]:
    """(envelope, region) of a step's batch; with `is_again` if it may be stored already. Raises
    InvalidArgument, CorruptBatch, MessageTooLarge.
    """
    record = StepRecord(VERSION, settlements, effects)
    check_step(record)
    columns = Columns(
        [_ENCODER.encode(record)],
        tags=[tuple([each.subject for each in effects])] if effects else None,
    )
    return encode(
        STEPS.encode(),
        columns,
        producer_id=producer_id,
        batch_sequence=number,
        create_time_ms=time_ms,
        flags=int(BatchFlag.AGAIN) if is_again else 0,
    )


def record_of(region: bytes) -> StepRecord:
    """The record in the region of a batch of `%steps`. Raises CorruptBatch."""
    bodies = BatchView(_UNPLACED, region).bodies()
    if len(bodies) != 1:
        raise CorruptBatch(f"a step is a batch of one message, not of {len(bodies)}")
    return decode_record(bodies[0])
