"""The options of a read, named like those of Spark's Kafka source. Pure.

    qmq.servers              metaservers, `host:port,host:port`: read from brokers
    qmq.path (or `path`)     folders, with commas or a glob: read segment files
    qmq.routes               with a path: a file that `qmq route export` wrote
    qmq.committed            with a path: `all`: treat all whole entries as committed
    qmq.retryMs              how long a server may be unreachable during a read (60000; without
                             the option, 4000 for a driver that has not reached a metaserver yet)
    qmq.lake                 history from Iceberg tables: a catalog's name in PyIceberg's
                             configuration, or its URI; batch only (docs/SPARK.md)
    qmq.lakeWarehouse, qmq.lakeNamespace
                             with qmq.lake: the warehouse, where a catalog needs it; the tables'
                             namespace (qmq)
    qmq.log                  messages (default), deliveries, progress, schedules
    subscribe, subscribePattern, assign
                             one of them: subjects with commas; a regular expression; JSON
                             `{"orders":["0@g1"]}`
    startingOffsets          earliest, latest, or JSON per queue; default: batch earliest, stream
                             latest, and only without a checkpoint
    endingOffsets            the same, batch only; default latest
    startingTimestamp, endingTimestamp
                             milliseconds since 1970, by append time, instead of offsets; the end is
                             exclusive, batch only
    maxOffsetsPerTrigger, maxBytesPerTrigger
                             approximate upper bounds of a micro-batch
    minOffsetsPerTrigger, maxTriggerDelay
                             a micro-batch begins when so many messages wait, or after this delay:
                             `15m` (default), `90s`, `500ms`
    minPartitions, maxBytesPerPartition
                             minimum number of tasks; approximate maximum size of a task (128 MiB)
    failOnDataLoss           true (default): fail if retention deleted needed messages; false:
                             continue with the remaining ones
    qmq.reader               streams only: the name under which operators see the stream
                             (`qmq group lag`, `qmq top`); default spark-HOST-PID
    includeHeaders           true: add the column `headers`; default false
    includeDirected          true: include copies for one consumer group; default false
    tags, tagsAll            messages with one of these tags; with all of these tags. Separated by
                             commas, or as a JSON array
    keys                     exactly these keys. Separated by commas, or as a JSON array
    keyFrom, keyUntil        a range of keys, compared byte by byte; the end is exclusive

Names of options, also of a write (`OptionValues`), are case-insensitive. An unknown name is refused
with the nearest known one.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

from qmq.columns.model import ALL, ReadSelection
from qmq.columns.offsets import EARLIEST, LATEST, Given, parse_given
from qmq.columns.planning import (
    NO_LIMIT,
    NO_MINIMUM,
    PIECE_BYTES,
    PLAN,
    Limit,
    Minimum,
    Plan,
)
from qmq.errors import InvalidArgument
from qmq.model import check_name
from qmq.text import INT64_MAX, parse_json, whole_number


class OptionValues:
    """The given options. `known` are their names, `ignored` lower-case names that Spark adds.
    Raises InvalidArgument for other names.
    """

    def __init__(
        self, options: Mapping[str, str], known: Collection[str], ignored: Collection[str] = ()
    ) -> None:
        lower = {name.lower() for name in known}
        self._values = {str(name).lower(): str(value) for name, value in options.items()}
        for name in self._values:
            if name not in lower and name not in ignored:
                raise unknown_option(name, known)

    def text(self, name: str, default: str = "") -> str:
        """The value as given, without white space around it."""
        return self._values.get(name.lower(), default).strip()

    def has(self, name: str) -> bool:
        """Whether the option was given."""
        return name.lower() in self._values

    def number(self, name: str, least: int = 0, most: int | None = None) -> int | None:
        """The value as an integer; None if the option was not given."""
        if not self.has(name):
            return None
        text = self.text(name)
        found = whole_number(text, INT64_MAX if most is None else most, least)
        if found is None:
            wanted = f"of {least} or more" if most is None else f"from {least} to {most}"
            raise InvalidArgument(f"option {name} must be an integer {wanted}, not {text[:100]!r}")
        return found

    def duration_ms(self, name: str) -> int:
        """The value as Spark takes durations: `15m`, `90s`; a bare number is of milliseconds."""
        text = self.text(name).lower()
        parts = re.fullmatch(r"([0-9]+) *([a-z]*)", text)
        unit_ms = _UNITS_MS.get(parts[2] or "ms") if parts else None
        number = whole_number(parts[1]) if parts else None
        if unit_ms is None or number is None:
            raise InvalidArgument(
                f"option {name} must be a duration such as 15m, 90s or 500ms, not {text[:100]!r}"
            )
        return number * unit_ms

    def flag(self, name: str, default: bool) -> bool:
        text = self.text(name, str(default)).lower()
        if text not in ("true", "false"):
            raise InvalidArgument(f"option {name} must be true or false, not {text!r}")
        return text == "true"

    def words(self, name: str) -> tuple[str, ...]:
        """The value as a list: separated by commas, or a JSON array of strings."""
        text = self.text(name)
        if not text.startswith("["):
            return tuple(word.strip() for word in text.split(",") if word.strip())
        found = self.json(name)
        if not all(isinstance(each, str) for each in found):
            raise InvalidArgument(f"option {name} must be a JSON array of strings, not {text!r}")
        return tuple(found)

    def json(self, name: str) -> Any:
        """The value, parsed as JSON."""
        try:
            return parse_json(self.text(name))
        except ValueError as cause:
            raise InvalidArgument(f"option {name} is not JSON: {cause}") from None


def unknown_option(name: str, known: Collection[str]) -> InvalidArgument:
    """The error for an unknown option, with the nearest known name."""
    lower = {each.lower(): each for each in known}
    near = difflib.get_close_matches(name.lower(), lower, 1, 0.5)
    hint = f"did you mean {lower[near[0]]!r}?" if near else f"options: {', '.join(known)}"
    return InvalidArgument(f"there is no option {name!r}: {hint}")


NAMES: Final = (
    "qmq.servers",
    "qmq.path",
    "path",
    "qmq.routes",
    "qmq.committed",
    "qmq.retryMs",
    "qmq.lake",
    "qmq.lakeWarehouse",
    "qmq.lakeNamespace",
    "qmq.log",
    "subscribe",
    "subscribePattern",
    "assign",
    "startingOffsets",
    "endingOffsets",
    "startingTimestamp",
    "endingTimestamp",
    "maxOffsetsPerTrigger",
    "maxBytesPerTrigger",
    "minOffsetsPerTrigger",
    "maxTriggerDelay",
    "minPartitions",
    "maxBytesPerPartition",
    "failOnDataLoss",
    "qmq.reader",
    "includeHeaders",
    "includeDirected",
    "tags",
    "tagsAll",
    "keys",
    "keyFrom",
    "keyUntil",
)
LOGS: Final = ("messages", "deliveries", "progress", "schedules")
RETRY_MS: Final = 60_000
FIRST_MS: Final = 4_000
"""A driver that reaches no metaserver for so long may have been given wrong addresses."""
_UNITS_MS: Final = {
    "ms": 1,
    "s": 1_000,
    "m": 60_000,
    "min": 60_000,
    "h": 3_600_000,
    "d": 86_400_000,
}
_BATCH_ONLY: Final = ("endingOffsets", "endingTimestamp")
_STREAM_ONLY: Final = (
    "maxOffsetsPerTrigger",
    "maxBytesPerTrigger",
    "minOffsetsPerTrigger",
    "maxTriggerDelay",
    "qmq.reader",
)
_CHOICES: Final = ("subscribe", "subscribePattern", "assign")


@dataclass(frozen=True, slots=True)
class StartPosition:
    """The location of the log. With `paths`, messages come from files, and `servers` provide only
    the routes.
    """

    servers: str = ""
    paths: tuple[str, ...] = ()
    routes: str = ""
    committed: str = ""
    retry_ms: int = RETRY_MS
    first_ms: int = FIRST_MS
    """The same until a metaserver has answered the driver."""


@dataclass(frozen=True, slots=True)
class LakeAddress:
    """Where the tables of `qmq lake` are."""

    catalog: str
    """Its name in PyIceberg's configuration, or its URI."""
    warehouse: str = ""
    namespace: str = "qmq"


@dataclass(frozen=True, slots=True)
class Choice:
    """The selection of subjects; exactly one field is given."""

    subjects: tuple[str, ...] = ()
    pattern: str = ""
    queues: Mapping[str, tuple[str, ...]] | None = None
    """Subject → names of queues."""

    def selects(self, subject: str) -> bool:
        """Whether the subject, or queues of it, are chosen."""
        if self.pattern:
            return re.fullmatch(self.pattern, subject) is not None
        return subject in self.subjects

    def without(self, subjects: Collection[str]) -> Choice:
        """The choice without some subjects; a pattern stays."""
        if self.pattern or not subjects:
            return self
        left = tuple(each for each in self.subjects if each not in subjects)
        queues = self.queues
        return Choice(
            left, queues=None if queues is None else {each: queues[each] for each in left}
        )


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """All options of a read, validated as far as possible without the log."""

    where: StartPosition
    choice: Choice
    start: Given
    end: Given
    start_ms: int | None = None
    end_ms: int | None = None
    limit: Limit = NO_LIMIT
    minimum: Minimum = NO_MINIMUM
    plan: Plan = PLAN
    skips_lost: bool = False
    selection: ReadSelection = ALL
    lake: LakeAddress | None = None
    reader: str = ""
    """The name of a stream; empty: none was given."""


def _values_of(options: Mapping[str, str]) -> OptionValues:
    return OptionValues(options, NAMES)


def log_of(options: Mapping[str, str]) -> str:
    """The dataset to read: messages by default. Raises InvalidArgument."""
    name = _values_of(options).text("qmq.log", LOGS[0])
    if name not in LOGS:
        raise InvalidArgument(f"option qmq.log must be one of {', '.join(LOGS)}, not {name!r}")
    return name


def start_position(options: Mapping[str, str]) -> StartPosition:
    """The location of the log. Raises InvalidArgument."""
    given = _values_of(options)
    paths = given.words("qmq.path") + given.words("path")
    servers = given.text("qmq.servers")
    if not paths and not servers:
        raise InvalidArgument(
            "give the log's location: option qmq.servers (host:port of metaservers) or "
            "qmq.path (data folders)"
        )
    retry_ms = given.number("qmq.retryMs")
    return StartPosition(
        servers,
        paths,
        given.text("qmq.routes"),
        given.text("qmq.committed"),
        *((RETRY_MS, FIRST_MS) if retry_ms is None else (retry_ms, retry_ms)),
    )


def with_headers(options: Mapping[str, str]) -> bool:
    """Whether the default schema has the column `headers`. Raises InvalidArgument."""
    return _values_of(options).flag("includeHeaders", False)


def parse(options: Mapping[str, str], *, is_stream: bool) -> ReadOptions:
    """Parse a user's options. Raises InvalidArgument, InvalidName."""
    given = _values_of(options)
    for name in _BATCH_ONLY if is_stream else _STREAM_ONLY:
        if given.has(name):
            raise InvalidArgument(
                f"option {name} is for {'batch reads' if is_stream else 'streams'} only"
            )
    start_ms, end_ms = given.number("startingTimestamp"), given.number("endingTimestamp")
    return ReadOptions(
        start_position(options),
        _choice(given),
        _edge(given, "starting", start_ms, LATEST if is_stream else EARLIEST, is_stream),
        _edge(given, "ending", end_ms, LATEST, is_stream),
        start_ms,
        end_ms,
        _limit(given),
        _minimum(given),
        _plan(given, is_stream),
        not given.flag("failOnDataLoss", True),
        _selection(given),
        _lake(given, is_stream),
        check_name("reader", given.text("qmq.reader")) if given.has("qmq.reader") else "",
    )


def _lake(given: OptionValues, is_stream: bool) -> LakeAddress | None:
    if not given.has("qmq.lake"):
        for name in ("qmq.lakeWarehouse", "qmq.lakeNamespace"):
            if given.has(name):
                raise InvalidArgument(
                    f"option {name} needs option qmq.lake: the catalog of the tables"
                )
        return None
    if is_stream:
        raise InvalidArgument(
            "option qmq.lake is for batch reads only: read the history with spark.read and "
            "endingOffsets, and start the stream with the same offsets as startingOffsets"
        )
    if given.flag("includeDirected", False):
        raise InvalidArgument(
            "the lake's tables have no copies for one consumer group: leave out qmq.lake or "
            "includeDirected"
        )
    if not given.text("qmq.lake"):
        raise InvalidArgument(
            "option qmq.lake is empty: give a catalog's name in PyIceberg's configuration, "
            "or its URI"
        )
    return LakeAddress(
        given.text("qmq.lake"),
        given.text("qmq.lakeWarehouse"),
        given.text("qmq.lakeNamespace", "qmq"),
    )


def _choice(given: OptionValues) -> Choice:
    chosen = [name for name in _CHOICES if given.has(name)]
    if len(chosen) != 1:
        raise InvalidArgument(
            f"give subjects by exactly one of {', '.join(_CHOICES)}; given: "
            f"{', '.join(chosen) or 'none'}"
        )
    if chosen == ["subscribe"]:
        subjects = tuple(
            dict.fromkeys(check_name("subject", each) for each in given.words("subscribe"))
        )
        if not subjects:
            raise InvalidArgument("option subscribe names no subject")
        return Choice(subjects)
    if chosen == ["subscribePattern"]:
        return Choice(pattern=_pattern(given.text("subscribePattern")))
    found = given.json("assign")
    if (
        not isinstance(found, dict)
        or not found
        or not all(isinstance(each, list) and each for each in found.values())
    ):
        raise InvalidArgument('option assign must be JSON such as {"orders":["0@g1"]}')
    subjects = tuple(check_name("subject", each) for each in found)
    return Choice(
        subjects, queues={subject: tuple(map(str, queues)) for subject, queues in found.items()}
    )


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as cause:
        raise InvalidArgument(
            f"option subscribePattern is not a regular expression: {cause}"
        ) from None
    return text


def _edge(
    given: OptionValues, which: str, time_ms: int | None, default: str, is_stream: bool
) -> Given:
    name = f"{which}Offsets"
    if given.has(name) and time_ms is not None:
        raise InvalidArgument(f"give {name} or {which}Timestamp, not both")
    found = parse_given(name, given.text(name, default))
    refused = EARLIEST if which == "ending" else LATEST
    if found == refused and not is_stream:
        raise InvalidArgument(
            f"{name}={refused} of a batch read would return no rows: leave it out"
        )
    return found


def _limit(given: OptionValues) -> Limit:
    return Limit(given.number("maxOffsetsPerTrigger", 1), given.number("maxBytesPerTrigger", 1))


def _minimum(given: OptionValues) -> Minimum:
    rows = given.number("minOffsetsPerTrigger", 1)
    if rows is None:
        if given.has("maxTriggerDelay"):
            raise InvalidArgument("option maxTriggerDelay needs option minOffsetsPerTrigger")
        return NO_MINIMUM
    rows_max = given.number("maxOffsetsPerTrigger", 1)
    if rows_max is not None and rows > rows_max:
        raise InvalidArgument(
            f"option minOffsetsPerTrigger is {rows}, more than maxOffsetsPerTrigger, {rows_max}"
        )
    if not given.has("maxTriggerDelay"):
        return Minimum(rows)
    return Minimum(rows, given.duration_ms("maxTriggerDelay"))


def _plan(given: OptionValues, is_stream: bool) -> Plan:
    return Plan(
        given.number("maxBytesPerPartition", 1) or PIECE_BYTES,
        given.number("minPartitions", 1) or 1,
        is_stream,
    )


def _selection(given: OptionValues) -> ReadSelection:
    key_from, key_until = (
        given.text(name).encode() if given.has(name) else None for name in ("keyFrom", "keyUntil")
    )
    if key_from is not None and key_until is not None and key_from >= key_until:
        raise InvalidArgument("option keyFrom must be below keyUntil")
    return ReadSelection(
        given.words("tags"),
        given.words("tagsAll"),
        tuple(each.encode() for each in given.words("keys")),
        key_from,
        key_until,
        given.flag("includeDirected", False),
    )
