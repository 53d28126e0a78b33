"""The record of a step: what is stored is read, and nothing else is stored."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from support.steps import effect

from qmq import limits
from qmq.errors import CorruptBatch, InvalidArgument
from qmq.log.actions import LaneDone, SettleAction
from qmq.log.step_record import Effect, decode_record, record_of, step_batch
from qmq.wire.batch import encode
from qmq.wire.batch_columns import Columns
from qmq.wire.frame_payloads import Verdict

ACK = SettleAction("s", 0, "g", "c", 7, ((0, 3, int(Verdict.ACK), 0),))
LANE = LaneDone("o", 1, "g", "c", 5, ((2, 2), (9, 9)))


def body(*fields: Any) -> bytes:
    return msgspec.msgpack.encode(fields)


def test_a_step_is_a_batch_of_one_message_with_its_targets_as_tags() -> None:
    effects = (effect("a", [b"1", b"2"]), effect("b", [b"3"], is_ordered=True, first=8))
    _, region = step_batch(effects, (ACK, LANE), 3, 4, 5, is_again=False)
    record = record_of(region)
    assert (record.settlements, record.effects) == ((ACK, LANE), effects)
    assert [each.end for each in record.effects] == [2, 9]


def test_a_step_may_send_nothing() -> None:
    _, region = step_batch((), (ACK,), 3, 4, 5, is_again=False)
    assert record_of(region).effects == ()


def settle(**fields: Any) -> SettleAction:
    found: dict[str, Any] = {"now_ms": 7, "settlements": ((0, 3, int(Verdict.ACK), 0),)} | fields
    return SettleAction("s", 0, "g", "c", **found)


def delayed() -> Effect:
    _, region = encode(
        b"a", Columns([b"x"], due_times_ms=[9]), producer_id=1, batch_sequence=1, create_time_ms=1
    )
    return Effect("a", False, 0, 1, region)


REFUSED: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {
    "no settlement": ((), ()),
    "an empty settlement": ((settle(settlements=()),), ()),
    "a failure": ((settle(settlements=((0, 0, int(Verdict.NACK), 0),)),), ()),
    "a delay": ((settle(settlements=((0, 0, int(Verdict.ACK), 5),)),), ()),
    "an error": ((settle(errors=((0, "why"),)),), ()),
    "another cause": ((settle(cause=1),), ()),
    "a range that ends before it begins": ((settle(settlements=((3, 2, 0, 0),)),), ()),
    "a sequence below zero": ((LaneDone("o", 1, "g", "c", 5, ((-1, 0),)),), ()),
    "two batches for a subject": ((ACK,), (effect("a", [b"x"]), effect("a", [b"y"]))),
    "too many subjects": (
        (ACK,),
        tuple([effect(f"t{n}", [b"x"]) for n in range(limits.STEP_TARGETS_MAX + 1)]),
    ),
    "too many messages": ((ACK,), (effect("a", [b""] * (limits.STEP_MESSAGES_MAX + 1)),)),
    "too many bytes": (
        (ACK,),
        tuple([effect(each, [bytes(limits.STEP_BYTES_MAX // 2)]) for each in ("a", "b")]),
    ),
    "another count": ((ACK,), (Effect("a", False, 0, 2, effect("a", [b"x"]).region),)),
    "another subject": ((ACK,), (Effect("b", False, 0, 1, effect("a", [b"x"]).region),)),
    "a number below zero": ((ACK,), (Effect("a", False, -1, 1, effect("a", [b"x"]).region),)),
    "no batch": ((ACK,), (Effect("a", False, 0, 1, b"no batch"),)),
    "a delayed message": ((ACK,), (delayed(),)),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_no_step_is_neither_written_nor_read(what: str) -> None:
    settlements, effects = REFUSED[what]
    with pytest.raises((InvalidArgument, CorruptBatch)):
        step_batch(effects, settlements, 3, 4, 5, is_again=False)
    with pytest.raises(CorruptBatch):
        decode_record(body(1, settlements, effects))


def test_another_version_is_refused_by_its_number() -> None:
    with pytest.raises(CorruptBatch, match="version 2"):
        decode_record(body(2, (ACK,), ()))
