"""Computes the lag of a stream from Spark's progress reports. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from pyspark_qmq.offsets import of_json
from pyspark_qmq.source_model import QueueKey
from qmq.errors import InvalidArgument
from qmq.json_values import parse_json


def lag(progress: Any) -> int:
    """The number of messages that were committed when a micro-batch was planned and were not read by it, over all sources of a query.

    Args:
        progress: one of `query.recentProgress`, `query.lastProgress`, or of a listener's events.
    """
    return sum(sum(lag_by_queue(source).values()) for source in _sources(progress))


def lag_by_queue(source: Mapping[str, Any]) -> dict[QueueKey, int]:
    """The same for one source (`progress["sources"][0]`), by queue."""
    latest, end = (_parsed(source.get(name)) for name in ("latestOffset", "endOffset"))
    return {key: max(sequence - end.get(key, 0), 0) for key, sequence in latest.items()}


def _sources(progress: Any) -> list[Mapping[str, Any]]:
    found = progress if isinstance(progress, Mapping) else json.loads(progress.json)
    return list(found["sources"])


def _parsed(value: Any) -> dict[QueueKey, int]:
    """The offsets; empty for another data source, whose offsets have another format."""
    with suppress(ValueError, InvalidArgument):
        found = parse_json(value or "{}") if isinstance(value, str) else value
        if isinstance(found, Mapping) and all(isinstance(each, Mapping) for each in found.values()):
            return of_json(found)
    return {}
