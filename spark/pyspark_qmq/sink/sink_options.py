"""The options of a write. Pure.

| option | |
|---|---|
| qmq.servers | metaservers, `host:port,host:port` |
| subject (or `topic`) | the subject of rows whose column `subject` is null or missing |
| createSubject | true: create missing subjects as unordered ones; default false |
| qmq.txnId | the writer's name instead of the query's id: a write that a new query or job repeats under this name stores no row twice |
| qmq.retryMs | how long a broker group may be unreachable during a write (60000) |
| qmq.compression | none (default), zstd, lz4: compression of bodies; delayed messages are never compressed |
| qmq.batchMessages | the most rows in one batch (8192) |

Names are case-insensitive. An unknown name is refused with the nearest known one.

With `qmq.txnId`, a row is identified by its position: a batch write needs a deterministic plan, and a stream that lost its checkpoint must
split its source into the same epochs again. In `foreachBatch`, where each epoch is a batch write, use a name per epoch, such as
`name-EPOCH`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from pyspark_qmq.option_values import OptionValues
from qmq import limits
from qmq.compression import Compression
from qmq.errors import InvalidArgument
from qmq.model import check_name

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
    creates: bool = False
    txn_id: str = ""
    retry_ms: int = RETRY_MS
    compression: Compression = Compression.NONE
    batch_messages: int = BATCH_MESSAGES

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> SinkOptions:
        """Parse a user's options. Raises InvalidArgument, InvalidName."""
        given = OptionValues(options, NAMES, SPARKS_OWN)
        servers = given.text("qmq.servers")
        if not servers:
            raise InvalidArgument("give the cluster: option qmq.servers (host:port of metaservers)")
        if given.has("path"):
            raise InvalidArgument('rows are written to brokers: .save() without a path, and .option("qmq.servers", ...)')
        retry_ms = given.number("qmq.retryMs", 0, RETRY_MS_MAX)
        return cls(
            servers,
            _subject(given),
            given.flag("createSubject", False),
            _txn_id(given),
            RETRY_MS if retry_ms is None else retry_ms,
            _compression(given),
            given.number("qmq.batchMessages", 1, limits.BATCH_MESSAGES_MAX) or BATCH_MESSAGES,
        )


def _subject(given: OptionValues) -> str:
    names = {given.text(name) for name in ("subject", "topic") if given.has(name)}
    if len(names) > 1:
        raise InvalidArgument(f"options subject and topic have the same meaning, but name {' and '.join(sorted(names))}: give one")
    return check_name("subject", names.pop()) if names else ""


def _txn_id(given: OptionValues) -> str:
    text = given.text("qmq.txnId")
    if given.has("qmq.txnId") and (not 0 < len(text) <= _TXN_CHARS_MAX or not text.isprintable()):
        raise InvalidArgument(
            f"option qmq.txnId must be a name of 1 to {_TXN_CHARS_MAX} printable characters, not {text[:_TXN_CHARS_MAX]!r}"
        )
    return text


def _compression(given: OptionValues) -> Compression:
    text = given.text("qmq.compression", "none").lower()
    known = {each.name.lower(): each for each in Compression}
    if text not in known:
        raise InvalidArgument(f"option qmq.compression must be one of {', '.join(known)}, not {text!r}")
    return known[text]
