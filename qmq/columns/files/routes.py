"""Writes and reads the file of `qmq route export` with the routes of ordered subjects
(docs/FORMAT.md, "Exported routes").
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from qmq_ordering.routes import LpRange

from qmq.columns.model import QueueKey, RoutePartition, Routes, SourceQueue
from qmq.errors import InvalidArgument
from qmq.model import Order
from qmq.text import parse_json

FORMAT: Final = "qmq-routes"
VERSION: Final = 1


def read_routes(path: str) -> dict[str, Routes]:
    """The routes by subject. Raises InvalidArgument if the file is missing or is not
    an export of routes.
    """
    try:
        return parse_routes(Path(path).read_bytes())
    except OSError as cause:
        raise InvalidArgument(
            f"qmq.routes: {path} cannot be read ({cause.strerror}): `qmq route export` "
            "writes such a file"
        ) from cause
    except (ValueError, KeyError, TypeError, AttributeError) as cause:
        raise InvalidArgument(
            f"qmq.routes: {path} is not what `qmq route export` writes ({cause!r}): export "
            "the routes again"
        ) from cause


def parse_routes(data: bytes | str) -> dict[str, Routes]:
    """The routes in the file's content. Raises ValueError, KeyError, TypeError."""
    found = parse_json(data)
    if found["format"] != FORMAT or found["version"] != VERSION:
        raise ValueError(f"format {found['format']!r}, version {found['version']!r}")
    return {each["subject"]: _routes(each) for each in found["subjects"]}


def empty_queues(
    routes: Mapping[str, Routes], groups: Container[str]
) -> dict[QueueKey, SourceQueue]:
    """An empty queue for each partition on one of these broker groups."""
    found: dict[QueueKey, SourceQueue] = {}
    for subject, each in routes.items():
        for partition in each.partitions.values():
            if partition.broker_group in groups:
                key = QueueKey(subject, partition.number, partition.broker_group)
                found[key] = SourceQueue(key, 0, 0, is_sealed=partition.number in each.sealed_at)
    return found


def to_json(subjects: Sequence[dict[str, Any]], time_ms: int) -> dict[str, Any]:
    """The content of the file: the subjects' parts, and the time of the export."""
    return {"format": FORMAT, "version": VERSION, "time_ms": time_ms, "subjects": list(subjects)}


def subject_json(subject: str, routes: Routes) -> dict[str, Any]:
    """One subject's part of the file."""
    return {
        "subject": subject,
        "order": (Order.STRICT if routes.is_strict else Order.BEST_EFFORT).value,
        "logical_partitions": routes.logical_partitions,
        "version": routes.version,
        "partitions": [
            {
                "number": number,
                "first_lp": part.lps.first,
                "end_lp": part.lps.end,
                "broker_group": part.broker_group,
                "version": part.version,
                "sources": list(part.sources),
            }
            for number, part in sorted(routes.partitions.items())
        ],
        "sealed_at": {
            str(number): sequence for number, sequence in sorted(routes.sealed_at.items())
        },
    }


def _routes(found: dict[str, Any]) -> Routes:
    partitions = [_partition(each) for each in found["partitions"]]
    return Routes(
        found["logical_partitions"],
        found["version"],
        {each.number: each for each in partitions},
        {int(number): int(sequence) for number, sequence in found["sealed_at"].items()},
        found["order"] == Order.STRICT.value,
    )


def _partition(found: dict[str, Any]) -> RoutePartition:
    lps = LpRange(int(found["first_lp"]), int(found["end_lp"]))
    return RoutePartition(
        int(found["number"]),
        lps,
        str(found["broker_group"]),
        int(found["version"]),
        tuple(map(int, found["sources"])),
    )
