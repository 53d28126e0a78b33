"""The options and the columns of a write, checked when it is planned. Pure.

    qmq.servers            metaservers, `host:port,host:port`
    subject (or `topic`)   the subject of rows whose column `subject` is null or missing
    createSubject          false: refuse a missing subject; default true: create it, unordered, as a
                           first message does, unless the cluster creates none (QMQ_CREATE_SUBJECTS)
    qmq.txnId              the writer's name instead of the query's id: a write that a new query or
                           job repeats under this name stores no row twice
    qmq.retryMs            how long a server may be unreachable during a write (60000; without the
                           option, 4000 before the first row is written)
    qmq.compression        none (default), zstd, lz4: compression of bodies; delayed messages are
                           never compressed
    qmq.batchMessages      the most rows in one batch (8192)

Names are case-insensitive. An unknown name is refused with the nearest known one.

With `qmq.txnId`, a row is identified by its position: a batch write needs a deterministic plan, and
a stream that lost its checkpoint must split its source into the same epochs again. In
`foreachBatch`, the number of the batch is the epoch: one name serves all batches, and two writes in
a batch need two names.

The columns of a DataFrame become the parts of a message:

| column | type | |
|---|---|---|
| body (or `value`) | binary or string | required; never null |
| subject (or `topic`) | string | null: the option `subject` |
| key | binary or string | null: none; required by ordered subjects |
| tag | string | null: none |
| tags | array<string> | instead of `tag` |
| headers | map<string,string> or map<string,binary> | |
| delay_ms | bigint or int | delay in milliseconds; null: none |
| deliver_at | timestamp | instead of `delay_ms`: the due time; null: none |
| create_time | timestamp | the message's create time; never null; without the column: now |
| message_id | string | 32 hexadecimal digits, instead of the row's own; unique within an epoch |

Names are case-insensitive, as in Spark. Any other column is refused, because it would not be
written.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from pyspark.sql.types import StructField, StructType

from qmq import limits
from qmq.columns.options import FIRST_MS, OptionValues
from qmq.errors import InvalidArgument
from qmq.model import check_name
from qmq.wire.batch_columns import Compression

NAMES: Final = (
    "qmq.servers",
    "subject",
    "topic",
    "createSubject",
    "qmq.txnId",
    "qmq.retryMs",
    "qmq.compression",
    "qmq.batchMessages",
)
SPARKS_OWN: Final = frozenset({"checkpointlocation", "queryname", "outputmode", "path"})
"""Options that Spark's own methods add."""
RETRY_MS: Final = 60_000
RETRY_MS_MAX: Final = 10**12
BATCH_MESSAGES: Final = 8_192
_TXN_CHARS_MAX: Final = 200


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """Validated options; picklable for executors."""

    servers: str
    subject: str = ""
    """The subject of rows without one; empty: every row must name its subject."""
    creates: bool = True
    txn_id: str = ""
    retry_ms: int = RETRY_MS
    compression: Compression = Compression.NONE
    batch_messages: int = BATCH_MESSAGES
    first_ms: int = FIRST_MS
    """The same as `retry_ms`, before the first row is written."""

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> SinkOptions:
        """Parse a user's options. Raises InvalidArgument, InvalidName."""
        given = OptionValues(options, NAMES, SPARKS_OWN)
        servers = given.text("qmq.servers")
        if not servers:
            raise InvalidArgument("give the cluster: option qmq.servers (host:port of metaservers)")
        if given.has("path"):
            raise InvalidArgument(
                "rows are written to brokers: .save() without a path, and "
                '.option("qmq.servers", ...)'
            )
        retry_ms = given.number("qmq.retryMs", 0, RETRY_MS_MAX)
        return cls(
            servers,
            _subject(given),
            given.flag("createSubject", True),
            _txn_id(given),
            RETRY_MS if retry_ms is None else retry_ms,
            _compression(given),
            given.number("qmq.batchMessages", 1, limits.BATCH_MESSAGES_MAX) or BATCH_MESSAGES,
            FIRST_MS if retry_ms is None else retry_ms,
        )


def _subject(given: OptionValues) -> str:
    names = {given.text(name) for name in ("subject", "topic") if given.has(name)}
    if len(names) > 1:
        raise InvalidArgument(
            "options subject and topic have the same meaning, but name "
            f"{' and '.join(sorted(names))}: give one"
        )
    return check_name("subject", names.pop()) if names else ""


def _txn_id(given: OptionValues) -> str:
    text = given.text("qmq.txnId")
    if given.has("qmq.txnId") and (not 0 < len(text) <= _TXN_CHARS_MAX or not text.isprintable()):
        raise InvalidArgument(
            f"option qmq.txnId must be a name of 1 to {_TXN_CHARS_MAX} printable characters, "
            f"not {text[:_TXN_CHARS_MAX]!r}"
        )
    return text


def _compression(given: OptionValues) -> Compression:
    text = given.text("qmq.compression", "none").lower()
    known = {each.name.lower(): each for each in Compression}
    if text not in known:
        raise InvalidArgument(
            f"option qmq.compression must be one of {', '.join(known)}, not {text!r}"
        )
    return known[text]


_TEXT: Final = ("string", "binary")
COLUMNS: Final[dict[str, tuple[str, ...]]] = {
    "body": ("binary", "string"),
    "subject": ("string",),
    "key": _TEXT,
    "tag": ("string",),
    "tags": ("array<string>",),
    "headers": ("map<string,string>", "map<string,binary>"),
    "delay_ms": ("bigint", "int"),
    "deliver_at": ("timestamp",),
    "create_time": ("timestamp",),
    "message_id": ("string",),
}
_ALIASES: Final = {"value": "body", "topic": "subject"}
_ONE_OF: Final = (("tag", "tags"), ("delay_ms", "deliver_at"))


@dataclass(frozen=True, slots=True)
class Fields:
    """The index of each column in a record batch; -1: absent. Picklable for executors."""

    body: int
    subject: int = -1
    key: int = -1
    tag: int = -1
    tags: int = -1
    headers: int = -1
    delay_ms: int = -1
    deliver_at: int = -1
    create_time: int = -1
    message_id: int = -1

    @property
    def has_delays(self) -> bool:
        """Whether rows may be delayed."""
        return self.delay_ms >= 0 or self.deliver_at >= 0

    @classmethod
    def of(cls, schema: StructType, *, has_subject: bool) -> Fields:
        """Read a DataFrame's schema. `has_subject`: rows without a subject have a default one.
        Raises InvalidArgument.
        """
        places: dict[str, int] = {}
        for place, field in enumerate(schema.fields):
            name = _name_of(field)
            if name in places:
                raise InvalidArgument(
                    f"columns {schema.fields[places[name]].name!r} and {field.name!r} both "
                    f"are the {name}: keep one"
                )
            places[name] = place
        if "body" not in places:
            raise InvalidArgument("the rows need a column `body` (or `value`)")
        if "subject" not in places and not has_subject:
            raise InvalidArgument("give the rows' subject: option subject, or a column `subject`")
        for first, second in _ONE_OF:
            if first in places and second in places:
                raise InvalidArgument(
                    f"columns {first!r} and {second!r} have the same meaning: keep one"
                )
        return cls(**places)


def _name_of(field: StructField) -> str:
    lower = field.name.lower()
    name = _ALIASES.get(lower, lower)
    if name not in COLUMNS:
        near = difflib.get_close_matches(lower, [*COLUMNS, *_ALIASES], 1)
        hint = (
            f"did you mean {near[0]!r}?"
            if near
            else f"drop it, or put it into `headers`; columns: {', '.join(COLUMNS)}"
        )
        raise InvalidArgument(f"a message has no column {field.name!r}: {hint}")
    kind = field.dataType.simpleString()
    if kind not in COLUMNS[name]:
        raise InvalidArgument(
            f"column {field.name!r} must be {' or '.join(COLUMNS[name])}, not {kind}: cast it"
        )
    return name
