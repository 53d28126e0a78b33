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

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from pyspark_qmq.read_options import unknown_option
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
        given = {str(name).lower(): str(value).strip() for name, value in options.items()}
        known = {name.lower() for name in NAMES}
        for name in given:
            if name not in known and name not in SPARKS_OWN:
                raise unknown_option(name, NAMES)
        if not given.get("qmq.servers"):
            raise InvalidArgument("give the cluster: option qmq.servers (host:port of metaservers)")
        if "path" in given:
            raise InvalidArgument('rows are written to brokers: .save() without a path, and .option("qmq.servers", ...)')
        return cls(
            given["qmq.servers"],
            _subject(given),
            _flag(given),
            _txn_id(given),
            _number(given, "qmq.retryMs", 0, RETRY_MS),
            _compression(given),
            _number(given, "qmq.batchMessages", 1, BATCH_MESSAGES, limits.BATCH_MESSAGES_MAX),
        )


def _subject(given: Mapping[str, str]) -> str:
    names = {given[name] for name in ("subject", "topic") if name in given}
    if len(names) > 1:
        raise InvalidArgument(f"options subject and topic have the same meaning, but name {' and '.join(sorted(names))}: give one")
    return check_name("subject", names.pop()) if names else ""


def _flag(given: Mapping[str, str]) -> bool:
    text = given.get("createsubject", "false").lower()
    if text not in ("true", "false"):
        raise InvalidArgument(f"option createSubject must be true or false, not {text!r}")
    return text == "true"


def _txn_id(given: Mapping[str, str]) -> str:
    text = given.get("qmq.txnid", "")
    if "qmq.txnid" in given and (not 0 < len(text) <= _TXN_CHARS_MAX or not text.isprintable()):
        raise InvalidArgument(
            f"option qmq.txnId must be a name of 1 to {_TXN_CHARS_MAX} printable characters, not {text[:_TXN_CHARS_MAX]!r}"
        )
    return text


def _number(given: Mapping[str, str], name: str, least: int, default: int, most: int = 10**12) -> int:
    text = given.get(name.lower(), str(default))
    if not re.fullmatch(r"\d{1,13}", text) or not least <= int(text) <= most:
        raise InvalidArgument(f"option {name} must be an integer from {least} to {most}, not {text!r}")
    return int(text)


def _compression(given: Mapping[str, str]) -> Compression:
    text = given.get("qmq.compression", "none").lower()
    known = {each.name.lower(): each for each in Compression}
    if text not in known:
        raise InvalidArgument(f"option qmq.compression must be one of {', '.join(known)}, not {text!r}")
    return known[text]
