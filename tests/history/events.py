"""The history format of all fault tests: simulators, processes and soaks.

A history is a file of JSON lines in the order of events. An operation has two lines: `invoke`,
written before the call, and its end, written when the answer has arrived: `ok`, `fail` (it
certainly had no effect) or `info` (**unknown outcome**: the time ran out, or the connection broke).
Unknown never counts as failed, and an `invoke` without an end is unknown as well.

    {"process":"p1","type":"invoke","f":"send","t_ns":10,"subject":"orders","values":[7,8]}
    {"process":"c1","type":"invoke","f":"poll","t_ns":11,"group":"billing"}
    {"process":"p1","type":"ok","f":"send","t_ns":25,"subject":"orders","values":[7,8],"queue":"orders/0@g1","sequence":40}
    {"process":"c1","type":"ok","f":"poll","t_ns":31,"group":"billing","queue":"orders/0@g1","records":[[40,7,1],[41,8,1]]}
    {"process":"c1","type":"invoke","f":"ack","t_ns":32,"group":"billing","queue":"orders/0@g1","sequences":[40]}
    {"process":"c1","type":"ok","f":"ack","t_ns":40,"group":"billing","queue":"orders/0@g1","sequences":[40]}

Rules for a recorder:

* **A value is a unique int, sent by one operation.** The client's retries belong to that operation.
* **Record the invoke before the call and the end after the answer**, so that the order of lines is
  evidence of real time.
* **A poll ends when the client library has the messages**, not when the application reads them.
* A process does one thing at a time, or gives each operation a number `op`, the same on all its
  lines. Sends need no number: their values pair the lines. A batch that the client split in two has
  two ends, each with its own values.
* `reset` records an event that makes a group forget (an operator's reset, a power cut under
  `--flush async`). Faults are notes: `Note(f="kill")`.

A history with indexes that several checkers need: who tried which value, the outcome of the value,
when an operation began. `History` is a value: everything in it follows from its events, and each
index is made once, at its first use. Checkers are plain functions of a `History`, so a million
events are walked a few times in all and not a few times for each checker. The outcome of a value is
the best outcome of its attempts: one `ok` and it is acknowledged; otherwise one attempt without a
certain end (`info`, or an `invoke` and nothing more) and it is unknown; only if every attempt said
`fail` it failed.

    invoke 7, fail 7                  failed      a poll that shows 7 is wrong
    invoke 7, info 7                  unknown     a poll may show 7 or not
    invoke 7                          unknown     as above: the producer died
    invoke 7, fail 7, invoke 7, ok 7  acked       a poll must show 7
"""

from __future__ import annotations

import heapq
import json
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Literal, NamedTuple, Self, TypeVar, overload

Type = Literal["invoke", "ok", "fail", "info"]
TYPES = frozenset(("invoke", "ok", "fail", "info"))
BRIEF_CHARS_MAX = 300


class Record(NamedTuple):
    """One message in a consumer's hands."""

    sequence: int
    value: int
    attempt: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """The fields of every line. `t_ns` is 0 until a recorder sets it."""

    process: str
    type: Type
    t_ns: int = 0
    op: int | None = None

    def ended(self, type: Type, **changes: Any) -> Self:
        """The end of this operation, not stamped yet: `invoke.ended("ok", queue="orders/0@g1",
        sequence=40)`.
        """
        return replace(self, type=type, t_ns=0, **changes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Send(Operation):
    """A batch of values. With `ok`, value i of the batch is at `sequence + i` of `queue`, and
    `replica` was the master in `epoch`.
    """

    f: ClassVar[str] = "send"
    subject: str
    values: tuple[int, ...]
    queue: str | None = None
    sequence: int | None = None
    epoch: int | None = None
    replica: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Poll(Operation):
    """A consumer of `group` asks for messages; at `ok` it has `records` of `queue`."""

    f: ClassVar[str] = "poll"
    group: str
    queue: str | None = None
    records: tuple[Record, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ack(Operation):
    """A consumer acknowledges messages, named by value or by sequence, whichever it knows."""

    f: ClassVar[str] = "ack"
    group: str
    queue: str
    values: tuple[int, ...] = ()
    sequences: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reset(Operation):
    """From here on the group may get messages again that it acknowledged. Without a group: any
    group may.
    """

    f: ClassVar[str] = "reset"
    group: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Note(Operation):
    """Anything else worth a line: a fault, its end, a phase of the test. No checker looks at it; a
    person does.
    """

    f: str
    text: str = ""


Event = Send | Poll | Ack | Reset | Note
E = TypeVar("E", bound=Operation)
KINDS: dict[str, type[Operation]] = {}
OPTIONAL: dict[type[Operation], list[str]] = {}
"""The fields that follow the three every line begins with, looked up once: `fields` is slow."""
NESTED: dict[str, Callable[[Any], object]] = {}
"""Fields that are more than plain values in a line, and how they are read."""
ENCODER = json.JSONEncoder(separators=(",", ":"))


def learn(*kinds: type[Operation], **nested: Callable[[Any], object]) -> None:
    """Have the format know more kinds of events; a field of one name is read in the same way in all
    of them.
    """
    for kind in kinds:
        KINDS[kind.f] = kind  # type: ignore[attr-defined]
        OPTIONAL[kind] = [
            field.name for field in fields(kind) if field.name not in ("process", "type", "f")
        ]
    NESTED.update(nested)


learn(
    Send,
    Poll,
    Ack,
    Reset,
    values=tuple,
    sequences=tuple,
    records=lambda found: tuple(Record(*each) for each in found),
)
OPTIONAL[Note] = [
    field.name for field in fields(Note) if field.name not in ("process", "type", "f")
]


def to_json(event: Operation) -> str:
    """One line without its end; what is not known yet is left out."""
    found: dict[str, object] = {"process": event.process, "type": event.type, "f": event.f}
    for name in OPTIONAL[event.__class__]:
        value = getattr(event, name)
        if value is not None and value != ():
            found[name] = value
    return ENCODER.encode(found)


def from_json(line: str | bytes) -> Any:
    """The event in a line; a line of another format is refused, because a history with holes proves
    nothing.
    """
    found: dict[str, Any] = json.loads(line)
    if found["type"] not in TYPES:
        raise ValueError(f"unknown type of event: {found['type']!r}")
    for name, read in NESTED.items():
        if name in found:
            found[name] = read(found[name])
    kind = KINDS.get(found["f"], Note)
    if kind is not Note:
        del found["f"]
    return kind(**found)


def brief(event: Operation) -> str:
    """A line for a person: a batch of a thousand values is cut short."""
    text = to_json(event)
    return text if len(text) <= BRIEF_CHARS_MAX else f"{text[:BRIEF_CHARS_MAX]}..."


class Recorder:
    """Appends events to a file as they happen, with one write for each line: a killed process has
    written all that it knew. Threads may share a recorder, and processes may share a file: appended
    lines do not mix. The clock must be one that all of them share, as CLOCK_MONOTONIC is on one
    machine; a simulator hands in its own.
    """

    def __init__(self, path: Path, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._clock_ns = clock_ns

    def record(self, event: E) -> E:
        """Writes the event, stamped with the time unless it brings its own, and gives it back:
        `.ended(...)` makes its end.
        """
        stamped = event if event.t_ns else replace(event, t_ns=self._clock_ns())
        line = to_json(stamped).encode() + b"\n"
        if os.write(self._file, line) != len(line):
            raise OSError("the history's disk is full: the line is torn")
        return stamped

    def close(self) -> None:
        """Close the file. There is no buffer to flush."""
        os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def load(*paths: Path) -> list[Any]:
    """The events of one file in the file's order, or of several files in the order of time. An
    incomplete last line is left out.
    """
    if len(paths) == 1:
        return list(_lines(paths[0]))
    return list(heapq.merge(*map(_lines, paths), key=lambda event: event.t_ns))


def _lines(path: Path) -> Iterator[Any]:
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield from_json(line)


@dataclass(frozen=True, slots=True)
class Anomaly:
    """A broken promise: which one, what happened in one sentence, and the least events that prove
    it.
    """

    name: str
    what: str
    evidence: tuple[Event, ...] = ()

    def __str__(self) -> str:
        return "\n    ".join([f"{self.name}: {self.what}", *map(brief, self.evidence)])


class Outcomes(NamedTuple):
    """The outcomes of sent values; each value is in exactly one set."""

    acked: frozenset[int]
    unknown: frozenset[int]
    failed: frozenset[int]


class History(Sequence[Event]):
    """Events in real-time order. Do not change them afterwards: the indexes would not notice."""

    def __init__(self, events: Iterable[Event]) -> None:
        self._events = tuple(events)

    @overload
    def __getitem__(self, index: int) -> Event: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Event]: ...
    def __getitem__(self, index: int | slice) -> Event | Sequence[Event]:
        return self._events[index]

    def __len__(self) -> int:
        return len(self._events)

    def __iter__(self) -> Iterator[Event]:
        return iter(self._events)

    @cached_property
    def sends(self) -> tuple[Send, ...]:
        """All lines of sends."""
        return tuple(event for event in self._events if isinstance(event, Send))

    @cached_property
    def acked_sends(self) -> tuple[tuple[Send, str, int], ...]:
        """Sends that were answered, each with its queue and base sequence."""
        found = []
        for event in self.sends:
            if event.type == "ok":
                if event.queue is None or event.sequence is None:
                    raise ValueError(f"an acknowledged send must say where: {brief(event)}")
                found.append((event, event.queue, event.sequence))
        return tuple(found)

    @cached_property
    def polls(self) -> tuple[tuple[Poll, str], ...]:
        """Polls that got messages, each with its queue."""
        found = []
        for event in self._events:
            if isinstance(event, Poll) and event.type == "ok" and event.records:
                if event.queue is None:
                    raise ValueError(f"a poll with messages must say from where: {brief(event)}")
                found.append((event, event.queue))
        return tuple(found)

    @cached_property
    def outcomes(self) -> Outcomes:
        """The outcome of every value that was tried to send."""
        ended: dict[str, set[int]] = {"ok": set(), "fail": set(), "info": set()}
        under_way: Counter[int] = Counter()
        for event in self.sends:
            if event.type == "invoke":
                under_way.update(event.values)
            else:
                under_way.subtract(event.values)
                ended[event.type].update(event.values)
        unfinished = {value for value, attempts in under_way.items() if attempts > 0}
        acked = frozenset(ended["ok"])
        unknown = frozenset(ended["info"] | unfinished) - acked
        return Outcomes(acked, unknown, frozenset(ended["fail"]) - acked - unknown)

    @cached_property
    def seen(self) -> dict[str, set[int]]:
        """The values delivered to each group at least once."""
        found: defaultdict[str, set[int]] = defaultdict(set)
        for poll, _ in self.polls:
            found[poll.group].update(record.value for record in poll.records)
        return dict(found)

    @cached_property
    def seen_by_any(self) -> frozenset[int]:
        """The values delivered to any group."""
        return frozenset().union(*self.seen.values())

    @cached_property
    def beginnings(self) -> list[int]:
        """For each line the line where its operation began; the line itself if there is no invoke.
        One invoke may have several ends (a poll answered from two queues).
        """
        begun: dict[tuple[str, str, int | None], int] = {}
        found = []
        for place, event in enumerate(self._events):
            key = (event.process, event.f, event.op)
            if event.type == "invoke":
                begun[key] = place
            found.append(begun.get(key, place))
        return found

    def first_polls(self, values: Collection[int]) -> dict[int, Poll]:
        """The first poll that shows each of these values: evidence, searched for only when
        something is wrong.
        """
        found: dict[int, Poll] = {}
        for poll, _ in self.polls if values else ():
            for record in poll.records:
                if record.value in values:
                    found.setdefault(record.value, poll)
        return found
