"""The decoders of commands, and of what backups and tiering store.

The decoders of what says who somebody is: tokens, keys of identity providers, certificates, files of contexts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import hostile_values as values
import jwt
from cryptography.hazmat.primitives.asymmetric import ec
from decoder import (
    LETTER_HEADERS,
    LETTERS,
    NUMBER,
    PACKED,
    Decoder,
    checked,
    delayed,
    each_delayed,
    in_file,
    letter,
    packed,
    shown,
    tolerant,
)
from hypothesis import strategies as st

from qmq import errors
from qmq.backup import manifest, prune
from qmq.cli import arguments, browse, consume, delay, dlq, group, produce
from qmq.cli.mirroring import mirror_subject
from qmq.cli.transfer import parquet_rows, records
from qmq.cli.transfer.loading import LoadJournal
from qmq.cli.transfer.transfer_record import record_of
from qmq.log.segment_index import with_checksum
from qmq.operations import messages
from qmq.operations.messages import Followed, Inquiry
from qmq.operations.text import parse_key
from qmq.proto.v1 import control_pb2 as control
from qmq.security.access import JwtConfig
from qmq.security.contexts import ContextFile
from qmq.security.jwt_tokens import JwtVerifier
from qmq.security.tls import Credentials, Tls
from qmq.tiering import stored_segment

INT64: Final = st.integers(-(2**63), 2**63 - 1)

# --- commands: browse, consume, message, why, dlq, delay, import, mirror --------------------------------------------------


def place(data: bytes, found: dict[str, bytes], time_ms: int, *, is_directed: bool = False) -> control.StoredMessage:
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
    where = place(draw(values.BYTES), draw(values.headers("qmq-group", "qmq-attempt")), draw(INT64), is_directed=draw(st.booleans()))
    kinds = st.sampled_from([*messages.WHAT, ""]) | values.WIRE_TEXTS
    last = control.MessageEvent(kind=draw(kinds), error=draw(values.WIRE_TEXTS), time_ms=draw(INT64))
    state = draw(st.sampled_from(["new", "held", "waiting", "dying", "dead", "done", "parked"]))
    states = [
        control.MessageState(group="g", state=state, last=last, attempt=draw(st.integers(0, 2**31 - 1)), consumer=draw(values.WIRE_TEXTS))
    ]
    return Inquiry("0" * 32, [Followed(where, [last], states, now_ms=draw(values.TIMES_MS))], draw(st.lists(delayed(), max_size=1)))


def each_inquiry() -> Iterator[Inquiry]:
    good = {"qmq-group": b"g", "qmq-attempt": b"1"}
    found = [place(each, {**good, name: each}, 5, is_directed=True) for each in values.BYTE_EXAMPLES for name in good]
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
    for form in (consume.Form(True, is_raw=False), consume.Form(False, is_raw=True), consume.Form(False, is_raw=False)):
        form.line(message, {})


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
    found = mirror_subject.read_record(path.parent, "s")
    found.lag({("g1", 0): 9}, {})
    found.encode()
    for each in found.notes:
        each.is_done({("g1", 0): 5.0})


LINE: Final = {"body": "b", "key": "k", "tags": ["t"], "headers": {"h": "v"}, "create_time_ms": 5, "id": "0" * 32}
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
    mirror_subject.path_of(record_of(message))


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
    Decoder(
        "qmq consume",
        values.received(),
        consumed,
        always=values.each_received(),
    ),
    Decoder("qmq delay", delayed(), lambda message: shown(delay.message_facts(message)), always=each_delayed()),
    Decoder(
        "qmq dlq: a letter",
        values.received(st.just(LETTER_HEADERS) | LETTERS),
        lambda message: shown(dlq.whole_row(letter(message))),
        (errors.InvalidArgument,),
        ("qmq.cli.dlq._text",),
        always=values.each_received(LETTER_HEADERS),
    ),
    Decoder(
        "commands: a key",
        values.TEXTS | values.BASE64.map(lambda text: f"base64:{text}") | values.TEXTS.map(lambda text: f"hex:{text}"),
        parse_key,
        (errors.InvalidArgument,),
        ("qmq.operations.text.parse_key",),
        always=(*values.TEXT_EXAMPLES, *[f"{kind}:{text}" for kind in ("base64", "hex") for text in values.TEXT_EXAMPLES]),
    ),
    Decoder(
        "commands: times and durations",
        values.TIME_TEXTS | values.TEXTS | values.NUMBERS.map(lambda number: f"{number}w"),
        lambda text: [
            each(text)
            for each in (tolerant(arguments.parse_when), tolerant(arguments.parse_duration), tolerant(browse.moment), group.parse_target)
        ],
        (errors.InvalidArgument,),
        ("qmq.cli.arguments.parse_when", "qmq.cli.arguments.parse_duration", "qmq.cli.browse.moment", "qmq.cli.group.parse_target"),
        always=(*values.TEXT_EXAMPLES, *[f"{number}w" for number in values.NUMBER_TEXTS], "999999999d"),
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
        in_file(lambda path: (tolerant(parquet_rows.row_count)(path), list(parquet_rows.parquet_records(path, 0)))),
        (errors.InvalidArgument,),
        always=values.BYTE_EXAMPLES,
    ),
    Decoder(
        "qmq import and mirror: the state file",
        values.json_of(values.changed(JOURNAL)).map(lambda data: data + b"\n"),
        in_file(loaded),
        (errors.InvalidArgument,),
        ("qmq.cli.transfer.loading.LoadJournal._read", "qmq.cli.transfer.loading.LoadState.of_json"),
        always=tuple(each + b"\n" for each in values.each_change(JOURNAL)),
    ),
    Decoder(
        "qmq mirror: the record",
        values.json_of(values.changed(MIRROR)),
        in_file(mirrored, "s.record"),
        (),
        ("qmq.cli.mirroring.mirror_notes.MirrorRecord.decode", "qmq.cli.mirroring.mirror_subject.read_record"),
        always=values.each_change(MIRROR),
    ),
)


# --- backups, stored segments --------------------------------------------------------------------------------------------

SEGMENT: Final = st.tuples(st.just(1), NUMBER, NUMBER, NUMBER, st.lists(NUMBER, max_size=3)).map(list).map(packed)
CATALOG: Final = st.tuples(st.just(1), *[st.lists(st.tuples(NUMBER, NUMBER), max_size=3)] * 2).map(list).map(packed)
KEYS: Final = st.sampled_from(["/qmq/subjects/s", "/qmq/groups/g1/delay", "/qmq/replicas/x", ""]) | values.WIRE_TEXTS

STORED: Final = (
    Decoder(
        "backup: the manifest",
        checked(b"QMK1", PACKED | values.objects(version=st.just(1), id=values.WIRE_TEXTS, groups=st.just([])).map(packed)),
        lambda data: manifest.decode_manifest("20261121T130000000Z-ab12", data),
        (errors.BackupDamaged, errors.BackupVersion),
        ("qmq.backup.manifest.decode_manifest",),
        always=(*values.BYTE_EXAMPLES, *[with_checksum(b"QMK1", each) for each in values.BYTE_EXAMPLES]),
    ),
    Decoder(
        "backup: the cluster's keys",
        st.lists(st.tuples(KEYS, values.BYTES), max_size=3).map(packed) | PACKED,
        manifest.decode_items,
        (errors.BackupDamaged,),
        ("qmq.backup.manifest.decode_items",),
        always=(*values.BYTE_EXAMPLES, *[packed([("/qmq/groups/g1/delay", each)]) for each in values.BYTE_EXAMPLES]),
    ),
    Decoder(
        "backup: names of objects",
        values.TEXTS.map(lambda text: f"running/create-{text}-x") | values.TEXTS,
        lambda name: (prune.mark_of(name), manifest.time_of_backup(name), manifest.id_of(name)),
        (),
        ("qmq.backup.manifest.time_of_backup",),
        always=(*values.TEXT_EXAMPLES, *[f"running/create-{each}-x" for each in values.TEXT_EXAMPLES]),
    ),
    Decoder(
        "tiering: a manifest",
        checked(b"QMG1", SEGMENT | PACKED),
        lambda data: stored_segment.decode_manifest(data),
        (stored_segment.BadManifest,),
        always=(*values.BYTE_EXAMPLES, *[with_checksum(b"QMG1", each) for each in values.BYTE_EXAMPLES]),
    ),
    Decoder(
        "tiering: the catalog",
        checked(b"QMT1", CATALOG | PACKED),
        lambda data: stored_segment.decode_catalog(data),
        always=(*values.BYTE_EXAMPLES, *[with_checksum(b"QMT1", each) for each in values.BYTE_EXAMPLES]),
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
    st.tuples(values.json_of(values.changed(HEADER)), values.BYTES, values.BYTES).map(lambda parts: unsigned(*parts)),
    values.json_of(values.changed(CLAIMS)).map(signed),
)


def verifier(keys: bytes) -> JwtVerifier:
    return JwtVerifier(JwtConfig(ISSUER, f"{ISSUER}/jwks"), fetch=lambda: keys, now_ms=lambda: 10**12)


VERIFIER: Final = verifier(json.dumps({"keys": [{**PUBLIC, "kid": "one"}]}).encode())


def contexts(data: bytes) -> Any:
    with TemporaryDirectory() as folder:
        path = Path(folder, "contexts.json")
        path.touch(0o600)
        path.write_bytes(data)
        return ContextFile(path).load()


def authority(data: bytes) -> Any:
    with TemporaryDirectory() as folder:
        path = Path(folder, "ca.pem")
        path.write_bytes(data)
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
        values.json_of(values.objects(keys=st.lists(values.changed({**PUBLIC, "kid": "one", "use": "sig"}), max_size=3))),
        verifier,
        (),
        ("qmq.security.jwt_tokens._parse",),
        always=values.each_change({"keys": [{**PUBLIC, "kid": "one", "use": "sig"}]}),
    ),
    Decoder(
        "the file of contexts",
        values.json_of(values.changed(CONTEXTS)),
        contexts,
        (errors.InvalidArgument,),
        ("qmq.security.contexts.ContextFile.load",),
        always=values.each_change(CONTEXTS),
    ),
    Decoder(
        "certificates",
        values.BYTES,
        authority,
        (errors.InvalidArgument,),
        ("qmq.security.tls.Credentials._fill",),
        always=values.BYTE_EXAMPLES,
    ),
)
