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

* **A producer, a key and a serial name a message.** The serial grows with each message that the producer sends with the key. One operation
  sends the message; the client's retries belong to it.
* **A put has one invoke**, with its messages in the order in which the producer got them, and an end for each part of it whose outcome
  became known at once. `resent` means that the client sent these messages again after a fence: they may be stored twice, under one id.
* **Record a delivery when the handler gets the message**, before the handler does anything with it. Everything that a dead consumer may
  have settled is then recorded. `process` names one life of a consumer.
* **Record a settlement after its answer**: `ok`, it is committed; `fail`, the lane was lost (LaneLost); `info`, unknown. Without such a
  line the outcome is unknown as well. `began_ns` is the time when the application settled the message.
* **Record routes from version 1 on.** If a version is recorded again, it is the same route, but more is known: the sequence of a
  command message that was missing (-1) because a fence closed its partition. `fenced` names all partitions that a fence ever closed.

The columns of an ordered history: what is known of each message, each delivery, and each grant of a lane.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from history.events import Operation, Type, learn


class Keyed(NamedTuple):
    """A message as its producer names it."""

    key: str
    serial: int


class Stored(NamedTuple):
    """The place where a message is stored. `id` is a number derived from the message id, such as a checksum."""

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
    """A source partition and the sequence of its command message; -1 while the sequence is unknown."""

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
    """A consumer is given messages of one lane, `first` to `end` - 1 of a partition, under a token and a route version."""

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
    """A version of the route, and its change: writes to the sources were refused from `began_ns` to `published_ns` at the longest."""

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
    """From the invoke to the `ok` of the same `op`, a broker group may have no serving master; `kind` is the cause, for figures."""

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


NEVER = 1 << 62
Line = tuple[str, str]
"""Producer and key."""


@dataclass(slots=True, eq=False)
class Grant:
    """A lane as granted to one consumer. `first_ns` is the time of the first delivery; the grant was earlier."""

    group: str
    partition: int
    token: int
    consumer: str
    lps: range
    version: int
    first_ns: int

    def __str__(self) -> str:
        return f"{self.consumer} (token {self.token}, [{self.lps.start}, {self.lps.stop}) of partition {self.partition})"


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
