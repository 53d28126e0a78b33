"""The events of ordered subjects, which `history.events` does not have.

    {"process":"p1","type":"invoke","f":"put","t_ns":10,"subject":"orders","messages":[["k1",1],["k2",1]]}
    {"process":"p1","type":"ok","f":"put","t_ns":25,"subject":"orders","messages":[["k1",1]],"places":[[1,40,771]]}
    {"process":"p1","type":"ok","f":"put","t_ns":31,"subject":"orders","messages":[["k2",1]],"places":[[4,0,772]],"resent":true}
    {"process":"c1","type":"ok","f":"deliver","t_ns":33,"group":"g","partition":1,"first":0,"end":512,"token":7,"version":1,
     "handed":[[40,"k1","p1",1,1,771]]}
    {"process":"c1","type":"ok","f":"settle","t_ns":40,"group":"g","partition":1,"token":7,"sequences":[40],"began_ns":34}
    {"process":"nemesis","type":"ok","f":"route","t_ns":50,"version":2,"logical_partitions":1024,"partitions":[[2,0,512,"b1"],...],
     "sources":[1],"sealed":[[1,41]],"fenced":[],"began_ns":44,"published_ns":49}
    {"process":"nemesis","type":"invoke","f":"outage","t_ns":60,"op":1,"broker_group":"b2","kind":"kill"}
        ... and "ok" when the group has a master again

Rules for a recorder, besides those of `history.events`:

* **A producer, a key and a serial name a message.** The serial grows with each message that the
  producer sends with the key. One operation sends the message; the client's retries belong to it.
* **A put has one invoke**, with its messages in the order in which the producer got them, and an
  end for each part of it whose outcome became known at once. `resent` means that the client sent
  these messages again after a fence: they may be stored twice, under one id.
* **Record a delivery when the handler gets the message**, before the handler does anything with it.
  Everything that a dead consumer may have settled is then recorded. `process` names one life of a
  consumer.
* **Record a settlement after its answer**: `ok`, it is committed; `fail`, the lane was lost
  (LaneLost); `info`, unknown. Without such a line the outcome is unknown as well. `began_ns` is the
  time when the application settled the message.
* **Record routes from version 1 on.** If a version is recorded again, it is the same route, but
  more is known: the sequence of a command message that was missing (-1) because a fence closed its
  partition. `fenced` names all partitions that a fence ever closed.

The columns of an ordered history: what is known of each message, each delivery, and each grant of a
lane.

All versions of a route, from a history: for each logical partition the chain of partitions that
held it, one after another.

    version 1    1 [0, 8)
    version 2    2 [0, 4)   3 [4, 8)          a split of 1
    version 3    4 [0, 8)                     a merge of 2 and 3
    chain of logical partition 5              1, 3, 4

A partition is *since* the version in which it first appears; these versions grow along a chain.

An ordered history in columns: messages, deliveries and grants of lanes have numbers, which are
indexes into lists.

Plain loops walk a million messages a few times over these lists, without any lookup. The checkers
use these terms:

    line        the messages of one key by one producer, in the order of sending; order is promised
                within a line
    stored      a message that was acknowledged, or that some group got
    rank        a stored message's number within its line, from 0
    grant       a lane as one consumer had it: group, partition, range and token
    settled at  the earliest moment at which a group may have settled a message: when an acknowledgement that was not refused began

*May have*: a consumer that dies after its acknowledgement records no answer, and a message that it
settled need not come again. A message therefore counts as settled from the moment when its
acknowledgement began, or when a consumer got it and recorded nothing more, unless it certainly was
not settled.
"""  # noqa: E501

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import ClassVar, NamedTuple

from google_crc32c import value as crc32c  # type: ignore[import-untyped,unused-ignore]
from history.events import Operation, Reset, Type, learn


class Keyed(NamedTuple):
    """A message as its producer names it."""

    key: str
    serial: int


class Stored(NamedTuple):
    """The place where a message is stored. `id` is a number derived from the message id, such as a
    checksum.
    """

    partition: int
    sequence: int
    id: int = 0


class Handed(NamedTuple):
    """A message as a consumer is given it; `sequence` is its place in the delivery's partition."""

    sequence: int
    key: str
    producer: str
    serial: int
    attempt: int = 1
    id: int = 0


class Part(NamedTuple):
    """A physical partition of a route."""

    number: int
    first: int
    end: int
    broker_group: str


class Sealed(NamedTuple):
    """A source partition and the sequence of its command message; -1 while the sequence is
    unknown.
    """

    number: int
    sequence: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Put(Operation):
    """Messages are sent; at `ok` message i is at place i."""

    f: ClassVar[str] = "put"
    subject: str
    messages: tuple[Keyed, ...] = ()
    places: tuple[Stored, ...] = ()
    resent: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Deliver(Operation):
    """A consumer is given messages of one lane, `first` to `end` - 1 of a partition, under a token
    and a route version.
    """

    f: ClassVar[str] = "deliver"
    group: str
    partition: int
    first: int
    end: int
    token: int
    version: int
    handed: tuple[Handed, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Settle(Operation):
    """The result of settling messages of a lane."""

    f: ClassVar[str] = "settle"
    group: str
    partition: int
    token: int
    sequences: tuple[int, ...] = ()
    began_ns: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rerouted(Operation):
    """A version of the route, and its change: writes to the sources were refused from `began_ns` to
    `published_ns` at the longest.
    """

    f: ClassVar[str] = "route"
    version: int
    logical_partitions: int
    partitions: tuple[Part, ...] = ()
    sources: tuple[int, ...] = ()
    sealed: tuple[Sealed, ...] = ()
    fenced: tuple[int, ...] = ()
    began_ns: int | None = None
    published_ns: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage(Operation):
    """From the invoke to the `ok` of the same `op`, a broker group may have no serving master;
    `kind` is the cause, for figures.
    """

    f: ClassVar[str] = "outage"
    broker_group: str
    kind: str = "outage"


OrderedEvent = Put | Deliver | Settle | Rerouted | Outage

learn(
    *(Put, Deliver, Settle, Rerouted, Outage),
    messages=lambda found: tuple(Keyed(*each) for each in found),
    places=lambda found: tuple(Stored(*each) for each in found),
    handed=lambda found: tuple(Handed(*each) for each in found),
    partitions=lambda found: tuple(Part(*each) for each in found),
    sealed=lambda found: tuple(Sealed(*each) for each in found),
    sources=tuple,
    fenced=tuple,
)


def logical_partition(key: bytes, count: int) -> int:
    """The logical partition of a key, as docs/ORDERING.md defines it: written here once more, so
    that a mistake of the product's is not repeated by its judge.
    """
    return ((int(crc32c(key)) * 2_654_435_769 & 0xFFFF_FFFF) * count) >> 32


NEVER = 1 << 62
Line = tuple[str, str]
"""Producer and key."""


@dataclass(slots=True, eq=False)
class Grant:
    """A lane as granted to one consumer. `first_ns` is the time of the first delivery; the grant
    was earlier.
    """

    group: str
    partition: int
    token: int
    consumer: str
    lps: range
    version: int
    first_ns: int

    def __str__(self) -> str:
        return (
            f"{self.consumer} (token {self.token}, [{self.lps.start}, {self.lps.stop}) of "
            f"partition {self.partition})"
        )


class Outaged(NamedTuple):
    """A broker group may have had no master."""

    group: str
    since_ns: int
    until_ns: int
    kind: str


@dataclass(slots=True, eq=False)
class Messages:
    """Column by column, by a message's number."""

    line: list[int]
    serial: list[int]
    fate: list[Type]
    """`invoke` while it has no end."""
    is_resent: list[bool]
    place: list[Stored | None]
    """The place that the producer got in the answer."""
    invoked_ns: list[int]
    ended_ns: list[int]


@dataclass(slots=True, eq=False)
class Deliveries:
    """Column by column, by a delivery's number, in the order in which they happened."""

    message: list[int]
    grant: list[int]
    sequence: list[int]
    id: list[int]
    at_ns: list[int]
    began_ns: list[int]
    """When the settlement began; the delivery's own time if unknown."""
    end: list[Type]
    """The settlement's; `invoke` if there is none."""


def seconds(at_ns: int) -> str:
    """A moment, or "never"."""
    return "never" if at_ns >= NEVER else f"{at_ns / 1e9:.6f} s"


@dataclass(frozen=True, slots=True)
class Change:
    """The change that led to a version, with everything recorded about it."""

    version: int
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    began_ns: int | None
    published_ns: int | None


class Routes:
    """Raises ValueError if versions are missing or the route was recorded differently before."""

    def __init__(self, events: Iterable[Rerouted]) -> None:
        self.logical_partitions = 0
        self.parts: dict[int, Part] = {}
        self.since: dict[int, int] = {}
        self.sealed: dict[int, int] = {}
        """Of each closed partition the sequence of its command message; -1 if nobody knows it."""
        self.fenced: set[int] = set()
        self.changes: dict[int, Change] = {}
        self._routes: dict[int, tuple[Part, ...]] = {}
        for event in events:
            self._learn(event)
        if sorted(self._routes) != list(range(1, len(self._routes) + 1)):
            raise ValueError(
                "the history must record every version of the route, in order; it has "
                f"{sorted(self._routes)}"
            )
        for version in self._routes:
            for part in self._routes[version]:
                self.since.setdefault(part.number, version)
        self.chains = [self._chain(lp) for lp in range(self.logical_partitions)]

    def _learn(self, event: Rerouted) -> None:
        known = self._routes.setdefault(event.version, event.partitions)
        if known != event.partitions or self.logical_partitions not in (
            0,
            event.logical_partitions,
        ):
            raise ValueError(
                f"version {event.version} of the route was recorded as {known}, and as "
                f"{event.partitions}"
            )
        self.logical_partitions = event.logical_partitions
        before = {part.number for part in self._routes.get(event.version - 1, ())}
        targets = tuple(part.number for part in event.partitions if part.number not in before)
        self.parts.update((part.number, part) for part in event.partitions)
        self.changes.setdefault(
            event.version,
            Change(event.version, event.sources, targets, event.began_ns, event.published_ns),
        )
        self.fenced.update(event.fenced)
        for number, sequence in event.sealed:
            self.sealed[number] = max(sequence, self.sealed.get(number, -1))
            if sequence < 0:
                self.fenced.add(number)

    def _chain(self, lp: int) -> tuple[int, ...]:
        chain: list[int] = []
        for version in sorted(self._routes):
            (holder,) = [
                part.number for part in self._routes[version] if part.first <= lp < part.end
            ]
            if not chain or chain[-1] != holder:
                chain.append(holder)
        return tuple(chain)

    def held_by(self, group: str, since_ns: int, until_ns: int) -> frozenset[int]:
        """The logical partitions that a broker group held at some time in a route that was the
        latest then.
        """
        found: set[int] = set()
        for version, route in self._routes.items():
            if self._published_ns(version) <= until_ns and since_ns < self._published_ns(
                version + 1
            ):
                found.update(
                    lp
                    for part in route
                    if part.broker_group == group
                    for lp in range(part.first, part.end)
                )
        return frozenset(found)

    def _published_ns(self, version: int) -> int:
        """When the version became the latest; long ago if no time was recorded."""
        if version not in self.changes:
            return NEVER
        return self.changes[version].published_ns or 0

    def lps_of(self, numbers: Iterable[int]) -> list[range]:
        """The ranges of partitions."""
        return [
            range(self.parts[number].first, self.parts[number].end)
            for number in numbers
            if number in self.parts
        ]


class OrderedHistory:
    """`latest` are groups that began at the end of a route: what a line had before their first
    delivery is not theirs.

    Raises ValueError for a history that proves nothing: a message with no invoke, or sent twice;
    serials that do not grow.
    """

    def __init__(
        self,
        events: Iterable[Operation],
        *,
        groups: Collection[str] = (),
        latest: Collection[str] = (),
    ) -> None:
        self.messages = Messages([], [], [], [], [], [], [])
        self.deliveries = Deliveries([], [], [], [], [], [], [])
        self.lines: list[Line] = []
        self.line_messages: list[list[int]] = []
        self.grants: list[Grant] = []
        self.outages: list[Outaged] = []
        self.strangers: list[tuple[Deliver, int]] = []
        """Deliveries of messages that were never sent, each with its index."""
        self.reset_groups: set[str | None] = set()
        self.last_ns = 0
        self.latest = frozenset(latest)
        self._wanted = tuple(groups)
        self._line_of: dict[Line, int] = {}
        self._message_of: list[dict[int, int]] = []
        self._grant_of: dict[tuple[str, int, int, str, int, int], int] = {}
        self._handed: defaultdict[tuple[str, int, int, str], dict[int, int]] = defaultdict(dict)
        self._under_way: dict[tuple[str, int | None], Outage] = {}
        self.routes = Routes(self._read(events))
        self.lp_of_line = [
            logical_partition(key.encode(), self.routes.logical_partitions) for _, key in self.lines
        ]

    # --- reading, once ----------------------------------------------------------------------------

    def _read(self, events: Iterable[Operation]) -> list[Rerouted]:
        routes: list[Rerouted] = []
        for event in events:
            self.last_ns = max(self.last_ns, event.t_ns)
            match event:
                case Deliver():
                    self._delivered(event)
                case Settle():
                    self._settled(event)
                case Put(type="invoke"):
                    self._sent(event)
                case Put():
                    self._ended(event)
                case Rerouted():
                    routes.append(event)
                case Outage():
                    self._broken(event)
                case Reset():
                    self.reset_groups.add(event.group)
                case _:
                    pass
        self.outages += [
            Outaged(each.broker_group, each.t_ns, NEVER, each.kind)
            for each in self._under_way.values()
        ]
        return routes

    def _sent(self, put: Put) -> None:
        columns = self.messages
        for key, serial in put.messages:
            number = self._line((put.process, key))
            line = self.line_messages[number]
            if line and columns.serial[line[-1]] >= serial:
                raise ValueError(
                    f"serials must grow: {put.process} sent {key} {serial} after "
                    f"{columns.serial[line[-1]]}"
                )
            line.append(len(columns.line))
            self._message_of[number][serial] = len(columns.line)
            columns.line.append(number)
            columns.serial.append(serial)
            columns.fate.append("invoke")
            columns.is_resent.append(False)
            columns.place.append(None)
            columns.invoked_ns.append(put.t_ns)
            columns.ended_ns.append(NEVER)

    def _line(self, name: Line) -> int:
        number = self._line_of.get(name)
        if number is None:
            number = self._line_of[name] = len(self.lines)
            self.lines.append(name)
            self.line_messages.append([])
            self._message_of.append({})
        return number

    def find(self, producer: str, key: str, serial: int) -> int:
        """The number of a message; -1 if it was never sent."""
        line = self._line_of.get((producer, key))
        return -1 if line is None else self._message_of[line].get(serial, -1)

    def _ended(self, put: Put) -> None:
        columns = self.messages
        if put.type == "ok" and len(put.places) != len(put.messages):
            raise ValueError(f"an acknowledged put must say where each message is: {put}")
        for index, (key, serial) in enumerate(put.messages):
            number = self.find(put.process, key, serial)
            if number < 0 or columns.fate[number] != "invoke":
                raise ValueError(
                    f"{put.process}'s {key} {serial} ends without having begun, or twice"
                )
            columns.fate[number] = put.type
            columns.ended_ns[number] = put.t_ns
            columns.is_resent[number] = bool(put.resent)
            if put.type == "ok":
                columns.place[number] = put.places[index]

    def _delivered(self, event: Deliver) -> None:
        name = (event.group, event.partition, event.token, event.process, event.first, event.end)
        grant = self._grant_of.get(name)
        if grant is None:
            grant = self._grant_of[name] = len(self.grants)
            lps = range(event.first, event.end)
            self.grants.append(
                Grant(
                    event.group,
                    event.partition,
                    event.token,
                    event.process,
                    lps,
                    event.version,
                    event.t_ns,
                )
            )
        columns, handed = self.deliveries, self._handed[name[:4]]
        for index, (sequence, key, producer, serial, _, id) in enumerate(event.handed):
            number = self.find(producer, key, serial)
            if number < 0:
                handed[sequence] = -1
                self.strangers.append((event, index))
                continue
            handed[sequence] = len(columns.message)
            columns.message.append(number)
            columns.grant.append(grant)
            columns.sequence.append(sequence)
            columns.id.append(id)
            columns.at_ns.append(event.t_ns)
            columns.began_ns.append(event.t_ns)
            columns.end.append("invoke")

    def _settled(self, event: Settle) -> None:
        columns = self.deliveries
        handed = self._handed[event.group, event.partition, event.token, event.process]
        for sequence in event.sequences:
            number = handed.get(sequence)
            if number is None:
                raise ValueError(
                    f"{event.process} settled what it was not given: {sequence} of partition "
                    f"{event.partition}"
                )
            if number < 0:
                continue
            columns.end[number] = event.type
            if event.began_ns is not None:
                columns.began_ns[number] = event.began_ns

    def _broken(self, event: Outage) -> None:
        key = (event.process, event.op)
        if event.type == "invoke":
            self._under_way[key] = event
        else:
            begun = self._under_way.pop(key)
            self.outages.append(Outaged(begun.broker_group, begun.t_ns, event.t_ns, begun.kind))

    # --- what follows from it ---------------------------------------------------------------------

    @cached_property
    def groups(self) -> tuple[str, ...]:
        """The groups that must see everything: the named ones, or all groups with deliveries."""
        return self._wanted or tuple(dict.fromkeys(grant.group for grant in self.grants))

    @cached_property
    def of_group(self) -> dict[str, list[int]]:
        """The deliveries of each group, in order."""
        found: dict[str, list[int]] = {group: [] for group in self.groups}
        lists = [found.setdefault(grant.group, []) for grant in self.grants]
        for number, grant in enumerate(self.deliveries.grant):
            lists[grant].append(number)
        return found

    @cached_property
    def stored(self) -> list[int]:
        """The numbers of stored messages, in the order of sending within each line."""
        given = bytearray(len(self.messages.line))
        for message in self.deliveries.message:
            given[message] = 1
        fate = self.messages.fate
        return [
            number
            for line in self.line_messages
            for number in line
            if fate[number] == "ok" or given[number]
        ]

    @cached_property
    def ranks(self) -> list[int]:
        """The rank of each message; -1 if it is not stored."""
        found, counts = [-1] * len(self.messages.line), [0] * len(self.lines)
        line_of = self.messages.line
        for number in self.stored:
            found[number] = counts[line_of[number]]
            counts[line_of[number]] += 1
        return found

    @cached_property
    def by_rank(self) -> list[list[int]]:
        """The stored messages of each line."""
        found: list[list[int]] = [[] for _ in self.lines]
        line_of = self.messages.line
        for number in self.stored:
            found[line_of[number]].append(number)
        return found

    @cached_property
    def copies(self) -> dict[int, list[tuple[int, int, int]]]:
        """For each message seen at more than one place: (version of the first, partition,
        sequence), in the log's order.
        """
        since, found = self.routes.since, defaultdict[int, set[tuple[int, int, int]]](set)
        told, grants, columns = self.messages.place, self.grants, self.deliveries
        at: list[tuple[int, int] | None] = [None if place is None else place[:2] for place in told]
        for number, message in enumerate(columns.message):
            place = (grants[columns.grant[number]].partition, columns.sequence[number])
            known = at[message]
            if known is None:
                at[message] = place
            elif known != place:
                found[message] |= {
                    (since.get(part, 0), part, sequence) for part, sequence in (known, place)
                }
        self._places = at
        return {message: sorted(places) for message, places in found.items()}

    @cached_property
    def places(self) -> list[tuple[int, int] | None]:
        """For each message one place (partition, sequence) where it was seen. `copies` has all
        places of messages with several.
        """
        assert self.copies is not None
        return self._places

    def settled_at(self, group: str) -> list[int]:
        """For each message the earliest time at which the group may have settled it, at any place;
        0 for messages outside the group's range.
        """
        return self._settled_at[group][0]

    def copy_settled_at(self, group: str, message: int, partition: int) -> int:
        """The same for one of several copies."""
        return self._settled_at[group][1].get((message, partition), NEVER)

    @cached_property
    def _settled_at(self) -> dict[str, tuple[list[int], dict[tuple[int, int], int]]]:
        return {group: self._settled_of(group) for group in self.of_group}

    def _settled_of(self, group: str) -> tuple[list[int], dict[tuple[int, int], int]]:
        columns, copies = self.deliveries, self.copies
        by_message, by_copy = [NEVER] * len(self.messages.line), dict[tuple[int, int], int]()
        for number in self.of_group[group]:
            if columns.end[number] == "fail":
                continue
            message, began_ns = columns.message[number], columns.began_ns[number]
            by_message[message] = min(by_message[message], began_ns)
            if message in copies:
                copy = message, self.grants[columns.grant[number]].partition
                by_copy[copy] = min(by_copy.get(copy, NEVER), began_ns)
        if group in self.latest:
            self._forget_before(group, by_message)
        return by_message, by_copy

    def _forget_before(self, group: str, by_message: list[int]) -> None:
        """Exclude the messages before the first delivery of a group that started at the end."""
        given = set(map(self.deliveries.message.__getitem__, self.of_group[group]))
        for line in self.by_rank:
            begin = next((at for at, message in enumerate(line) if message in given), len(line))
            for message in line[:begin]:
                by_message[message] = 0

    def all_settled_at(self, group: str) -> list[list[int]]:
        """By line and rank: the earliest time at which the group may have settled that message and
        all before it in the line.
        """
        settled = self.settled_at(group)
        return [
            list(accumulate((settled[message] for message in line), max)) for line in self.by_rank
        ]

    # --- in words ---------------------------------------------------------------------------------

    def name(self, message: int) -> str:
        """A message, for a person."""
        producer, key = self.lines[self.messages.line[message]]
        return f"{key} {self.messages.serial[message]} of {producer}"

    def grant_of(self, delivery: int) -> Grant:
        """Under which a delivery was made."""
        return self.grants[self.deliveries.grant[delivery]]

    def when(self, delivery: int) -> str:
        """Describe a delivery for a person: consumer, place, time."""
        columns = self.deliveries
        return (
            f"{self.grant_of(delivery)}, sequence {columns.sequence[delivery]}, at "
            f"{seconds(columns.at_ns[delivery])}"
        )
