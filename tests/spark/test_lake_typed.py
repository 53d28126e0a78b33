"""Typed tables: bodies in columns by the subject's schema, bodies that do not fit in a second
table, each message once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from publishing import send
from pyiceberg.catalog import Catalog, load_catalog
from pyspark_qmq.lake import maintenance, typed
from pyspark_qmq.lake.rows import conformed
from pyspark_qmq.lake.table import LakeTable, find_table, open_table
from pyspark_qmq.lake.writer import LakeOptions, LakeWriter
from support import NodeProcess

import qmq.blocking
from qmq.columns.options import parse
from qmq.errors import IncompatibleSchema, InvalidArgument
from qmq.schemas.declared_schema import Compatibility, SchemaFormat

pytestmark = pytest.mark.sampled

INT = {"type": "integer", "format": "int32"}
LONG = {"type": "integer"}
STRING = {"type": "string"}


class TypedLake:
    def __init__(self, catalog: Catalog, server: str) -> None:
        self.catalog, self.server = catalog, server
        self.mq = qmq.blocking.connect(server)

    def declare(
        self, properties: dict[str, Any], *required: str, mode: Compatibility | None = None
    ) -> None:
        text = json.dumps({"type": "object", "properties": properties, "required": required})
        self.mq.metadata.set_subject_schema("orders", SchemaFormat.JSON_SCHEMA, text, mode)

    def send(self, *bodies: str) -> None:
        send(self.server, "orders", list(bodies))

    def writer(self, *, is_typed: bool = True) -> LakeWriter:
        asked = parse(
            {"qmq.servers": self.server, "subscribe": "orders", "startingOffsets": "earliest"},
            is_stream=True,
        )
        return LakeWriter(
            self.catalog,
            asked,
            LakeOptions(),
            schemas=self.mq.metadata.subject_schemas if is_typed else None,
        )

    def drain(self) -> tuple[int, int]:
        """Run rounds until the tables are up to date. Returns the rows added to both tables, and
        how many of them were rejected.
        """
        done: list[Any] = []
        writer = self.writer()
        try:
            writer.drain(done.append)
        finally:
            writer.close()
        return sum(each.rows for each in done), sum(each.rejected for each in done)

    def rows(self, table: str = "orders") -> pa.Table:
        return self.catalog.load_table(("qmq", table)).scan().to_arrow().sort_by("sequence")

    def values(self) -> list[dict[str, Any]]:
        """From the files: PyIceberg 0.12 shows a null list of structs as an empty one."""
        table = find_table(self.catalog, "qmq", "orders")
        files = [
            each.file.file_path.removeprefix("file://")
            for each in table.iceberg.scan().plan_files()
        ]
        schema = maintenance.file_schema(table)
        rows = pa.concat_tables(
            [conformed(pq.read_table(each, partitioning=None), schema) for each in files]
        )
        found: list[dict[str, Any]] = rows.sort_by("sequence")["value"].to_pylist()
        return found

    def rejected(self) -> list[tuple[int, bytes]]:
        found = self.rows("orders__rejected")
        return list(zip(found["sequence"].to_pylist(), found["body"].to_pylist(), strict=True))


@pytest.fixture
def lake(node_process: NodeProcess, tmp_path: Path) -> Iterator[TypedLake]:
    node_process.start()
    catalog = load_catalog(
        "lake", uri=f"sqlite:///{tmp_path}/catalog.db", warehouse=f"file://{tmp_path}/warehouse"
    )
    found = TypedLake(catalog, node_process.address)
    with found.mq:
        yield found
    catalog.close()


def test_bodies_become_columns_and_misfits_are_kept_apart_with_a_reason(lake: TypedLake) -> None:
    lake.send('{"id":1,"note":"a"}', "no JSON", '{"id":2}', '{"id":"3"}')
    lake.declare({"id": INT, "note": STRING}, "id")
    assert lake.drain() == (4, 2)
    assert lake.values() == [{"id": 1, "note": "a"}, {"id": 2, "note": None}]
    assert lake.rows()["body"].to_pylist() == [b'{"id":1,"note":"a"}', b'{"id":2}']
    assert lake.rejected() == [(1, b"no JSON"), (3, b'{"id":"3"}')]
    found = lake.rows("orders__rejected")
    assert found["schema_version"].to_pylist() == [1, 1]
    assert (
        found["reason"].to_pylist()[1] == "ValidationError: Expected `int`, got `str` - at `$.id`"
    )


def test_every_kind_of_value_comes_through(lake: TypedLake) -> None:
    item = {
        "type": "object",
        "properties": {"sku": STRING, "counts": {"type": "array", "items": INT}},
        "required": ["sku"],
    }
    lake.send("{}")
    lake.declare(
        {
            "at": {"type": "string", "format": "date-time"},
            "ratio": {"type": "number"},
            "is_new": {"type": "boolean"},
            "raw": {"type": "string", "contentEncoding": "base64"},
            "items": {"type": "array", "items": item},
            "by_name": {"type": "object", "additionalProperties": item},
            "one": item,
        }
    )
    first = '{"sku":"a","counts":[1,2]}'
    lake.send(
        f'{{"at":"2026-11-27T01:00:00+01:00","ratio":1,"is_new":true,"raw":"AAE=","items":[{first},{{"sku":"b"}}],'
        f'"by_name":{{"x":{first}}},"one":{first}}}',
        '{"items":[],"by_name":{},"one":null}',
    )
    lake.drain()
    a, b = {"sku": "a", "counts": [1, 2]}, {"sku": "b", "counts": None}
    empty = dict.fromkeys(("at", "ratio", "is_new", "raw", "items", "by_name", "one"))
    full = {
        "at": datetime(2026, 11, 27, tzinfo=UTC),
        "ratio": 1.0,
        "is_new": True,
        "raw": b"\x00\x01",
    }
    assert lake.values() == [
        empty,
        {**full, "items": [a, b], "by_name": [("x", a)], "one": a},
        {**empty, "items": [], "by_name": []},
    ]


def test_a_table_follows_a_schema_that_adds_widens_and_drops_fields(lake: TypedLake) -> None:
    lake.send('{"id":1,"old":"x"}')
    lake.declare({"id": INT, "old": STRING}, "id")
    lake.drain()
    lake.declare({"id": LONG, "new": {"type": "object", "properties": {"a": INT}}}, "id")
    lake.send('{"id":5000000000,"new":{"a":1}}')
    lake.drain()
    lake.declare(
        {"id": LONG, "new": {"type": "object", "properties": {"a": LONG, "b": STRING}}}, "id"
    )
    lake.send('{"id":3,"new":{"a":6000000000,"b":"y"}}')
    assert lake.drain() == (1, 0)
    assert lake.values() == [
        {"id": 1, "old": "x", "new": None},
        {"id": 5_000_000_000, "old": None, "new": {"a": 1, "b": None}},
        {"id": 3, "old": None, "new": {"a": 6_000_000_000, "b": "y"}},
    ]
    table, before = find_table(lake.catalog, "qmq", "orders"), lake.rows().to_pylist()
    assert [
        each.rows
        for each in maintenance.compact(table, (datetime.now(UTC) + timedelta(days=1)).date())
    ] == [3]
    assert (lake.rows().to_pylist(), lake.values()[0]) == (
        before,
        {"id": 1, "old": "x", "new": None},
    )


def test_a_change_that_iceberg_does_not_make_is_refused_and_says_what_to_do(
    lake: TypedLake,
) -> None:
    lake.send('{"id":1}')
    lake.declare({"id": INT})
    lake.drain()
    lake.declare({"id": STRING}, mode=Compatibility.NONE)
    lake.send('{"id":"x"}')
    with pytest.raises(
        IncompatibleSchema,
        match=(
            r"'value.id' of the table of 'orders' is int, and string in the schema: Iceberg "
            r"cannot"
        ),
    ):
        lake.drain()
    lake.declare({"id": INT}, mode=Compatibility.NONE)
    assert lake.drain() == (1, 1)


def test_a_table_of_bytes_becomes_typed_and_is_then_not_written_as_bytes(lake: TypedLake) -> None:
    lake.send('{"id":1}')
    writer = lake.writer(is_typed=False)
    assert [each.rows for each in writer.round()] == [1]
    writer.close()
    lake.declare({"id": INT})
    lake.send('{"id":2}')
    lake.drain()
    assert lake.values() == [None, {"id": 2}]
    with pytest.raises(InvalidArgument, match="follow it with --typed"):
        list(lake.writer(is_typed=False).round())


def test_without_a_schema_nothing_is_written(lake: TypedLake) -> None:
    lake.send("a")
    with pytest.raises(
        InvalidArgument, match="has no schema: declare one by `qmq subject schema set orders`"
    ):
        lake.drain()


# --- rejected messages, once ----------------------------------------------------------------------


class Killed(BaseException):
    """The writer's process ends."""


def killed(*_: Any) -> None:
    raise Killed


def after(method: Callable[..., Any]) -> Callable[..., Any]:
    def done(*words: Any) -> None:
        method(*words)
        raise Killed

    return done


@pytest.mark.parametrize(
    "moment", ["before the table's commit", "after it", "after that of the rejected messages"]
)
def test_rejected_messages_are_kept_once_whenever_the_writer_dies(
    lake: TypedLake, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    lake.send('{"id":1}', "bad")
    lake.declare({"id": INT})
    with monkeypatch.context() as patch, suppress(Killed):
        if moment == "before the table's commit":
            patch.setattr(LakeTable, "commit", killed)
        elif moment == "after it":
            patch.setattr(LakeTable, "add", killed)
        else:
            patch.setattr(LakeTable, "add", after(LakeTable.add))
        lake.drain()
    lake.send("worse", '{"id":2}')
    lake.drain()
    assert lake.values() == [{"id": 1}, {"id": 2}]
    assert lake.rejected() == [(1, b"bad"), (2, b"worse")]


def test_of_two_writers_each_with_rejected_messages_all_are_kept_once(lake: TypedLake) -> None:
    lake.send('{"id":0}')
    lake.declare({"id": INT})
    lake.drain()
    first, second = lake.writer(), lake.writer()
    assert list(first.round()) == list(second.round()) == []
    for number in range(3):
        lake.send(f"bad {number}")
        assert [each.is_refused for each in first.round()] == [False]
        assert [each.is_refused for each in second.round()] == [True]
        assert list(second.round()) == []
    assert [body for _, body in lake.rejected()] == [b"bad 0", b"bad 1", b"bad 2"]


def test_a_process_that_adds_late_adds_nothing_again(
    lake: TypedLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process reads both tables and pauses; meanwhile another process adds the round."""
    lake.send('{"id":1}', "bad")
    lake.declare({"id": INT})
    with monkeypatch.context() as patch, suppress(Killed):
        patch.setattr(LakeTable, "add", killed)
        lake.drain()
    slow = find_table(lake.catalog, "qmq", "orders", is_rejected=True)
    add: Callable[..., Any] = LakeTable.add

    def overtaken(table: LakeTable, locations: Sequence[str], properties: dict[str, str]) -> None:
        monkeypatch.setattr(LakeTable, "add", add)
        typed.complete(
            find_table(lake.catalog, "qmq", "orders"),
            find_table(lake.catalog, "qmq", "orders", is_rejected=True),
        )
        add(table, locations, properties)

    monkeypatch.setattr(LakeTable, "add", overtaken)
    typed.complete(find_table(lake.catalog, "qmq", "orders"), slow)
    assert lake.rejected() == [(1, b"bad")]


def test_the_table_of_rejected_messages_is_not_taken_for_a_subjects(lake: TypedLake) -> None:
    open_table(lake.catalog, "qmq", "orders", is_rejected=True)
    with pytest.raises(
        InvalidArgument,
        match="belongs to the rejected messages of subject 'orders': choose another --namespace",
    ):
        open_table(lake.catalog, "qmq", "orders__rejected")
