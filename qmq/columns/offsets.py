"""Offsets: the position of a read in each queue, and their JSON form for Spark and people. Pure.

    {"bank": {"1@g1": 5000, "2@g2": 1200}, "orders": {"0@g1": 120, "0@g2": 77, "messagesPerTask":
    40000}}

An offset is the sequence of the next message. In the offsets at which a micro-batch of a stream
ends, `messagesPerTask` says where the micro-batch was cut into tasks (`planning.stream_tasks`).
Rules:
* Equal offsets have equal text, because Spark compares offsets as text: subjects and queues are
  sorted.
* Users may write -2 for the earliest and -1 for the latest message, as for Kafka, and a bare
  partition number if only one broker group has the partition.
* A missing queue starts at 0 in a stream. A queue missing from a user's JSON starts at the earliest
  or ends at the latest message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from qmq.columns.model import QueueKey, SourceQueue
from qmq.errors import InvalidArgument
from qmq.text import INT64_MAX, parse_json

EARLIEST: Final = "earliest"
LATEST: Final = "latest"
_SPECIAL: Final = {-2: EARLIEST, -1: LATEST}
_PER_TASK: Final = "messagesPerTask"
"""Not a queue: queues begin with the partition's number. A stream of release 0.2 therefore refuses
such offsets.
"""
_LOST: Final = "messagesLost"
"""In the ends that a stream reports in its progress, never in its checkpoint: how many messages of
the subject were deleted before it read them.
"""

Offsets = Mapping[QueueKey, int]
Given = str | Mapping[str, Mapping[str, int]]
"""Offsets given by a user: `earliest`, `latest`, or subject → queue → sequence."""


def to_json(
    offsets: Offsets,
    per_task: Mapping[str, int] | None = None,
    lost: Mapping[QueueKey, int] | None = None,
) -> dict[str, dict[str, int]]:
    """`per_task`: for streams, the messages per task of each subject with offsets. `lost`: for
    progress reports, what was lost of queues.
    """
    found: dict[str, dict[str, int]] = {}
    for key in sorted(offsets):
        found.setdefault(key.subject, {})[key.within] = offsets[key]
    for subject, messages in (per_task or {}).items():
        found[subject][_PER_TASK] = messages
    for key, messages in (lost or {}).items():
        queues = found.setdefault(key.subject, {})
        queues[_LOST] = queues.get(_LOST, 0) + messages
    return found


def sequence_of(found: object) -> int:
    """A sequence that was read as JSON. Raises InvalidArgument."""
    if type(found) is not int or not 0 <= found <= INT64_MAX:
        raise InvalidArgument(f"{found!r:.100} is not a sequence")
    return found


def of_json(found: Mapping[str, Mapping[str, int]]) -> dict[QueueKey, int]:
    """The inverse. Raises InvalidArgument."""
    return {
        QueueKey.parse(subject, within): sequence_of(sequence)
        for subject, queues in found.items()
        for within, sequence in queues.items()
        if within not in (_PER_TASK, _LOST)
    }


def lost_of_json(found: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    """What a stream reported as lost, by subject. Raises InvalidArgument."""
    return {
        subject: sequence_of(queues[_LOST]) for subject, queues in found.items() if _LOST in queues
    }


def per_task_of_json(found: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    """The messages per task of each subject that has them; offsets of release 0.2 have none.
    Raises InvalidArgument.
    """
    per_task = {
        subject: queues[_PER_TASK] for subject, queues in found.items() if _PER_TASK in queues
    }
    for subject, messages in per_task.items():
        if not isinstance(messages, int) or isinstance(messages, bool) or messages < 1:
            raise InvalidArgument(
                f"the stream's checkpoint is damaged: {_PER_TASK} of subject {subject!r} is "
                f"{messages!r}"
            )
    return per_task


def parse_given(option: str, text: str) -> Given:
    """Parse a user's value of the option `option`. Raises InvalidArgument."""
    word = text.strip().lower()
    if word in (EARLIEST, LATEST):
        return word
    try:
        found: Any = parse_json(text)
    except ValueError:
        raise InvalidArgument(
            f'{option} is earliest, latest, or JSON such as {{"orders":{{"0@g1":23}}}}, not '
            f"{text!r}"
        ) from None
    if not isinstance(found, dict) or not all(isinstance(each, dict) for each in found.values()):
        raise InvalidArgument(
            f"{option} must map subjects to queues to sequences, such as "
            f'{{"orders":{{"0@g1":23}}}}, not {text!r}'
        )
    given: dict[str, dict[str, int]] = {}
    for subject, queues in found.items():
        given[subject] = {
            within: at for within, at in queues.items() if within not in (_PER_TASK, _LOST)
        }
        for within, sequence in given[subject].items():
            if not isinstance(sequence, int) or isinstance(sequence, bool) or sequence < -2:
                raise InvalidArgument(
                    f"{option}: {subject}/{within} must be a sequence, -1 (latest) or -2 "
                    f"(earliest), not {sequence!r}"
                )
    return given


def resolve(
    option: str, given: Given, queues: Iterable[SourceQueue], default: str
) -> dict[QueueKey, int]:
    """The sequences of all `queues`. Queues missing from the user's JSON get the `default` end.
    Raises InvalidArgument.
    """
    by_key = {queue.key: queue for queue in queues}
    if isinstance(given, str):
        return {key: _place(queue, given) for key, queue in by_key.items()}
    named = _named(option, given, by_key)
    return {key: _sequence(queue, named.get(key), default) for key, queue in by_key.items()}


def _named(
    option: str, given: Mapping[str, Mapping[str, int]], known: Mapping[QueueKey, SourceQueue]
) -> dict[QueueKey, int]:
    return {
        find_queue(option, subject, within, known): number
        for subject, queues in given.items()
        for within, number in queues.items()
    }


def find_queue(option: str, subject: str, within: str, known: Iterable[QueueKey]) -> QueueKey:
    """The queue named by a user, `3@g1` or just `3`. Raises InvalidArgument if there is no such
    queue, or more than one.
    """
    fitting = [
        key
        for key in known
        if key.subject == subject and within in (key.within, str(key.partition))
    ]
    if len(fitting) == 1:
        return fitting[0]
    names = (
        ", ".join(sorted(key.within for key in known if key.subject == subject))
        or "none that are read here"
    )
    what = "several queues" if fitting else "no queue"
    raise InvalidArgument(
        f"{option}: {what} of subject {subject!r} are called {within!r}; queues: {names}"
    )


def _sequence(queue: SourceQueue, number: int | None, default: str) -> int:
    if number is None:
        return _place(queue, default)
    return _place(queue, _SPECIAL[number]) if number in _SPECIAL else number


def _place(queue: SourceQueue, word: str) -> int:
    return queue.start if word == EARLIEST else queue.end


def by_time(
    queues: Iterable[SourceQueue], time_ms: int, find_time: Callable[[QueueKey, int], int]
) -> dict[QueueKey, int]:
    """The first sequence in each queue that was stored at or after a time; the queue's end if there
    is none.
    """
    return {queue.key: min(find_time(queue.key, time_ms), queue.end) for queue in queues}
