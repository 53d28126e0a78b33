"""A delayed batch, byte by byte, read by a reader that uses nothing of QMQ: other clients must send
the same.
"""

from __future__ import annotations

import struct
import time

import google_crc32c
import pytest
from fake_cluster import delay_cluster, read

from qmq.wire.batch import encode
from qmq.wire.batch_columns import BatchFlag, Columns

GOLDEN = bytes.fromhex(
    # envelope: magic, version 1, kind 0, 184 bytes, the region's CRC-32C; the rest is the master's
    "514d423101000000"
    "b8000000"
    "c1b05a1e" + "00" * 48 +
    # region: producer 7, batch 9, flags ORDERED, 2 messages, created 1799999999000, columns KEY |
    # DUE, partition 0, 3 body bytes, ...
    "0700000000000000"
    "0900000000000000"
    "02000000"
    "02000000"
    "184c5c18a3010000"
    "44000000"
    "00000000"
    "03000000"
    "0100"
    "00"
    "00"
    # subject "s"
    "7300000000000000"
    # keys: offsets 0, 1, 2; "ab"
    "00000000010000000200000000000000"
    "6162000000000000"
    # due: 1800000000000, 1800003600000
    "00505c18a3010000"
    "803e9318a3010000"
    # bodies: offsets 0, 1, 3; "xyy"
    "00000000010000000300000000000000"
    "7879790000000000"
)


def test_a_delayed_batch_has_its_due_times_last_of_the_columns_before_the_bodies() -> None:
    columns = Columns(
        [b"x", b"yy"], [b"a", b"b"], due_times_ms=[1_800_000_000_000, 1_800_003_600_000]
    )
    sent = encode(
        b"s",
        columns,
        producer_id=7,
        batch_sequence=9,
        create_time_ms=1_799_999_999_000,
        flags=BatchFlag.ORDERED,
    )
    assert b"".join(sent).hex() == GOLDEN.hex()


def test_a_reader_made_from_the_specification_finds_the_due_times() -> None:
    magic, version, kind, total, crc = struct.unpack_from("<4sHHII", GOLDEN)
    assert (magic, version, kind, total) == (b"QMB1", 1, 0, len(GOLDEN))
    region = GOLDEN[64:]
    assert google_crc32c.value(region) == crc
    (
        producer,
        number,
        flags,
        count,
        created,
        columns,
        partition,
        body_bytes,
        subject_bytes,
        compression,
        _,
    ) = struct.unpack_from("<QQIIqIIIHBB", region)
    assert (producer, number, flags, count, created) == (7, 9, 2, 2, 1_799_999_999_000)
    assert (columns, partition, body_bytes, subject_bytes, compression) == (4 | 64, 0, 3, 1, 0)
    keys_at = 48 + 8
    due_at = keys_at + 16 + 8
    assert struct.unpack_from("<2q", region, due_at) == (1_800_000_000_000, 1_800_003_600_000)
    assert region[due_at + 16 + 16 : due_at + 16 + 19] == b"xyy"


async def test_the_client_sends_what_the_golden_bytes_say(monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns = time.time_ns()
    # messages made in two milliseconds have one more column
    monkeypatch.setattr(time, "time_ns", lambda: now_ns)
    async with delay_cluster() as it:
        await it.mq.delayed_producer("s").send_many(
            [b"x", b"yy"], ["a", "b"], due_ms=[1_800_000_000_000, 1_800_003_600_000]
        )
        (region,) = it.delays[0].regions
        assert [(each.body, each.key, each.due_ms) for each in read(region)] == [
            (b"x", b"a", 1_800_000_000_000),
            (b"yy", b"b", 1_800_003_600_000),
        ]
        columns = GOLDEN[64 + 48 :]
        assert region[48:] == columns
