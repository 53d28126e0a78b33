"""The decoders of commands, and of what backups and tiering store.

The decoders of what says who somebody is: tokens, keys of identity providers, certificates, files
of contexts.

The decoders of schemas, SQL, the client, Spark and the lake.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import hostile_values as values
import jwt
from cryptography.hazmat.primitives.asymmetric import ec
from hostile_values import (
    LETTER_HEADERS,
    LETTERS,
    NUMBER,
    PACKED,
    Decoder,
    Strategy,
    checked,
    checked_examples,
    delayed,
    each_delayed,
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
from qmq.backup import manifest, prune
from qmq.cli import arguments, browse, consume, delay, dlq, group, produce
from qmq.cli.mirroring import cluster_mirror
from qmq.cli.transfer import parquet_rows, records
from qmq.cli.transfer.loading import LoadJournal
from qmq.cli.transfer.message_source import record_of
from qmq.client import payloads, tracing
from qmq.client.consuming import ack_spool
from qmq.client.dead_letters import letter_of
from qmq.columns import offsets as spark_offsets
from qmq.columns.files import folders, routes
from qmq.columns.options import OptionValues
from qmq.log import step_record
from qmq.model import DeclaredSchema, DelayedId, MessageId, SchemaFormat
from qmq.operations import messages
from qmq.operations.messages import Followed, Inquiry
from qmq.operations.text import parse_key
from qmq.proto.v1 import control_pb2 as control
from qmq.rpc.channel import failures
from qmq.schemas import avro_schema, declared_schema, json_schema
from qmq.schemas.body_decoder import decoder_of
from qmq.security.access import JwtConfig
from qmq.security.contexts import ContextFile
from qmq.security.jwt_tokens import JwtVerifier
from qmq.security.tls import Credentials, Tls
from qmq.sql import debezium_outbox, outbox_message
from qmq.tiering import stored_segment

INT64: Final = st.integers(-(2**63), 2**63 - 1)

# --- commands: browse, consume, message, why, dlq, delay, import, mirror --------------------------


def place(
    data: bytes, found: dict[str, bytes], time_ms: int, *, is_directed: bool = False
) -> control.StoredMessage:
    return control.StoredMessage(
        message_id="0" * 32,
        subject="s",
        broker_group="g1",
        sequence=5,
        key=data,
        body=data,
        is_directed=is_directed,
        headers=[control.Header(name=name, value=value) for name, value in found.items()],
        create_time_ms=time_ms,
        append_time_ms=time_ms,
        due_ms=time_ms,
    )


@st.composite
def inquiries(draw: st.DrawFn) -> Inquiry:
    where = place(
        draw(values.BYTES),
        draw(values.headers("qmq-group", "qmq-attempt")),
        draw(INT64),
        is_directed=draw(st.booleans()),
    )
    kinds = st.sampled_from([*messages.WHAT, ""]) | values.WIRE_TEXTS
    last = control.MessageEvent(
        kind=draw(kinds), error=draw(values.WIRE_TEXTS), time_ms=draw(INT64)
    )
    state = draw(st.sampled_from(["new", "held", "waiting", "dying", "dead", "done", "parked"]))
    states = [
        control.MessageState(
            group="g",
            state=state,
            last=last,
            attempt=draw(st.integers(0, 2**31 - 1)),
            consumer=draw(values.WIRE_TEXTS),
        )
    ]
    return Inquiry(
        "0" * 32,
        [Followed(where, [last], states, now_ms=draw(values.TIMES_MS))],
        draw(st.lists(delayed(), max_size=1)),
    )


def each_inquiry() -> Iterator[Inquiry]:
    good = {"qmq-group": b"g", "qmq-attempt": b"1"}
    found = [
        place(each, {**good, name: each}, 5, is_directed=True)
        for each in values.BYTE_EXAMPLES
        for name in good
    ]
    found += [place(b"b", good, time) for time in (*values.TIME_EXAMPLES_MS, -1, -(2**63))]
    yield from [Inquiry("0" * 32, [Followed(each, [], [], now_ms=5)], []) for each in found]
    for text in values.WIRE_EXAMPLES:
        last = control.MessageEvent(kind=text, error=text, time_ms=2**63 - 1)
        state = control.MessageState(group="g", state="held", last=last, attempt=1, consumer=text)
        yield Inquiry("0" * 32, [Followed(place(b"b", good, 5), [last], [state], now_ms=5)], [])


def asked(inquiry: Inquiry) -> None:
    shown(messages.why(inquiry, 10**12))
    shown(messages.timeline(inquiry))
    shown([messages.message_facts(each.place) for each in inquiry.followed])


def browsed_line(message: Any) -> None:
    shown(browse.fields(message))
    for width in (80, None):
        browse.line(message, width).plain.encode()


def consumed(message: Any) -> None:
    for is_json, is_raw in ((True, False), (False, True), (False, False)):
        consume.Form(is_json, is_raw=is_raw).line(message, {})


def loaded(path: Path) -> None:
    with_journal = LoadJournal(path, {"subject": "s"})
    try:
        if with_journal.state is not None:
            with_journal.save(with_journal.state)
    finally:
        with_journal.close()


JOURNAL: Final = {
    **{"version": 1, "load": {"subject": "s"}, "base": "00ff", "ends": [["g1", 0, 5]]},
    **{"records": 5, "is_done": False, "mark": None},
}
NOTE: Final = {"mark": [["g1", 0, 5]], "ends": [["g1", 0, 5]], "time_ms": 5}
MIRROR: Final = {"notes": [NOTE, NOTE], "read_to": [["g1", 0, 5]], "moved": {"g": 5}}


def mirrored(path: Path) -> None:
    """What a mirror does with its record."""
    found = cluster_mirror.read_record(path.parent, "s")
    found.lag({("g1", 0): 9}, {})
    found.encode()
    for each in found.notes:
        each.is_done({("g1", 0): 5.0})


LINE: Final = {
    "body": "b",
    "key": "k",
    "tags": ["t"],
    "headers": {"h": "v"},
    "create_time_ms": 5,
    "id": "0" * 32,
}
LINES: Final = values.json_of(
    values.objects(
        body=values.TEXTS,
        body_base64=values.BASE64,
        key=values.TEXTS,
        tags=st.lists(values.TEXTS, max_size=2),
        headers=st.dictionaries(values.TEXTS, values.TEXTS, max_size=2),
        create_time_ms=values.ANY_TIMES_MS,
        id=values.TEXTS,
    )
)


def written(message: Any) -> None:
    records.record_of_line(records.json_line(record_of(message), {}), 1)
    cluster_mirror.path_of(record_of(message))


COMMANDS: Final = (
    Decoder(
        "qmq message and qmq why",
        inquiries(),
        asked,
        (),
        ("qmq.operations.text.key_text", "qmq.operations.messages.text_of"),
        always=tuple(each_inquiry()),
    ),
    Decoder(
        "qmq browse",
        values.browsed(),
        browsed_line,
        (),
        ("qmq.operations.messages.text_of",),
        always=values.each_browsed(),
    ),
    Decoder("qmq consume", values.received(), consumed, always=values.each_received()),
    Decoder(
        "qmq delay",
        delayed(),
        lambda message: shown(delay.message_facts(message)),
        always=each_delayed(),
    ),
    Decoder(
        "qmq dlq: a letter",
        values.received(st.just(LETTER_HEADERS) | LETTERS),
        lambda message: shown(dlq.whole_row(letter_of(message))),
        (errors.InvalidArgument,),
        ("qmq.cli.dlq._text",),
        always=values.each_received(LETTER_HEADERS),
    ),
    Decoder(
        "commands: a key",
        values.TEXTS
        | values.BASE64.map(lambda text: f"base64:{text}")
        | values.TEXTS.map(lambda text: f"hex:{text}"),
        parse_key,
        (errors.InvalidArgument,),
        ("qmq.operations.text.parse_key",),
        always=(
            *values.TEXT_EXAMPLES,
            *[f"{kind}:{text}" for kind in ("base64", "hex") for text in values.TEXT_EXAMPLES],
        ),
    ),
    Decoder(
        "commands: times and durations",
        values.TIME_TEXTS | values.TEXTS | values.NUMBERS.map(lambda number: f"{number}w"),
        lambda text: [
            each(text)
            for each in (
                tolerant(arguments.parse_when),
                tolerant(arguments.parse_duration),
                tolerant(browse.moment),
                group.parse_target,
            )
        ],
        (errors.InvalidArgument,),
        (
            "qmq.cli.arguments.parse_when",
            "qmq.cli.arguments.parse_duration",
            "qmq.cli.browse.moment",
            "qmq.cli.group.parse_target",
        ),
        always=(
            *values.TEXT_EXAMPLES,
            *[f"{number}w" for number in values.NUMBER_TEXTS],
            "999999999d",
        ),
    ),
    Decoder(
        "qmq send: a line of JSON",
        LINES,
        lambda line: produce.parse_line(1, line, None, None),
        (errors.InvalidArgument,),
        ("qmq.cli.produce.parse_line",),
        always=values.each_change(LINE),
    ),
    Decoder(
        "qmq import: a line",
        LINES,
        lambda line: records.record_of_line(line, 1),
        (errors.InvalidArgument,),
        ("qmq.cli.transfer.records.record_of_line", "qmq.cli.transfer.records._bytes_of"),
        always=values.each_change(LINE),
    ),
    Decoder(
        "qmq export and mirror: a message",
        values.browsed(),
        written,
        (),
        ("qmq.cli.transfer.records._body",),
        always=values.each_browsed(),
    ),
    Decoder(
        "qmq import: a Parquet file",
        values.BYTES | st.binary(max_size=30).map(lambda data: b"PAR1" + data + b"PAR1"),
        in_file(
            lambda path: (
                tolerant(parquet_rows.row_count)(path),
                list(parquet_rows.parquet_records(path, 0)),
            )
        ),
        (errors.InvalidArgument,),
        always=values.BYTE_EXAMPLES,
    ),
    Decoder(
        "qmq import and mirror: the state file",
        values.json_of(values.changed(JOURNAL)).map(lambda data: data + b"\n"),
        in_file(loaded),
        (errors.InvalidArgument,),
        (
            "qmq.cli.transfer.loading.LoadJournal._read",
            "qmq.cli.transfer.loading.LoadState.of_json",
        ),
        always=tuple(each + b"\n" for each in values.each_change(JOURNAL)),
    ),
    Decoder(
        "qmq mirror: the record",
        values.json_of(values.changed(MIRROR)),
        in_file(mirrored, "s.record"),
        (),
        (
            "qmq.cli.mirroring.mirror_notes.MirrorRecord.decode",
            "qmq.cli.mirroring.cluster_mirror.read_record",
        ),
        always=values.each_change(MIRROR),
    ),
)


# --- backups, stored segments ---------------------------------------------------------------------

SEGMENT: Final = (
    st.tuples(st.just(1), NUMBER, NUMBER, NUMBER, st.lists(NUMBER, max_size=3))
    .map(list)
    .map(packed)
)
CATALOG: Final = (
    st.tuples(st.just(1), *[st.lists(st.tuples(NUMBER, NUMBER), max_size=3)] * 2)
    .map(list)
    .map(packed)
)
KEYS: Final = (
    st.sampled_from(["/qmq/subjects/s", "/qmq/groups/g1/delay", "/qmq/replicas/x", ""])
    | values.WIRE_TEXTS
)

STEP_SETTLEMENTS: Final = st.one_of(
    st.tuples(
        *(st.just(4), values.WIRE_TEXTS, INT64, values.WIRE_TEXTS, values.WIRE_TEXTS),
        INT64,
        st.lists(st.tuples(*[INT64] * 4), max_size=2),
    ),
    st.tuples(
        *(st.just(10), values.WIRE_TEXTS, INT64, values.WIRE_TEXTS, values.WIRE_TEXTS),
        INT64,
        st.lists(st.tuples(*[INT64] * 2), max_size=2),
    ),
)
STEP_EFFECTS: Final = st.tuples(values.WIRE_TEXTS, st.booleans(), INT64, INT64, values.BYTES)
STEP_BAD: Final = tuple([("t", False, 0, 1, each) for each in values.BYTE_EXAMPLES])

STORED: Final = (
    Decoder(
        "backup: the manifest",
        checked(
            b"QMK1",
            PACKED
            | values.objects(version=st.just(1), id=values.WIRE_TEXTS, groups=st.just([])).map(
                packed
            ),
        ),
        lambda data: manifest.decode_manifest("20261121T130000000Z-ab12", data),
        (errors.BackupDamaged, errors.BackupVersion),
        ("qmq.backup.manifest.decode_manifest",),
        always=checked_examples(b"QMK1"),
    ),
    Decoder(
        "log: the record of a step",
        st.tuples(
            st.just(1), st.lists(STEP_SETTLEMENTS, max_size=2), st.lists(STEP_EFFECTS, max_size=2)
        ).map(packed)
        | PACKED,
        step_record.decode_record,
        (errors.CorruptBatch,),
        always=(
            *values.BYTE_EXAMPLES,
            *[packed([1, [[4, "s", 0, "g", "c", 1, [[0, 0, 0, 0]]]], [each]]) for each in STEP_BAD],
        ),
    ),
    Decoder(
        "backup: the cluster's keys",
        st.lists(st.tuples(KEYS, values.BYTES), max_size=3).map(packed) | PACKED,
        manifest.decode_items,
        (errors.BackupDamaged,),
        ("qmq.backup.manifest.decode_items",),
        always=(
            *values.BYTE_EXAMPLES,
            *[packed([("/qmq/groups/g1/delay", each)]) for each in values.BYTE_EXAMPLES],
        ),
    ),
    Decoder(
        "backup: names of objects",
        values.TEXTS.map(lambda text: f"running/create-{text}-x") | values.TEXTS,
        lambda name: (prune.mark_of(name), manifest.time_of_backup(name), manifest.id_of(name)),
        (),
        ("qmq.backup.manifest.time_of_backup",),
        always=(
            *values.TEXT_EXAMPLES,
            *[f"running/create-{each}-x" for each in values.TEXT_EXAMPLES],
        ),
    ),
    Decoder(
        "tiering: a manifest",
        checked(b"QMG1", SEGMENT | PACKED),
        stored_segment.decode_manifest,
        (stored_segment.BadManifest,),
        always=checked_examples(b"QMG1"),
    ),
    Decoder(
        "tiering: the catalog",
        checked(b"QMT1", CATALOG | PACKED),
        stored_segment.decode_catalog,
        always=checked_examples(b"QMT1"),
    ),
)


ISSUER: Final = "https://id.example"
KEY: Final = ec.generate_private_key(ec.SECP256R1())
PUBLIC: Final = json.loads(jwt.algorithms.ECAlgorithm.to_jwk(KEY.public_key()))
HEADER: Final = {"alg": "ES256", "kid": "one", "typ": "JWT"}
CLAIMS: Final = {"iss": ISSUER, "aud": "qmq", "sub": "app:a", "exp": 2_000_000_000, "nbf": 5}
CONTEXTS: Final = {"current": "c", "contexts": {"c": {"bootstrap": "a:1"}}}


def unsigned(*parts: bytes) -> str:
    """A token of this header, these claims and this signature."""
    return ".".join(jwt.utils.base64url_encode(each).decode() for each in (*parts, b"", b"")[:3])


def signed(claims: bytes) -> str:
    """A token that the identity provider signed: a person may choose its claims there."""
    return jwt.PyJWS().encode(claims, KEY, "ES256", {"kid": "one"})


TOKENS: Final = st.one_of(
    values.TEXTS,
    st.tuples(values.json_of(values.changed(HEADER)), values.BYTES, values.BYTES).map(
        lambda parts: unsigned(*parts)
    ),
    values.json_of(values.changed(CLAIMS)).map(signed),
)


def verifier(keys: bytes) -> JwtVerifier:
    return JwtVerifier(
        JwtConfig(ISSUER, f"{ISSUER}/jwks"), fetch=lambda: keys, now_ms=lambda: 10**12
    )


VERIFIER: Final = verifier(json.dumps({"keys": [{**PUBLIC, "kid": "one"}]}).encode())


def contexts(path: Path) -> Any:
    path.chmod(0o600)
    return ContextFile(path).load()


def authority(path: Path) -> Any:
    return Credentials(Tls(path)).client_context()


IDENTITY: Final = (
    Decoder(
        "a token of an identity provider",
        TOKENS,
        VERIFIER.verify,
        (errors.NotAuthenticated,),
        ("qmq.security.jwt_tokens.JwtVerifier.claims",),
        always=(
            *values.TEXT_EXAMPLES,
            *[unsigned(each) for each in values.each_change(HEADER)],
            *[signed(each) for each in values.each_change(CLAIMS)],
        ),
    ),
    Decoder(
        "an identity provider's keys",
        values.json_of(
            values.objects(
                keys=st.lists(values.changed({**PUBLIC, "kid": "one", "use": "sig"}), max_size=3)
            )
        ),
        verifier,
        (),
        ("qmq.security.jwt_tokens._parse",),
        always=values.each_change({"keys": [{**PUBLIC, "kid": "one", "use": "sig"}]}),
    ),
    Decoder(
        "the file of contexts",
        values.json_of(values.changed(CONTEXTS)),
        in_file(contexts, "contexts.json"),
        (errors.InvalidArgument,),
        ("qmq.security.contexts.ContextFile.load",),
        always=values.each_change(CONTEXTS),
    ),
    Decoder(
        "certificates",
        values.BYTES,
        in_file(authority, "ca.pem"),
        (errors.InvalidArgument,),
        ("qmq.security.tls.Credentials._fill",),
        always=values.BYTE_EXAMPLES,
    ),
)


# --- schemas, SQL, the client ---------------------------------------------------------------------

NAMES: Final = st.sampled_from(["a", "b", "R", "n.R"]) | values.TEXTS
AVRO_TYPES: Final = st.recursive(
    st.sampled_from(["int", "string", "null", "R", "n.R", "bytes"]) | values.JSON_VALUES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        values.objects(
            type=st.just("record") | inner,
            name=NAMES,
            fields=st.lists(values.objects(name=NAMES, type=inner), max_size=3),
        ),
        values.objects(
            type=st.sampled_from(["array", "map", "enum", "fixed"]),
            items=inner,
            values=inner,
            name=NAMES,
            symbols=st.just(["A"]),
        ),
        values.objects(type=st.just("int"), logicalType=st.just("date") | values.JSON_VALUES),
    ),
    max_leaves=8,
)
JSON_TYPES: Final = st.recursive(
    values.objects(type=st.sampled_from(["object", "string", "integer", "array", "null"]))
    | values.JSON_VALUES,
    lambda inner: values.objects(
        **{
            "type": st.just("object"),
            "$ref": st.sampled_from(["#", "#/$defs/a", "#/x"]),
            "anyOf": st.lists(inner, max_size=2),
        },
        **{
            "$defs": st.dictionaries(NAMES, inner, max_size=2),
            "properties": st.dictionaries(NAMES, inner, max_size=2),
        },
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
    return (
        types.map(json.dumps)
        | values.TEXTS
        | st.sampled_from([each.decode("latin-1") for each in values.DEEP])
    )


def fits(text: str) -> None:
    """Whether a schema from a registry may follow itself."""
    for kind in SchemaFormat:
        found = DeclaredSchema(kind, text)
        try:
            declared_schema.struct_of(found)
        except errors.InvalidArgument:
            continue
        declared_schema.require("s", found, found)
        decoder_of([found])


RECORD: Final = {
    "type": "record",
    "name": "R",
    "fields": [
        {"name": "a", "type": ["null", "long"]},
        {"name": "b", "type": {"type": "array", "items": "string"}},
    ],
}
OBJECT: Final = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "array", "items": {"type": "string"}}},
}
AVRO_EXAMPLES: Final = values.each_change_as_text(RECORD) + values.TEXT_EXAMPLES
JSON_EXAMPLES: Final = values.each_change_as_text(OBJECT) + values.TEXT_EXAMPLES
DECLARED: Final = (
    DeclaredSchema(SchemaFormat.AVRO, json.dumps(RECORD), version=1),
    DeclaredSchema(SchemaFormat.JSON_SCHEMA, json.dumps(OBJECT), version=1),
)


def typed(given: tuple[int, list[bytes]]) -> None:
    """What `qmq lake follow --typed` makes of bodies: values that fit into a column, and
    reasons.
    """
    schema = DECLARED[given[0]]
    fitting, reasons = task_runner.decoded(decoder_of([schema]), given[1])
    typed_columns.column(
        fitting, declared_schema.struct_of(schema), declared_schema.struct_of(schema)
    )
    shown(list(reasons.values()))


ROW: Final = st.tuples(
    st.integers(),
    values.BYTES,
    st.just("s") | values.TEXTS,
    st.none() | values.BYTES,
    st.none(),
    st.none()
    | values.json_of(st.lists(values.TEXTS)).map(lambda data: data.decode("utf-8", "replace")),
    st.none()
    | values.json_of(st.dictionaries(values.TEXTS, values.TEXTS)).map(
        lambda data: data.decode("utf-8", "replace")
    ),
    values.BYTES,
    st.none() | NUMBER,
    NUMBER,
    st.none(),
).map(
    lambda row: (
        *row[:10],
        len(row[3] or b"") + len(row[5] or "") + len(row[6] or "") + len(row[7]),
    )
)
SPOOL: Final = st.lists(
    values.json_of(
        values.objects(version=st.just(1), broker_group=values.TEXTS, attach=values.JSON_VALUES)
        | values.objects(
            first=NUMBER,
            last=NUMBER,
            delay_ms=NUMBER,
            time_ms=NUMBER,
            error=values.TEXTS,
            verdict=st.just("ACK"),
        )
    ),
    max_size=3,
).map(lambda lines: b"\n".join([*lines, b""]))

SPOOL_FIRST: Final = {"version": 1, "broker_group": "g1", "attach": {}}
SPOOL_LINE: Final = {
    "first": 1,
    "last": 2,
    "delay_ms": 0,
    "time_ms": 5,
    "error": "e",
    "verdict": "ACK",
}
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
        DeclaredSchema.decode,
        (ValueError, KeyError, TypeError),
        always=values.each_change(
            {"format": "avro", "text": "t", "compatibility": "none", "version": 1, "created_ms": 5}
        ),
    ),
    Decoder(
        "lake: bodies by a schema",
        st.tuples(
            st.integers(0, 1), st.lists(values.json_of(st.just({"a": 1, "b": ["x"]})), max_size=3)
        ),
        typed,
        always=tuple(
            (kind, [each]) for kind in (0, 1) for each in values.each_change({"a": 1, "b": ["x"]})
        ),
    ),
    Decoder(
        "SQL: a row of an outbox",
        ROW,
        lambda row: (
            outbox_message.from_row(row).message and outbox_message.from_row(row).message.row()
        ),
        (),
        ("qmq.sql.outbox_message.from_row", "qmq.sql.outbox_message.OutboxMessage.row"),
        always=EACH_ROW,
    ),
    Decoder(
        "SQL: a row of Debezium's table",
        st.tuples(
            values.TEXTS | values.BYTES | NUMBER | st.none(), values.JSON_VALUES | values.BYTES
        ),
        lambda row: (debezium_outbox.message_id(row[0]), debezium_outbox.body_of(row[1])),
        (errors.InvalidArgument,),
        ("qmq.sql.debezium_outbox.message_id",),
        always=tuple(
            (each, each)
            for each in (*values.TEXT_EXAMPLES, *values.BYTE_EXAMPLES, *values.JSON_EXAMPLES)
        ),
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
        always=tuple(
            (kind, each)
            for kind in (str, dict, int, list[int], datetime)
            for each in values.BYTE_EXAMPLES
        ),
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
        ack_spool.unpack,
        (ValueError,),
        ("qmq.client.consuming.ack_spool.unpack",),
        always=(
            *[
                b"\n".join([each, json.dumps(SPOOL_LINE).encode(), b""])
                for each in values.each_change(SPOOL_FIRST)
            ],
            *[
                b"\n".join([json.dumps(SPOOL_FIRST).encode(), each, b""])
                for each in values.each_change(SPOOL_LINE)
            ],
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

# --- Spark, and the lake's tables -----------------------------------------------------------------

POSITIONS: Final = values.json_of(
    st.dictionaries(st.just("0@g1") | values.TEXTS, NUMBER | values.NUMBERS | st.floats())
)
OFFSETS: Final = st.dictionaries(
    values.TEXTS, st.dictionaries(st.just("0@g1") | values.TEXTS, NUMBER | values.NUMBERS)
)
PARTITION: Final = {
    "number": 1,
    "first_lp": 0,
    "end_lp": 4,
    "broker_group": "g1",
    "version": 1,
    "sources": [1],
}
ROUTE: Final = {
    "subject": "s",
    "order": "strict",
    "logical_partitions": 4,
    "version": 1,
    "partitions": [PARTITION],
    "sealed_at": {"1": 5},
}
ARCHIVE: Final = {
    "kind": "add",
    "gone": [],
    "files": [{"path": "a/b.parquet", "rows": 5}],
    "to": {"s": {"0@g1": 5}},
}
CHECKPOINT: Final = (
    st.tuples(
        st.just(1),
        NUMBER,
        NUMBER,
        st.none(),
        st.none(),
        values.BYTES,
        st.none(),
        st.binary(min_size=32, max_size=64),
    )
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
        st.tuples(
            values.TEXTS | values.json_of(st.just(["a"])).map(lambda data: data.decode("latin-1")),
            st.none(),
        ),
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
        always=values.each_change_as_text({"s": {"0@g1": 5}}),
    ),
    Decoder(
        "Spark: the offsets of a checkpoint",
        OFFSETS,
        lambda found: (spark_offsets.of_json(found), spark_offsets.per_task_of_json(found)),
        (errors.InvalidArgument,),
        ("qmq.columns.model.QueueKey.parse",),
        always=tuple(
            {each: {other: number}}
            for each in values.TEXT_EXAMPLES
            for other in ("0@g1", each)
            for number in (5, 2**64, each)
        ),
    ),
    Decoder(
        "Spark: the progress of a query",
        OFFSETS
        | values.json_of(OFFSETS).map(lambda data: data.decode("latin-1"))
        | values.JSON_VALUES,
        progress,
        (errors.InvalidArgument,),
        ("pyspark_qmq.stream._mapping",),
        always=(*values.JSON_EXAMPLES, *values.each_change_as_text({"s": {"0@g1": 5}})),
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
        values.json_of(
            values.JSON_VALUES.map(lambda value: {"content": json.dumps(value)})
            | st.just({"content": "{"})
        ),
        in_file(
            lambda path: (
                Path(path.parent, "broker/message").mkdir(parents=True),
                folders.find_folders([str(path.parent)]),
            ),
            "replica.json",
        ),
        (errors.InvalidArgument,),
        ("qmq.columns.files.folders._replica_group",),
        always=values.each_change({"content": '{"group": "g1"}'}),
    ),
    Decoder(
        "Spark: a schedule's files",
        checked(b"QMS1", CHECKPOINT | PACKED),
        schedules.of_mark,
        (errors.LogDamaged,),
        ("pyspark_qmq.datasets.schedules.of_mark",),
        always=checked_examples(b"QMS1"),
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
        always=values.each_change_as_text({"0@g1": 5}),
    ),
    Decoder(
        "lake: the files of rejected messages",
        values.json_of(
            values.objects(round=values.TEXTS, files=st.lists(values.TEXTS, max_size=2))
        ).map(lambda data: data.decode("latin-1")),
        pending_of,
        (errors.LogDamaged,),
        ("pyspark_qmq.lake.typed.pending_of",),
        always=values.each_change_as_text({"round": "1", "files": ["a"]}),
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
