"""Reads the golden files with a reader that follows docs/FORMAT.md and uses nothing of QMQ; then
checks that QMQ still writes the same.

`write_golden_files` makes them: run it once for each version of the format, never to make a test
pass.
"""

from __future__ import annotations

import itertools
import json
import shutil
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

import google_crc32c
import msgspec
import pytest
import zstandard

from qmq.log import commit_mark
from qmq.log.actions import (
    Begin,
    DeadLettered,
    Join,
    Leave,
    PullAction,
    Pulled,
    SettleAction,
    decode_actions,
)
from qmq.log.log_config import LogConfig
from qmq.log.recovery import open_store
from qmq.log.store import Intake
from qmq.wire import frame_payloads as wire
from qmq.wire.batch import encode, sent_sizes
from qmq.wire.batch_columns import Columns, Compression, parse_header
from qmq.wire.frame import FrameKind, frame


class _Clock:
    def time_ms(self) -> int:
        return 1_800_000_000_000

    def monotonic_ms(self) -> int:
        return 0


def write_golden_files(folder: Path) -> None:
    """Write message.log, action.log, committed.qmm, frames.bin and expected.json."""
    data = Path(tempfile.mkdtemp())
    store = open_store(data, LogConfig(), _Clock())
    queue = store.open_queue("flight.departed", 0)
    batches = [
        (Columns([b"hi"]), Compression.NONE),
        (
            Columns(
                [b"one", b"", b"three"],
                [b"N1", b"", b"N3"],
                [("UA",), (), ("AA", "late")],
                [{"h": b"v"}, {}, {"a": b"1", "b": b"\0"}],
                [0, 5, 7],
            ),
            Compression.NONE,
        ),
        (
            Columns([b"x" * 1000, b"y" * 1000], message_ids=[bytes(16), bytes(range(16))]),
            Compression.ZSTD,
        ),
    ]
    for number, (columns, compression) in enumerate(batches):
        envelope, region = encode(
            b"flight.departed",
            columns,
            producer_id=0x1A1F_C950_7D2E_86DB,
            batch_sequence=number,
            create_time_ms=1_799_999_999_000,
            compression=compression,
        )
        store.append([Intake(queue, region, sent_sizes(envelope)[1], parse_header(region), 0)])
    where = ("flight.departed", 0, "ops")
    store.act(Begin(*where, "", 0, 1_800_000_000_000))
    store.act(Join(*where, "c", "i", 30_000, -1))
    store.act(PullAction(*where, "c", (Pulled(0, 6, 1),)))
    store.act(
        SettleAction(
            *where, "c", 7, ((0, 3, 0, 0), (4, 4, 1, 1000), (5, 5, 3, 0)), ((2, "no JSON"),)
        )
    )
    store.act(DeadLettered(*where, "", ((0, 1),)))
    store.act(Leave(*where, "c", False))
    store.write_actions()
    store.close()
    (folder / "committed.qmm").write_bytes(
        commit_mark.encode(
            commit_mark.CommitMark(
                store.index, store.epoch, store.messages.end, store.actions.end, 1_800_000_000_000
            )
        )
    )
    shutil.copy(data / "message" / f"{0:020d}.log", folder / "message.log")
    shutil.copy(data / "action" / f"{0:020d}.log", folder / "action.log")
    shutil.rmtree(data)
    (folder / "frames.bin").write_bytes(
        frame(FrameKind.HELLO, 1, wire.Hello(1, "golden").pack())
        + frame(FrameKind.PULL, 2, wire.pack_pull(wire.Pull(3, 100, 4096, 500)), 1000)
        + frame(
            FrameKind.SETTLE,
            3,
            wire.pack_settle(
                3, [wire.Settlement(0, 9, 0, 0), wire.Settlement(10, 10, 1, 250, "no")]
            ),
        )
        + frame(FrameKind.BEGUN, 4, wire.pack_begun(3, 11, 12))
    )
    expected = {
        "bodies": ["hi", "one", "", "three", "x" * 1000, "y" * 1000],
        "keys": [None, "N1", None, "N3", None, None],
    }
    (folder / "expected.json").write_text(json.dumps(expected))


HERE = Path(__file__).parent


def pad8(size: int) -> int:
    return (size + 7) // 8 * 8


def entries(data: bytes) -> Iterator[tuple[tuple[int, ...], bytes]]:
    """(envelope's fields, region) of every entry of a log."""
    at = 0
    while at < len(data):
        fields = struct.unpack_from("<4sHHIIqqqqqII", data, at)
        assert fields[0] == b"QMB1"
        assert google_crc32c.value(data[at : at + 60]) == fields[11]
        region = data[at + 64 : at + fields[3]]
        assert google_crc32c.value(region) == fields[4]
        yield fields[1:11], region
        at += fields[3]
    assert at == len(data)


def strings(region: bytes, at: int, count: int) -> tuple[list[bytes], int]:
    marks = struct.unpack_from(f"<{count + 1}i", region, at)
    at += pad8(4 * (count + 1))
    return [region[at + a : at + b] for a, b in itertools.pairwise(marks)], at + pad8(marks[-1])


def batch(region: bytes) -> dict[str, list]:
    """The columns of a data region."""
    _, _, _, count, create, columns, _, body_bytes, subject_bytes, compression, _ = (
        struct.unpack_from("<QQIIqIIIHBB", region)
    )
    found: dict[str, list] = {
        "subject": [region[48 : 48 + subject_bytes].decode()],
        "times": [create] * count,
    }
    at = 48 + pad8(subject_bytes)
    if columns & 1:
        found["times"] = [create + delta for delta in struct.unpack_from(f"<{count}I", region, at)]
        at += pad8(4 * count)
    if columns & 2:
        found["ids"] = [region[at + 16 * i : at + 16 * i + 16] for i in range(count)]
        at += 16 * count
    if columns & 4:
        found["keys"], at = strings(region, at, count)
    if columns & 16:
        lists = struct.unpack_from(f"<{count + 1}i", region, at)
        at += pad8(4 * (count + 1))
        found["hashes"] = list(struct.unpack_from(f"<{lists[-1]}Q", region, at))
        tags, at = strings(region, at + 8 * lists[-1], lists[-1])
        found["tags"] = [tags[a:b] for a, b in itertools.pairwise(lists)]
    if columns & 32:
        lists = struct.unpack_from(f"<{count + 1}i", region, at)
        names, at = strings(region, at + pad8(4 * (count + 1)), lists[-1])
        values, at = strings(region, at, lists[-1])
        found["headers"] = [
            dict(zip(names[a:b], values[a:b], strict=True)) for a, b in itertools.pairwise(lists)
        ]
    marks = struct.unpack_from(f"<{count + 1}i", region, at)
    at += pad8(4 * (count + 1))
    data = region[at : at + body_bytes]
    if compression == 1:
        data = zstandard.ZstdDecompressor().decompress(data, max_output_size=marks[-1])
    found["bodies"] = [data[a:b] for a, b in itertools.pairwise(marks)]
    assert at + pad8(body_bytes) == len(region)
    return found


def test_a_reader_made_from_the_specification_reads_the_message_log() -> None:
    expected = json.loads((HERE / "expected.json").read_text())
    found = [
        (envelope, batch(region))
        for envelope, region in entries((HERE / "message.log").read_bytes())
    ]
    assert [body.decode() for _, each in found for body in each["bodies"]] == expected["bodies"]
    keys = [
        key.decode() or None
        for _, each in found
        for key in each.get("keys", [b""] * len(each["bodies"]))
    ]
    assert keys == expected["keys"]
    assert [envelope[4] for envelope, _ in found] == [0, 1, 4]
    assert found[1][1]["tags"] == [[b"UA"], [], [b"AA", b"late"]]
    assert found[1][1]["hashes"][0] == 0xBA988D3C7E00BDDB
    assert found[1][1]["headers"] == [{b"h": b"v"}, {}, {b"a": b"1", b"b": b"\0"}]
    assert found[1][1]["times"] == [1_799_999_999_000, 1_799_999_999_005, 1_799_999_999_007]
    assert found[2][1]["ids"] == [bytes(16), bytes(range(16))]
    assert {each["subject"][0] for _, each in found} == {"flight.departed"}


def test_a_reader_made_from_the_specification_reads_the_action_log() -> None:
    ((envelope, region),) = entries((HERE / "action.log").read_bytes())
    assert (envelope[1], envelope[4]) == (2, 6)
    (length,) = struct.unpack_from("<I", region)
    where = ["flight.departed", 0, "ops"]
    assert msgspec.msgpack.decode(region[4 : 4 + length]) == [
        [0, *where, "", 0, 1_800_000_000_000],
        [1, *where, "c", "i", 30_000, -1],
        [3, *where, "c", [[0, 6, 1]]],
        [4, *where, "c", 7, [[0, 3, 0, 0], [4, 4, 1, 1000], [5, 5, 3, 0]], [[2, "no JSON"]], 0],
        [30, *where, "", [[0, 1]]],
        [5, *where, "c", False],
    ]


def test_an_action_log_from_before_messages_could_die_is_read_as_ever() -> None:
    ((_, region),) = entries((HERE / "action_without_errors.log").read_bytes())
    (length,) = struct.unpack_from("<I", region)
    begin, _, _, settle, _ = decode_actions(region[4 : 4 + length])
    assert isinstance(begin, Begin)
    assert begin.now_ms == 0
    assert isinstance(settle, SettleAction)
    assert (settle.settlements, settle.errors, settle.cause) == (
        ((0, 3, 0, 0), (4, 4, 1, 1000)),
        (),
        0,
    )


def test_a_reader_made_from_the_specification_reads_the_frames() -> None:
    data, found, at = (HERE / "frames.bin").read_bytes(), [], 0
    while at < len(data):
        length, kind, flags, reserved, request, deadline = struct.unpack_from("<IBBHII", data, at)
        assert flags == reserved == 0
        found.append((kind, request, deadline, data[at + 16 : at + length]))
        at += length
    assert json.loads(found[0][3]) == {"version": 1, "client": "golden"}
    assert found[1][:3] == (7, 2, 1000)
    assert struct.unpack("<IIII", found[1][3]) == (3, 100, 4096, 500)
    assert struct.unpack("<IIqqIIqqIIIH2s", found[2][3]) == (
        3,
        2,
        0,
        9,
        0,
        0,
        10,
        10,
        1,
        250,
        1,
        2,
        b"no",
    )
    assert (found[3][0], struct.unpack("<Iqq", found[3][3])) == (27, (3, 11, 12))


def test_a_reader_made_from_the_specification_reads_the_commit_mark() -> None:
    data = (HERE / "committed.qmm").read_bytes()
    (
        magic,
        crc,
        version,
        reserved,
        index,
        epoch,
        message_position,
        action_position,
        time_ms,
        last,
    ) = struct.unpack("<4sIIIqqqqqq", data)
    assert (magic, crc, version, reserved, last) == (
        b"QMM1",
        google_crc32c.value(data[8:]),
        1,
        0,
        0,
    )
    logs = [(HERE / name).read_bytes() for name in ("message.log", "action.log")]
    assert [message_position, action_position] == [len(log) for log in logs]
    assert (index, epoch) == max(
        (fields[6], fields[5]) for log in logs for fields, _ in entries(log)
    )
    assert time_ms == 1_800_000_000_000


@pytest.mark.parametrize(
    "name", ["message.log", "action.log", "committed.qmm", "frames.bin", "expected.json"]
)
def test_this_release_still_writes_the_golden_files(tmp_path: Path, name: str) -> None:
    write_golden_files(tmp_path)
    assert (tmp_path / name).read_bytes() == (HERE / name).read_bytes()
