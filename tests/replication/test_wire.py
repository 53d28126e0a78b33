"""Replica messages as bytes: decoding returns what was encoded, and refuses everything else."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from google_crc32c import value as crc32c
from hypothesis import given
from hypothesis import strategies as st
from qmq_replication import wire
from qmq_replication.history import EpochRun
from qmq_replication.links import VERSION, PeerHello
from qmq_replication.ready import (
    Ack,
    Append,
    LogReset,
    Message,
    Mismatch,
    Probe,
    ProbeReply,
    Promise,
    PromiseRequest,
    Refusal,
    TakeOver,
)
from support import ManualClock, intake

from qmq.errors import CorruptBatch, ProtocolViolation
from qmq.log.log_config import LogConfig
from qmq.log.merged_log import read_merged
from qmq.log.recovery import open_store

MESSAGES: list[Message] = [
    Probe(3),
    ProbeReply(4, "b1", True, 3, 17, False),
    PromiseRequest(9),
    Promise(9, 8, 1 << 40, True),
    Append(5, 2, 4, 100, (), 100, 99, True, None),
    Ack(5, 2, 7, 9, (1 << 50, 64)),
    Mismatch(5, 1, 9, 0, 0, (EpochRun(1, 1), EpochRun(4, 8)), (900, 80)),
    LogReset(5, 3, 4, 77, (1 << 41, 0), 1000),
    Refusal(6),
    TakeOver(5),
]


def sent(message: Message) -> bytes:
    return b"".join(wire.pack(message))


def plain(value: Any) -> Any:
    """Places are decoded as lists."""
    return tuple(plain(each) for each in value) if isinstance(value, list | tuple) else value


@pytest.mark.parametrize("message", MESSAGES, ids=lambda each: type(each).__name__)
def test_every_message_comes_back_as_it_was(message: Message) -> None:
    found = wire.unpack(memoryview(sent(message)))
    assert type(found) is type(message)
    assert plain(found) == plain(message)


@pytest.fixture
def append(tmp_path: Path) -> Append:
    """One with entries of both logs."""
    store = open_store(tmp_path, LogConfig(), ManualClock(), is_replicated=True)
    store.append_barrier(1)
    for number in range(3):
        store.append([intake(store.open_queue("s", 0), [b"x" * 50 * number], number=number)])
    stretch = read_merged((store.messages, store.actions), (0, 0), 0, 1 << 20)
    store.close()
    assert stretch is not None
    return Append(1, 0, 0, 0, (EpochRun(1, 1),), stretch.last, 0, False, stretch.runs)


def test_an_append_carries_log_bytes_as_they_lie_and_they_come_out_as_entries(
    append: Append,
) -> None:
    found = wire.unpack(memoryview(sent(append)))
    assert isinstance(found, Append)
    assert found._replace(payload=None) == append._replace(payload=None)
    assert isinstance(found.payload, wire.LogStretch)
    assert [b"".join(run.buffers) for run in found.payload.runs] == [
        b"".join(run.buffers) for run in append.payload
    ]
    assert [entry.envelope.index for entries in found.payload.entries for entry in entries] == [
        1,
        2,
        3,
        4,
    ]


def test_an_append_whose_entries_were_changed_on_the_way_is_refused_whole(append: Append) -> None:
    data = sent(append)
    payload = data.index(b"QMB1") - 28
    random = Random(1)
    for at in range(payload, len(data)):
        flipped = bytearray(data)
        flipped[at] ^= 1 << random.randrange(8)
        with pytest.raises(CorruptBatch):
            wire.unpack(memoryview(flipped))


def test_an_append_that_was_cut_anywhere_is_refused(append: Append) -> None:
    data = sent(append)
    for end in range(len(data)):
        with pytest.raises((CorruptBatch, ProtocolViolation)):
            wire.unpack(memoryview(data)[:end])


def test_an_append_with_contradictory_fields_is_refused(append: Append) -> None:
    for wrong in (
        append._replace(last_index=5),
        append._replace(prev_index=1),
        append._replace(payload=None),
    ):
        with pytest.raises(CorruptBatch):
            wire.unpack(memoryview(sent(wrong)))


HEADS: dict[type, str] = {
    Probe: "000200000081c390a49103",
    ProbeReply: "0109000000c6e5a4729604a26231c30311c2",
    PromiseRequest: "0202000000b4b91d809109",
    Promise: "030d000000a0fbc783940908cf0000010000000000c3",
    Append: "040b000000399a41b99a05020464906463c3c000",
    Ack: "05110000009914fa0b960502070992cf00040000000000004000",
    Mismatch: "0612000000dd7cef159705010900009292010192040892cd038450",
    LogReset: "07130000002808d53e960503044d92cf000002000000000000cd03e8",
    Refusal: "080200000058e930a99106",
    TakeOver: "0902000000d288211f9105",
}
"""Every message's bytes in version 2 of what replicas speak. A replica refuses a message with an
additional field. A change of a message therefore raises VERSION in
replication/qmq_replication/links.py, so that replicas of different versions refuse each other in
the handshake.
"""


@pytest.mark.parametrize("message", MESSAGES, ids=lambda each: type(each).__name__)
def test_messages_of_protocol_version_2_keep_their_bytes(message: Message) -> None:
    assert VERSION == 2
    assert sent(message).hex() == HEADS[type(message)]


def test_messages_without_the_fields_for_flushes_are_understood() -> None:
    """An Append and an Ack without their last field: no wait for a flush, and nothing known to be
    flushed.
    """
    for older in (MESSAGES[4], MESSAGES[5]):
        number, fields = wire.pack(older)[0][0], list(older)
        head = msgspec.msgpack.encode(fields[:-1])
        packed = (
            bytes((number,))
            + len(head).to_bytes(4, "little")
            + crc32c(bytes((number,)) + head).to_bytes(4, "little")
            + head
        )
        assert plain(wire.unpack(memoryview(packed))) == plain(older)


def test_a_replica_of_a_version_without_those_fields_is_refused_at_connect() -> None:
    hello = msgspec.json.encode({"version": 1, "group": "g", "replica": "b2"})
    with pytest.raises(ProtocolViolation, match="this replica speaks version 2, the other 1"):
        PeerHello.unpack(memoryview(hello))


@given(st.binary(max_size=200))
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises((CorruptBatch, ProtocolViolation)):
        found = wire.unpack(memoryview(data))
        raise ProtocolViolation(f"by chance it was {found}")


_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=10) | st.dictionaries(st.text(max_size=3), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(st.integers(0, 11), _VALUES, st.binary(max_size=40))
def test_a_wrong_message_header_is_refused_or_at_least_harmless(
    kind: int, fields: object, rest: bytes
) -> None:
    head = msgspec.msgpack.encode(fields)
    try:
        wire.unpack(memoryview(bytes([kind]) + len(head).to_bytes(4, "little") + head + rest))
    except (CorruptBatch, ProtocolViolation):
        pass
