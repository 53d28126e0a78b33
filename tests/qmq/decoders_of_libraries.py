"""The decoders of schemas, SQL, the client, Spark and the lake."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import hostile_values as values
from decoder import (
    NUMBER,
    PACKED,
    Decoder,
    Strategy,
    checked,
    in_file,
    packed,
    shown,
    tolerant,
)
from hypothesis import strategies as st
from pyspark_qmq import stream
from pyspark_qmq.datasets import schedules
from pyspark_qmq.jobs import job
from pyspark_qmq.jobs.report import plain
from pyspark_qmq.lake import migration, table, task_runner, typed_columns
from pyspark_qmq.lake.typed import pending_of

from qmq import errors
from qmq.client import payloads, tracing
from qmq.client.consuming import settlements
from qmq.columns import offsets as spark_offsets
from qmq.columns.files import folders, routes
from qmq.columns.options import OptionValues
from qmq.log.segment_index import with_checksum
from qmq.model import DelayedId, MessageId
from qmq.rpc.channel import failures
from qmq.schemas import avro_schema, compatibility, declared_schema, json_schema
from qmq.schemas.body_decoder import decoder_of
from qmq.schemas.declared_schema import DeclaredSchema, SchemaFormat
from qmq.sql import debezium_outbox, outbox_message

# --- schemas, SQL, the client --------------------------------------------------------------------------------------------

NAMES: Final = st.sampled_from(["a", "b", "R", "n.R"]) | values.TEXTS
AVRO_TYPES: Final = st.recursive(
    st.sampled_from(["int", "string", "null", "R", "n.R", "bytes"]) | values.JSON_VALUES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        values.objects(type=st.just("record") | inner, name=NAMES, fields=st.lists(values.objects(name=NAMES, type=inner), max_size=3)),
        values.objects(
            type=st.sampled_from(["array", "map", "enum", "fixed"]), items=inner, values=inner, name=NAMES, symbols=st.just(["A"])
        ),
        values.objects(type=st.just("int"), logicalType=st.just("date") | values.JSON_VALUES),
    ),
    max_leaves=8,
)
JSON_TYPES: Final = st.recursive(
    values.objects(type=st.sampled_from(["object", "string", "integer", "array", "null"])) | values.JSON_VALUES,
    lambda inner: values.objects(
        **{"type": st.just("object"), "$ref": st.sampled_from(["#", "#/$defs/a", "#/x"]), "anyOf": st.lists(inner, max_size=2)},
        **{"$defs": st.dictionaries(NAMES, inner, max_size=2), "properties": st.dictionaries(NAMES, inner, max_size=2)},
        required=st.lists(NAMES, max_size=2),
        items=inner,
        additionalProperties=inner,
    ),
    max_leaves=8,
)


def read(message: Any) -> None:
    assert message.create_time is not None
    try:
        message.json()
    finally:
        assert message.key is None or message.key


def text_of(types: Strategy) -> Strategy:
    return types.map(json.dumps) | values.TEXTS | st.sampled_from([each.decode("latin-1") for each in values.DEEP])


def fits(text: str) -> None:
    """Whether a schema from a registry may follow itself."""
    for kind in SchemaFormat:
        found = DeclaredSchema(kind, text)
        try:
            found.struct()
        except errors.InvalidArgument:
            continue
        compatibility.require("s", found, found)
        decoder_of([found])


RECORD: Final = {
    "type": "record",
    "name": "R",
    "fields": [{"name": "a", "type": ["null", "long"]}, {"name": "b", "type": {"type": "array", "items": "string"}}],
}
OBJECT: Final = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "array", "items": {"type": "string"}}}}
AVRO_EXAMPLES: Final = tuple(each.decode("latin-1") for each in values.each_change(RECORD)) + values.TEXT_EXAMPLES
JSON_EXAMPLES: Final = tuple(each.decode("latin-1") for each in values.each_change(OBJECT)) + values.TEXT_EXAMPLES
DECLARED: Final = (
    DeclaredSchema(SchemaFormat.AVRO, json.dumps(RECORD), version=1),
    DeclaredSchema(SchemaFormat.JSON_SCHEMA, json.dumps(OBJECT), version=1),
)


def typed(given: tuple[int, list[bytes]]) -> None:
    """What `qmq lake follow --typed` makes of bodies: values that fit into a column, and reasons."""
    schema = DECLARED[given[0]]
    fitting, reasons = task_runner.decoded(decoder_of([schema]), given[1])
    typed_columns.column(fitting, schema.struct(), schema.struct())
    shown(list(reasons.values()))


ROW: Final = st.tuples(
    st.integers(),
    values.BYTES,
    st.just("s") | values.TEXTS,
    st.none() | values.BYTES,
    st.none(),
    st.none() | values.json_of(st.lists(values.TEXTS)).map(lambda data: data.decode("utf-8", "replace")),
    st.none() | values.json_of(st.dictionaries(values.TEXTS, values.TEXTS)).map(lambda data: data.decode("utf-8", "replace")),
    values.BYTES,
    st.none() | NUMBER,
    NUMBER,
    st.none(),
).map(lambda row: (*row[:10], len(row[3] or b"") + len(row[5] or "") + len(row[6] or "") + len(row[7])))
SPOOL: Final = st.lists(
    values.json_of(
        values.objects(version=st.just(1), broker_group=values.TEXTS, attach=values.JSON_VALUES)
        | values.objects(first=NUMBER, last=NUMBER, delay_ms=NUMBER, time_ms=NUMBER, error=values.TEXTS, verdict=st.just("ACK"))
    ),
    max_size=3,
).map(lambda lines: b"\n".join([*lines, b""]))

SPOOL_FIRST: Final = {"version": 1, "broker_group": "g1", "attach": {}}
SPOOL_LINE: Final = {"first": 1, "last": 2, "delay_ms": 0, "time_ms": 5, "error": "e", "verdict": "ACK"}
GOOD_ROW: Final = (1, b"\0" * 16, "s", b"k", 1, '["t"]', '{"h": "v"}', b"b", 5, 5)


def row(*changes: tuple[int, Any]) -> tuple[Any, ...]:
    """A good row of an outbox with changed columns, and the size of its content."""
    found = list(GOOD_ROW)
    for column, value in changes:
        found[column] = value
    return (*found, len(found[3]) + len(found[5]) + len(found[6]) + len(found[7]))


EACH_ROW: Final = (
    row(),
    *[row((column, each)) for column in (1, 3, 7) for each in values.BYTE_EXAMPLES],
    *[row((2, each)) for each in values.TEXT_EXAMPLES],
    *[row((5, each.decode("latin-1"))) for each in values.each_change(["t"])],
    *[row((6, each.decode("latin-1"))) for each in values.each_change({"h": "v"})],
)

CLIENT: Final = (
    Decoder(
        "schemas: an Avro schema",
        text_of(AVRO_TYPES),
        avro_schema.parse,
        (errors.InvalidArgument,),
        ("qmq.schemas.avro_schema.parse",),
        always=AVRO_EXAMPLES,
    ),
    Decoder(
        "schemas: a JSON Schema",
        text_of(JSON_TYPES),
        json_schema.parse,
        (errors.InvalidArgument,),
        ("qmq.schemas.json_schema.parse",),
        always=JSON_EXAMPLES,
    ),
    Decoder(
        "schemas: a schema of a registry",
        st.just(json.dumps(RECORD))
        | text_of(AVRO_TYPES | JSON_TYPES)
        | st.sampled_from([RECORD, OBJECT]).flatmap(values.changed).map(json.dumps),
        fits,
        (errors.InvalidArgument, errors.IncompatibleSchema),
        ("qmq.schemas.body_decoder._avro",),
        always=(*AVRO_EXAMPLES, *JSON_EXAMPLES),
    ),
    Decoder(
        "schemas: a stored version",
        values.json_of(
            values.objects(
                format=st.sampled_from(["avro", "json-schema"]),
                text=values.TEXTS,
                compatibility=st.just("none"),
                version=values.NUMBERS,
                created_ms=NUMBER,
            )
        ),
        declared_schema.DeclaredSchema.decode,
        (ValueError, KeyError, TypeError),
        ("qmq.schemas.declared_schema.DeclaredSchema.decode",),
        always=values.each_change({"format": "avro", "text": "t", "compatibility": "none", "version": 1, "created_ms": 5}),
    ),
    Decoder(
        "lake: bodies by a schema",
        st.tuples(st.integers(0, 1), st.lists(values.json_of(st.just({"a": 1, "b": ["x"]})), max_size=3)),
        typed,
        always=tuple((kind, [each]) for kind in (0, 1) for each in values.each_change({"a": 1, "b": ["x"]})),
    ),
    Decoder(
        "SQL: a row of an outbox",
        ROW,
        lambda row: outbox_message.from_row(row).message and outbox_message.from_row(row).message.row(),
        (),
        ("qmq.sql.outbox_message.from_row", "qmq.sql.outbox_message.OutboxMessage.row"),
        always=EACH_ROW,
    ),
    Decoder(
        "SQL: a row of Debezium's table",
        st.tuples(values.TEXTS | values.BYTES | NUMBER | st.none(), values.JSON_VALUES | values.BYTES),
        lambda row: (debezium_outbox.message_id(row[0]), debezium_outbox.body_of(row[1])),
        (errors.InvalidArgument,),
        ("qmq.sql.debezium_outbox.message_id",),
        always=tuple((each, each) for each in (*values.TEXT_EXAMPLES, *values.BYTE_EXAMPLES, *values.JSON_EXAMPLES)),
    ),
    Decoder(
        "client: a message as JSON and with its key",
        values.received(),
        read,
        (ValueError,),
        (
            "qmq.client.consuming.message.StoredMessage.key",
            "qmq.client.consuming.message.StoredMessage.json",
            "qmq.client.consuming.message.StoredMessage.create_time_ms",
        ),
        always=values.each_received(),
    ),
    Decoder(
        "client: a body for a handler's type",
        st.tuples(st.sampled_from([str, dict, int, list[int], datetime]), values.BYTES),
        lambda given: payloads.decode(given[1], given[0]),
        (payloads.Undecodable,),
        always=tuple((kind, each) for kind in (str, dict, int, list[int], datetime) for each in values.BYTE_EXAMPLES),
    ),
    Decoder(
        "client: a trace context",
        values.headers("traceparent", "tracestate")
        | st.tuples(st.text("0123456789abcdef²", min_size=2, max_size=2), values.TEXTS).map(
            lambda each: {
                "traceparent": f"{each[0]}-{'a' * 32}-{'b' * 16}-{each[0]}".encode(),
                "tracestate": each[1].encode("utf-8", "replace"),
            }
        ),
        tracing.parse,
        (),
        ("qmq.client.tracing.parse_parent",),
        always=tuple({"traceparent": each, "tracestate": each} for each in values.BYTE_EXAMPLES),
    ),
    Decoder(
        "client: the attempts of a directed message",
        values.headers("qmq-attempt"),
        failures,
        always=tuple({"qmq-attempt": each} for each in values.BYTE_EXAMPLES),
    ),
    Decoder(
        "client: a file of verdicts",
        SPOOL,
        settlements.unpack,
        (ValueError,),
        ("qmq.client.consuming.settlements.unpack",),
        always=(
            *[b"\n".join([each, json.dumps(SPOOL_LINE).encode(), b""]) for each in values.each_change(SPOOL_FIRST)],
            *[b"\n".join([json.dumps(SPOOL_FIRST).encode(), each, b""]) for each in values.each_change(SPOOL_LINE)],
        ),
    ),
    Decoder(
        "ids of messages",
        values.TEXTS,
        lambda text: [tolerant(MessageId.parse)(text), DelayedId.parse(text)],
        (errors.InvalidArgument,),
        always=values.TEXT_EXAMPLES,
    ),
)

# --- Spark, and the lake's tables ----------------------------------------------------------------------------------------

POSITIONS: Final = values.json_of(st.dictionaries(st.just("0@g1") | values.TEXTS, NUMBER | values.NUMBERS | st.floats()))
OFFSETS: Final = st.dictionaries(values.TEXTS, st.dictionaries(st.just("0@g1") | values.TEXTS, NUMBER | values.NUMBERS))
PARTITION: Final = {"number": 1, "first_lp": 0, "end_lp": 4, "broker_group": "g1", "version": 1, "sources": [1]}
ROUTE: Final = {"subject": "s", "order": "strict", "logical_partitions": 4, "version": 1, "partitions": [PARTITION], "sealed_at": {"1": 5}}
ARCHIVE: Final = {"kind": "add", "gone": [], "files": [{"path": "a/b.parquet", "rows": 5}], "to": {"s": {"0@g1": 5}}}
CHECKPOINT: Final = (
    st.tuples(st.just(1), NUMBER, NUMBER, st.none(), st.none(), values.BYTES, st.none(), st.binary(min_size=32, max_size=64))
    .map(list)
    .map(packed)
)


def archived(path: Path) -> None:
    """A manifest, and the same as the description of the archive."""
    Path(path.parents[1], "archive.json").write_bytes(path.read_bytes())
    migration.read_manifests(path.parents[2])


def options(given: tuple[str, str]) -> None:
    found = OptionValues({"o": given[0]}, ["o"])
    for each in (found.number, found.words, found.json):
        tolerant(each)("o")
    found.number("o", 1, 5)


def progress(given: dict[str, Any] | bytes) -> None:
    stream.lag_by_queue({"latestOffset": given, "endOffset": {"s": {"0@g1": 5}}})


SPARK: Final = (
    Decoder(
        "Spark: options",
        st.tuples(values.TEXTS | values.json_of(st.just(["a"])).map(lambda data: data.decode("latin-1")), st.none()),
        options,
        (errors.InvalidArgument,),
        ("qmq.columns.options.OptionValues.json",),
        always=tuple((each, None) for each in values.TEXT_EXAMPLES),
    ),
    Decoder(
        "Spark: starting offsets",
        values.json_of(OFFSETS).map(lambda data: data.decode("latin-1")),
        lambda text: spark_offsets.parse_given("startingOffsets", text),
        (errors.InvalidArgument,),
        ("qmq.columns.offsets.parse_given",),
        always=tuple(each.decode("latin-1") for each in values.each_change({"s": {"0@g1": 5}})),
    ),
    Decoder(
        "Spark: the offsets of a checkpoint",
        OFFSETS,
        lambda found: (spark_offsets.of_json(found), spark_offsets.per_task_of_json(found)),
        (errors.InvalidArgument,),
        ("qmq.columns.model.QueueKey.parse",),
        always=tuple({each: {other: number}} for each in values.TEXT_EXAMPLES for other in ("0@g1", each) for number in (5, 2**64, each)),
    ),
    Decoder(
        "Spark: the progress of a query",
        OFFSETS | values.json_of(OFFSETS).map(lambda data: data.decode("latin-1")) | values.JSON_VALUES,
        progress,
        (errors.InvalidArgument,),
        ("pyspark_qmq.stream._parsed",),
        always=(*values.JSON_EXAMPLES, *tuple(each.decode("latin-1") for each in values.each_change({"s": {"0@g1": 5}}))),
    ),
    Decoder(
        "Spark: exported routes",
        values.json_of(values.changed({"format": "qmq-routes", "version": 1, "subjects": [ROUTE]})),
        in_file(lambda path: routes.empty_queues(routes.read_routes(str(path)), ["g1"])),
        (errors.InvalidArgument,),
        (
            "qmq.columns.files.routes.parse_routes",
            "qmq.columns.files.routes._routes",
            "qmq.columns.files.routes._partition",
        ),
        always=values.each_change({"format": "qmq-routes", "version": 1, "subjects": [ROUTE]}),
    ),
    Decoder(
        "Spark: the group of a folder",
        values.json_of(values.JSON_VALUES.map(lambda value: {"content": json.dumps(value)}) | st.just({"content": "{"})),
        in_file(
            lambda path: (Path(path.parent, "broker/message").mkdir(parents=True), folders.find_folders([str(path.parent)])),
            "replica.json",
        ),
        (errors.InvalidArgument,),
        ("qmq.columns.files.folders._replica_group",),
        always=values.each_change({"content": '{"group": "g1"}'}),
    ),
    Decoder(
        "Spark: a schedule's files",
        checked(b"QMS1", CHECKPOINT | PACKED),
        lambda data: schedules.of_mark(data),
        (errors.LogDamaged,),
        ("pyspark_qmq.datasets.schedules.of_mark",),
        always=(*values.BYTE_EXAMPLES, *[with_checksum(b"QMS1", each) for each in values.BYTE_EXAMPLES]),
    ),
    Decoder(
        "Spark: times of jobs",
        values.TIME_TEXTS | values.TEXTS,
        lambda text: job.time_ms(text, "--from"),
        (errors.InvalidArgument,),
        ("pyspark_qmq.jobs.job.time_ms",),
        always=values.TEXT_EXAMPLES,
    ),
    Decoder(
        "Spark: cells of reports",
        values.BYTES | values.JSON_VALUES,
        lambda value: shown(plain(value)),
        (),
        ("pyspark_qmq.jobs.report._bytes_text",),
        always=(*values.BYTE_EXAMPLES, *values.JSON_EXAMPLES),
    ),
    Decoder(
        "lake: the positions of a table",
        POSITIONS.map(lambda data: data.decode("latin-1")),
        lambda text: table.encode_positions("s", table.decode_positions("s", text)),
        (errors.LogDamaged,),
        ("pyspark_qmq.lake.table.decode_positions",),
        always=tuple(each.decode("latin-1") for each in values.each_change({"0@g1": 5})),
    ),
    Decoder(
        "lake: the files of rejected messages",
        values.json_of(values.objects(round=values.TEXTS, files=st.lists(values.TEXTS, max_size=2))).map(
            lambda data: data.decode("latin-1")
        ),
        pending_of,
        (errors.LogDamaged,),
        ("pyspark_qmq.lake.typed.pending_of",),
        always=tuple(each.decode("latin-1") for each in values.each_change({"round": "1", "files": ["a"]})),
    ),
    Decoder(
        "lake: the manifests of an archive",
        values.json_of(values.changed(ARCHIVE)),
        in_file(archived, "_qmq/manifests/00000001.json"),
        (errors.LogDamaged, errors.InvalidArgument),
        ("pyspark_qmq.lake.migration._apply", "pyspark_qmq.lake.migration._selection"),
        always=values.each_change(ARCHIVE),
    ),
)
