"""What a user may ask of a write. Pure.

| option | |
|---|---|
| qmq.servers | metaservers, `host:port,host:port` |
| subject (or `topic`) | where rows go whose column `subject` is null, or that have none |
| createSubject | true: create subjects that do not exist, unordered, as the cluster places them; default false |
| qmq.txnId | names the writer instead of the query's id: a write that is repeated under it, by a new query or job, stores nothing twice |
| qmq.retryMs | how long a broker group may be away in mid-write (60000) |
| qmq.compression | none (default), zstd, lz4: of bodies; delayed ones are never compressed |
| qmq.batchMessages | the most rows in one batch (8192) |

Names are case-insensitive. What is misspelt is refused with the nearest name.

With `qmq.txnId` a row is known by its place: a batch write has to have a deterministic plan, and a stream that lost its checkpoint has to
cut its source in the same epochs again. In `foreachBatch`, where each epoch is a batch write, give each its own, such as `name-EPOCH`.
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
"""What Spark's own methods put among the options."""
RETRY_MS: Final = 60_000
BATCH_MESSAGES: Final = 8_192
_TXN_CHARS_MAX: Final = 200


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """Checked; can be sent to executors."""

    servers: str
    subject: str = ""
    """Of rows that name none; empty: each has to."""
    creates: bool = False
    txn_id: str = ""
    retry_ms: int = RETRY_MS
    compression: Compression = Compression.NONE
    batch_messages: int = BATCH_MESSAGES

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> SinkOptions:
        """Raises InvalidArgument, InvalidName."""
        given = {str(name).lower(): str(value).strip() for name, value in options.items()}
        known = {name.lower() for name in NAMES}
        for name in given:
            if name not in known and name not in SPARKS_OWN:
                raise unknown_option(name, NAMES)
        if not given.get("qmq.servers"):
            raise InvalidArgument("say where to write: option qmq.servers (host:port of metaservers)")
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
        raise InvalidArgument(f"options subject and topic say the same thing, but name {' and '.join(sorted(names))}: give one")
    return check_name("subject", names.pop()) if names else ""


def _flag(given: Mapping[str, str]) -> bool:
    text = given.get("createsubject", "false").lower()
    if text not in ("true", "false"):
        raise InvalidArgument(f"option createSubject is true or false, not {text!r}")
    return text == "true"


def _txn_id(given: Mapping[str, str]) -> str:
    text = given.get("qmq.txnid", "")
    if "qmq.txnid" in given and (not 0 < len(text) <= _TXN_CHARS_MAX or not text.isprintable()):
        raise InvalidArgument(f"option qmq.txnId is a name of 1 to {_TXN_CHARS_MAX} printable characters, not {text[:_TXN_CHARS_MAX]!r}")
    return text


def _number(given: Mapping[str, str], name: str, least: int, default: int, most: int = 10**12) -> int:
    text = given.get(name.lower(), str(default))
    if not re.fullmatch(r"\d{1,13}", text) or not least <= int(text) <= most:
        raise InvalidArgument(f"option {name} is a whole number from {least} to {most}, not {text!r}")
    return int(text)


def _compression(given: Mapping[str, str]) -> Compression:
    text = given.get("qmq.compression", "none").lower()
    known = {each.name.lower(): each for each in Compression}
    if text not in known:
        raise InvalidArgument(f"option qmq.compression is one of {', '.join(known)}, not {text!r}")
    return known[text]
