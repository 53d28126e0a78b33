"""Makes the golden files: run it once for each version of the format, never to make a test pass."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path

from qmq.log import commit_mark
from qmq.log.actions import Begin, DeadLettered, Join, Leave, PullAction, Pulled, SettleAction
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


def main(folder: Path) -> None:
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
        (Columns([b"x" * 1000, b"y" * 1000], message_ids=[bytes(16), bytes(range(16))]), Compression.ZSTD),
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
    store.act(SettleAction(*where, "c", 7, ((0, 3, 0, 0), (4, 4, 1, 1000), (5, 5, 3, 0)), ((2, "no JSON"),)))
    store.act(DeadLettered(*where, "", ((0, 1),)))
    store.act(Leave(*where, "c", False))
    store.write_actions()
    store.close()
    (folder / "committed.qmm").write_bytes(
        commit_mark.encode(commit_mark.CommitMark(store.index, store.epoch, store.messages.end, store.actions.end, 1_800_000_000_000))
    )
    shutil.copy(data / "message" / f"{0:020d}.log", folder / "message.log")
    shutil.copy(data / "action" / f"{0:020d}.log", folder / "action.log")
    shutil.rmtree(data)
    (folder / "frames.bin").write_bytes(
        frame(FrameKind.HELLO, 1, wire.Hello(1, "golden").pack())
        + frame(FrameKind.PULL, 2, wire.pack_pull(wire.Pull(3, 100, 4096, 500)), 1000)
        + frame(FrameKind.SETTLE, 3, wire.pack_settle(3, [wire.Settlement(0, 9, 0, 0), wire.Settlement(10, 10, 1, 250, "no")]))
        + frame(FrameKind.BEGUN, 4, wire.pack_begun(3, 11, 12))
    )
    expected = {"bodies": ["hi", "one", "", "three", "x" * 1000, "y" * 1000], "keys": [None, "N1", None, "N3", None, None]}
    (folder / "expected.json").write_text(json.dumps(expected))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
