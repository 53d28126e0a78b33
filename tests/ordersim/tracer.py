"""What can be seen of an ordered subject from outside, one observation after the other: records of
the coordination store, committed entries, what the application sends and is told, and what handlers
get. It reads the product's formats and judges nothing.

A trace ends where its limit is reached, or before something that docs/specs/Ordering.tla leaves
out: a replay of a parked key, a reset, a failed message, a second producer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from qmq_coordination.broker_groups import group_key
from qmq_coordination.ordered_records import FENCES, ROUTES
from qmq_ordering.lanes import GroupRecord
from qmq_ordering.routes import FENCED, Change, LpRange, Phase, Route

from qmq.log import command_messages
from qmq.log.actions import (
    Action,
    LaneDone,
    LaneGrant,
    LaneInherit,
    LanePark,
    LaneRelease,
    LaneReset,
    LaneUnpark,
    decode_actions,
)
from qmq.log.envelopes import Entry
from qmq.wire.batch import BatchView, Kind, unwrap


@dataclass(frozen=True, slots=True)
class Routed:
    """A version was published, or is the first. A record that is put once more is taken down once
    more.
    """

    route: Route


@dataclass(frozen=True, slots=True)
class Changed:
    """A change was prepared, or called sealed: its record was put."""

    change: Change


@dataclass(frozen=True, slots=True)
class Fenced:
    partition: int
    at_ms: int
    is_led: bool
    """Whether the store had the key of the group's master, which is under its lease."""


@dataclass(frozen=True, slots=True)
class Moved:
    """The group's frontier."""

    group: GroupRecord


@dataclass(frozen=True, slots=True)
class Stored:
    """A message was committed. Messages of a key are numbered from 1, as the application sends
    them.
    """

    partition: int
    sequence: int
    key: bytes
    number: int
    appended_ms: int
    """When the master appended it."""


@dataclass(frozen=True, slots=True)
class Sealed:
    """A command message was committed."""

    partition: int
    sequence: int


@dataclass(frozen=True, slots=True)
class Granted:
    partition: int
    range: LpRange
    consumer: str


@dataclass(frozen=True, slots=True)
class Released:
    partition: int
    token: int


@dataclass(frozen=True, slots=True)
class Settled:
    partition: int
    token: int
    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Parked:
    """A message was set aside with its key."""

    partition: int
    token: int
    sequence: int


@dataclass(frozen=True, slots=True)
class Inherited:
    """These keys of a range are parked in the partition, as they are parked in the one before."""

    partition: int
    range: LpRange
    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Made:
    """The application sent a message."""

    key: bytes
    number: int
    lp: int


@dataclass(frozen=True, slots=True)
class Acked:
    """The application was told where a message is stored."""

    key: bytes
    number: int
    partition: int


@dataclass(frozen=True, slots=True)
class Given:
    """A handler was given a message."""

    consumer: str
    partition: int
    sequence: int


@dataclass(frozen=True, slots=True)
class Handled:
    """A handler ended without an error."""

    consumer: str
    partition: int
    sequence: int


Observation = (
    Routed | Changed | Fenced | Moved | Stored | Sealed | Granted | Released | Settled | Parked | Inherited | Made | Acked | Given | Handled  # noqa: E501
)  # fmt: skip


class Tracer:
    """Takes down what it is shown. `number_of` reads the number of a message in its body."""

    def __init__(
        self, subject: str, group: str, limit: int, number_of: Callable[[bytes], int]
    ) -> None:
        self.found: list[Observation] = []
        self.end = ""
        """Why the trace ends here."""
        self.routes: dict[int, Route] = {}
        self._prefix = f"{ROUTES}{subject}/"
        self._subject = subject
        self._group = group
        self._limit = limit
        self._number_of = number_of
        self._changes: dict[int, Change] = {}
        self._latest = 0
        self._published: set[int] = set()
        self._producer: object = None

    def _add(self, observation: Observation) -> None:
        if not self.end:
            self.found.append(observation)
            if len(self.found) == self._limit:
                self.stop("limit")

    def stop(self, why: str) -> None:
        """Take down nothing more."""
        self.end = self.end or why

    # --- the coordination store -------------------------------------------------------------------

    def put(self, key: str, value: bytes, *, at_ms: int, has: Callable[[str], bool]) -> None:
        """A key has a new value; `has` says whether the store has a key. Keys of one transaction
        come in any order.
        """
        if key.startswith(FENCES):
            group, _, rest = key[len(FENCES) :].partition("/")
            subject, _, number = rest.rpartition("/")
            if subject == self._subject:
                self._add(Fenced(int(number), at_ms, has(group_key(group, "master"))))
        elif key.startswith(self._prefix):
            what, _, name = key[len(self._prefix) :].partition("/")
            if what == "v":
                route = Route.decode(value)
                self.routes[route.version] = route
                self._publish()
            elif what == "c":
                self._change(Change.decode(value))
            elif what == "latest":
                self._latest = int(value)
                if self._latest in self._published:
                    self._add(Routed(self.routes[self._latest]))
                self._publish()
            elif what == "g" and name == self._group:
                self._move(GroupRecord.decode(value))

    def _publish(self) -> None:
        """A version counts when it is there, is the latest, and has not been taken down."""
        route = self.routes.get(self._latest)
        if route is not None and route.version not in self._published:
            self._published.add(route.version)
            self._add(Routed(route))

    def _change(self, change: Change) -> None:
        before, self._changes[change.to_version] = self._changes.get(change.to_version), change
        if (
            before is not None
            and change == replace(before, sealed=change.sealed)
            and FENCED in before.sealed.values()
        ):
            return  # where a fenced partition was sealed is known later
        if change.phase in (Phase.PREPARED, Phase.SEALED):
            self._add(Changed(change))

    def _move(self, record: GroupRecord) -> None:
        if not record.is_ready or record.start != "earliest":
            self.stop("a reset")
        self._add(Moved(record))

    # --- committed entries ------------------------------------------------------------------------

    def entry(self, entry: Entry) -> None:
        """An entry of a log was committed."""
        if self.end:
            return
        kind = entry.envelope.kind
        if kind in (Kind.DATA, Kind.COMMAND):
            view = BatchView(entry.envelope, entry.region)
            if view.subject != self._subject or not view.header.partition:
                return
            if kind == Kind.COMMAND:
                self._add(
                    Sealed(
                        view.header.partition,
                        command_messages.read(view.region, view.base_sequence).sequence,
                    )
                )
                return
            for index, (key, body) in enumerate(zip(view.keys() or [], view.bodies(), strict=True)):
                sequence = view.base_sequence + index
                self._add(
                    Stored(
                        view.header.partition,
                        sequence,
                        key,
                        self._number_of(body),
                        view.envelope.append_time_ms,
                    )
                )
        elif kind == Kind.ACTIONS:
            for action in decode_actions(unwrap(entry.region)):
                if isinstance(action, Action) and (action.subject, action.group) == (
                    self._subject,
                    self._group,
                ):
                    self._acted(action)

    def _acted(self, action: Action) -> None:
        if isinstance(action, LaneGrant):
            self._add(Granted(action.partition, LpRange(action.first, action.end), action.consumer))
        elif isinstance(action, LaneRelease):
            self._add(Released(action.partition, action.token))
        elif isinstance(action, LaneDone):
            self._add(Settled(action.partition, action.token, action.ranges))
        elif isinstance(action, LanePark):
            self._add(Parked(action.partition, action.token, action.sequence))
        elif isinstance(action, LaneInherit):
            self._add(
                Inherited(
                    action.partition,
                    LpRange(action.first, action.end),
                    tuple(key for _, key in action.keys),
                )
            )
        elif isinstance(action, LaneUnpark | LaneReset):
            self.stop(type(action).__name__)

    # --- the application --------------------------------------------------------------------------

    def made(self, producer: object, key: bytes, number: int, lp: int) -> None:
        """A producer took a message."""
        self._producer = self._producer or producer
        if self._producer is not producer:
            self.stop("a second producer")
        self._add(Made(key, number, lp))

    def acked(self, key: bytes, number: int, partition: int) -> None:
        """A message was acknowledged."""
        self._add(Acked(key, number, partition))

    def given(self, group: str, consumer: str, partition: int, sequence: int) -> None:
        """A handler begins."""
        if group == self._group:
            self._add(Given(consumer, partition, sequence))

    def handled(self, group: str, consumer: str, partition: int, sequence: int) -> None:
        """A handler has ended well."""
        if group == self._group:
            self._add(Handled(consumer, partition, sequence))


def silent() -> Tracer:
    """A tracer that takes down nothing."""
    tracer = Tracer("", "", 1, lambda _: 0)
    tracer.stop("nobody asks")
    return tracer
