"""Offsets: the position of a read in each queue, and their JSON form for Spark and people. Pure.

    {"bank": {"1@g1": 5000, "2@g2": 1200}, "orders": {"0@g1": 120, "0@g2": 77}}

An offset is the sequence of the next message. Rules:
* Equal offsets have equal text, because Spark compares offsets as text: subjects and queues are sorted.
* Users may write -2 for the earliest and -1 for the latest message, as for Kafka, and a bare partition number if only one broker group
  has the partition.
* A missing queue starts at 0 in a stream. A queue missing from a user's JSON starts at the earliest or ends at the latest message.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from pyspark_qmq.source_model import QueueKey, SourceQueue
from qmq.errors import InvalidArgument

EARLIEST: Final = "earliest"
LATEST: Final = "latest"
_SPECIAL: Final = {-2: EARLIEST, -1: LATEST}

Offsets = Mapping[QueueKey, int]
Given = str | Mapping[str, Mapping[str, int]]
"""Offsets given by a user: `earliest`, `latest`, or subject → queue → sequence."""


def to_json(offsets: Offsets) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for key in sorted(offsets):
        found.setdefault(key.subject, {})[key.within] = offsets[key]
    return found


def of_json(found: Mapping[str, Mapping[str, int]]) -> dict[QueueKey, int]:
    """The inverse. Raises InvalidArgument."""
    return {QueueKey.parse(subject, within): int(sequence) for subject, queues in found.items() for within, sequence in queues.items()}


def parse_given(option: str, text: str) -> Given:
    """Parse a user's value of the option `option`. Raises InvalidArgument."""
    word = text.strip().lower()
    if word in (EARLIEST, LATEST):
        return word
    try:
        found: Any = json.loads(text)
    except ValueError:
        raise InvalidArgument(f'{option} is earliest, latest, or JSON such as {{"orders":{{"0@g1":23}}}}, not {text!r}') from None
    if not isinstance(found, dict) or not all(isinstance(each, dict) for each in found.values()):
        raise InvalidArgument(f'{option} must map subjects to queues to sequences, such as {{"orders":{{"0@g1":23}}}}, not {text!r}')
    for subject, queues in found.items():
        for within, sequence in queues.items():
            if not isinstance(sequence, int) or isinstance(sequence, bool) or sequence < -2:
                raise InvalidArgument(f"{option}: {subject}/{within} must be a sequence, -1 (latest) or -2 (earliest), not {sequence!r}")
    return found


def resolve(option: str, given: Given, queues: Iterable[SourceQueue], default: str) -> dict[QueueKey, int]:
    """The sequences of all `queues`. Queues missing from the user's JSON get the `default` end. Raises InvalidArgument."""
    by_key = {queue.key: queue for queue in queues}
    if isinstance(given, str):
        return {key: _place(queue, given) for key, queue in by_key.items()}
    named = _named(option, given, by_key)
    return {key: _sequence(queue, named.get(key), default) for key, queue in by_key.items()}


def _named(option: str, given: Mapping[str, Mapping[str, int]], known: Mapping[QueueKey, SourceQueue]) -> dict[QueueKey, int]:
    return {find_queue(option, subject, within, known): number for subject, queues in given.items() for within, number in queues.items()}


def find_queue(option: str, subject: str, within: str, known: Iterable[QueueKey]) -> QueueKey:
    """The queue named by a user, `3@g1` or just `3`. Raises InvalidArgument if there is no such queue, or more than one."""
    fitting = [key for key in known if key.subject == subject and within in (key.within, str(key.partition))]
    if len(fitting) == 1:
        return fitting[0]
    names = ", ".join(sorted(key.within for key in known if key.subject == subject)) or "none that are read here"
    what = "several queues" if fitting else "no queue"
    raise InvalidArgument(f"{option}: {what} of subject {subject!r} are called {within!r}; queues: {names}")


def _sequence(queue: SourceQueue, number: int | None, default: str) -> int:
    if number is None:
        return _place(queue, default)
    return _place(queue, _SPECIAL[number]) if number in _SPECIAL else number


def _place(queue: SourceQueue, word: str) -> int:
    return queue.start if word == EARLIEST else queue.end


def by_time(queues: Iterable[SourceQueue], time_ms: int, find_time: Callable[[QueueKey, int], int]) -> dict[QueueKey, int]:
    """The first sequence in each queue that was stored at or after a time; the queue's end if there is none."""
    return {queue.key: min(find_time(queue.key, time_ms), queue.end) for queue in queues}
