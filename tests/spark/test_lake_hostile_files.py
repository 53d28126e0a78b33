"""Files of a lake that are damaged or hostile: each command names the file, and the subjects beside
it are served.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from lake_support import HistoryReader, history
from publishing import send
from pyspark_qmq.lake import maintenance, typed
from pyspark_qmq.lake.table import LakeTable, find_table, open_table

from qmq.errors import InvalidArgument, LogDamaged

__all__ = ["history"]

pytestmark = pytest.mark.sampled

FILES = {
    "data": "data/**/*.parquet",
    "metadata": "metadata/*.metadata.json",
    "manifest-list": "metadata/snap-*.avro",
    "manifest": "metadata/*-m0.avro",
}


def foreign_parquet() -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(
        pa.table({"sequence": ["x"], "partition": [None], "broker_group": [1.5], "body": [[1]]}),
        sink,
    )
    found: bytes = sink.getvalue().to_pybytes()
    return found


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes(each ^ 0xFF for each in data[at : at + 16]) + data[at + 16 :]


SPOILS: dict[str, Callable[[bytes, bytes], bytes]] = {
    "empty": lambda _data, _other: b"",
    "cut": lambda data, _other: data[:-3],
    "flipped-begin": lambda data, _other: flipped(data, 10),
    "flipped-middle": lambda data, _other: flipped(data, len(data) // 2),
    "deep": lambda _data, _other: b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "other-schema": lambda _data, _other: foreign_parquet(),
    "other-subject": lambda _data, other: other,
}


class Commands:
    """What users do with the tables of a lake, in this process."""

    def __init__(self, history: HistoryReader) -> None:
        self._history = history
        now = datetime.now(UTC)
        self.run: dict[str, Callable[[], object]] = {
            "read": lambda: history.bodies("orders"),
            "show": lambda: maintenance.totals(self.table),
            "compact": lambda: list(
                maintenance.compact(self.table, now.date() + timedelta(days=9))
            ),
            "expire": lambda: maintenance.expire(self.table, now, timedelta(0)),
            "follow": lambda: history.follow("orders,others"),
        }

    @property
    def table(self) -> LakeTable:
        return find_table(self._history.lake.catalog, "qmq", "orders")


def newest(folder: Path, subject: str, pattern: str) -> Path:
    return max(
        (folder / "warehouse" / "qmq" / subject).glob(pattern),
        key=lambda each: (each.stat().st_mtime_ns, each.name),
    )


TOLERANT = {
    "data": {"show", "expire", "follow"},
    "manifest": {"follow"},
    "manifest-list": set[str](),
    "metadata": set[str](),
}
"""The commands that do not read such a file."""


@pytest.mark.parametrize("spoil", SPOILS)
@pytest.mark.parametrize("kind", FILES)
def test_a_hostile_file_is_named_and_other_subjects_are_served(
    history: HistoryReader, tmp_path: Path, kind: str, spoil: str
) -> None:
    server = history.lake.server
    for subject in ("orders", "others", "orders"):
        send(
            server,
            subject,
            [f"{subject} {number}" for number in range(3 if subject == "orders" else 500)],
        )
        history.follow(subject)
    path, other = (newest(tmp_path, subject, FILES[kind]) for subject in ("orders", "others"))
    path.write_bytes(SPOILS[spoil](path.read_bytes(), other.read_bytes()))
    for subject in ("orders", "others"):
        send(server, subject, ["late"])
    tolerant = TOLERANT[kind] | (
        {"follow"} if spoil == "other-subject" and kind == "manifest-list" else set()
    )
    for name, command in Commands(history).run.items():
        if name in tolerant:
            command()
            continue
        with pytest.raises((LogDamaged, InvalidArgument)) as failure:
            command()
        assert path.name in str(failure.value) or (
            spoil == "other-subject" and "others" in str(failure.value)
        ), name
    assert "late" in history.lake.bodies("others")
    assert history.bodies("others") == sorted(history.lake.bodies("others"))


@pytest.mark.parametrize("what", ["location", "metadata-log"])
def test_no_command_deletes_or_lists_outside_of_a_tables_folder(
    history: HistoryReader, tmp_path: Path, what: str
) -> None:
    for subject in ("orders", "others"):
        send(history.lake.server, subject, ["a"])
    history.follow("orders")
    outside = tmp_path / "outside" / "data" / "victim"
    outside.parent.mkdir(parents=True)
    outside.write_bytes(b"precious")
    path = newest(tmp_path, "orders", FILES["metadata"])
    found = json.loads(path.read_bytes())
    if what == "location":
        found["location"] = f"file://{tmp_path}/warehouse/qmq/orders/../../../outside"
    else:
        found["metadata-log"] += [{"timestamp-ms": 1, "metadata-file": f"file://{outside}"}]
        found["properties"]["write.metadata.previous-versions-max"] = "1"
    path.write_text(json.dumps(found))
    send(history.lake.server, "orders", ["b"])
    for name in ("expire", "follow"):
        with pytest.raises(LogDamaged, match="not in its folder"):
            Commands(history).run[name]()
    assert outside.read_bytes() == b"precious"


def test_rejected_files_outside_of_the_tables_folders_are_not_added(
    history: HistoryReader, tmp_path: Path
) -> None:
    send(history.lake.server, "orders", ["a"])
    history.follow("orders")
    rejected = open_table(history.lake.catalog, "qmq", "orders", is_rejected=True)
    table = Commands(history).table
    told = typed.pending_property([f"file://{tmp_path}/outside.parquet"])
    assert table.commit([], table.positions(), told)
    with pytest.raises(LogDamaged, match=r"names file:.*outside\.parquet"):
        typed.complete(table, rejected)
    with pytest.raises(LogDamaged, match=r"names file:.*outside\.parquet"):
        history.bodies("orders")
