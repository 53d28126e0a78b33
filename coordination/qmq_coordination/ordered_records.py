"""Ordered subjects in the coordination store: routes, changes, groups, members, assignments, fences
(docs/ORDERING.md).

    /qmq/routes/SUBJECT/v/NUMBER
        Route, JSON: an ordered subject's route of one version; written once
        removed by the deletion of the subject
    /qmq/routes/SUBJECT/latest
        the version that producers use; every change compares it
        removed by the deletion of the subject
    /qmq/routes/SUBJECT/c/NUMBER
        Change, JSON: the change that led, or leads, to a version: its content, phase, times and
        reason
        removed by the deletion of the subject
    /qmq/routes/SUBJECT/g/GROUP
        GroupRecord, JSON: a consumer group's frontier and gate
        removed by the deletion of the consumer group, or of the subject
    /qmq/routes/SUBJECT/policy
        the policy of automatic resharding, JSON
        removed by the deletion of the subject
    /qmq/routes/SUBJECT/decision
        the last decision of automatic resharding, JSON
        removed by the deletion of the subject
    /qmq/routes/SUBJECT/stale/BROKER-GROUP
        what the broker group's log has and the store has forgotten; the routes are then not served
        removed by the broker group's master, when the store has it again; the deletion of the
        subject
    /qmq/members/SUBJECT/GROUP/CONSUMER
        MemberRecord, JSON: a live consumer, under its lease
        removed by its lease
    /qmq/assignments/SUBJECT/GROUP
        Assignment, JSON: which consumer should read which lane
        removed by the deletion of the consumer group, or of the subject
    /qmq/fences/BROKER-GROUP/SUBJECT/PARTITION
        Fence, JSON: a partition that was closed while its broker group was unreachable
        removed by the leading metaserver, when the seal is known; the deletion of the subject
    /qmq/meta/leader
        the metaserver that continues unfinished work, under its lease
        removed by its lease

Numbers in keys have ten digits, so that keys sort as numbers do. This module has keys and values,
and parses listings of them; the transactions are in qmq/meta/ordered/.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from qmq_ordering.lanes import GroupRecord
from qmq_ordering.routes import FENCED, Change, Phase, PhysicalPartition, Route

from qmq_coordination.coordination_store import KeyValue

ROUTES: Final = "/qmq/routes/"
MEMBERS: Final = "/qmq/members/"
ASSIGNMENTS: Final = "/qmq/assignments/"
FENCES: Final = "/qmq/fences/"
LEADER: Final = "/qmq/meta/leader"


def route_key(subject: str, version: int) -> str:
    """The key of one version of a subject's route."""
    return f"{ROUTES}{subject}/v/{version:010d}"


def latest_key(subject: str) -> str:
    """The key of the number of a subject's latest route version."""
    return f"{ROUTES}{subject}/latest"


def change_key(subject: str, to_version: int) -> str:
    """The key of the change that leads to a version."""
    return f"{ROUTES}{subject}/c/{to_version:010d}"


def group_record_key(subject: str, group: str) -> str:
    """The key of a consumer group's frontier."""
    return f"{ROUTES}{subject}/g/{group}"


def groups_prefix(subject: str) -> str:
    """The prefix of all consumer groups' frontiers."""
    return f"{ROUTES}{subject}/g/"


def stale_prefix(subject: str) -> str:
    """The prefix of all keys by which broker groups say that the subject's routes are older than
    their logs.
    """
    return f"{ROUTES}{subject}/stale/"


def stale_key(subject: str, broker_group: str) -> str:
    """The key by which a broker group says that the subject's routes are older than its log."""
    return f"{stale_prefix(subject)}{broker_group}"


def policy_key(subject: str) -> str:
    """The key of the policy of automatic resharding."""
    return f"{ROUTES}{subject}/policy"


def decision_key(subject: str) -> str:
    """The key of the last automatic decision."""
    return f"{ROUTES}{subject}/decision"


def member_key(subject: str, group: str, consumer: str) -> str:
    """The key of a consumer while it is alive; with an empty name, the prefix of all consumers."""
    return f"{MEMBERS}{subject}/{group}/{consumer}"


def assignment_key(subject: str, group: str) -> str:
    """The key of a group's assignment."""
    return f"{ASSIGNMENTS}{subject}/{group}"


def fence_key(broker_group: str, subject: str, partition: int) -> str:
    """The key of a partition's fence."""
    return f"{FENCES}{broker_group}/{subject}/{partition:010d}"


@dataclass(frozen=True, slots=True)
class Fence:
    """The change with which a broker group must seal the partition when it is back."""

    change_id: str
    to_version: int

    def is_needed(self, change: Change | None, number: int) -> bool:
        """True until the record of the fence's change has the seal of partition `number`. `change`
        is the record that leads to `to_version`: None, or another one, if the subject was deleted
        since.
        """
        return (
            change is not None
            and change.id == self.change_id
            and change.sealed.get(number, FENCED) == FENCED
        )

    def encode(self) -> bytes:
        return json.dumps(
            {"change_id": self.change_id, "to_version": self.to_version}, sort_keys=True
        ).encode()

    @classmethod
    def decode(cls, data: bytes) -> Fence:
        found = json.loads(data)
        return cls(found["change_id"], found["to_version"])


@dataclass(frozen=True, slots=True)
class MemberRecord:
    """A consumer of a group; `since` orders the incarnations of one name. `condition` is what it
    selects among the messages by itself; None: it does not know the field.
    """

    consumer: str
    incarnation: str
    since_ms: int = 0
    condition: str | None = None

    def encode(self) -> bytes:
        found: dict[str, str | int] = {
            "consumer": self.consumer,
            "incarnation": self.incarnation,
            "since_ms": self.since_ms,
        }
        if self.condition is not None:
            found["condition"] = self.condition
        return json.dumps(found, sort_keys=True).encode()

    @classmethod
    def decode(cls, data: bytes) -> MemberRecord:
        found = json.loads(data)
        return cls(
            found["consumer"], found["incarnation"], found["since_ms"], found.get("condition")
        )


@dataclass(slots=True)
class OrderedState:
    """All keys under `/qmq/routes/S/` at one moment. Items are kept for compare-and-swap."""

    subject: str
    items: dict[str, KeyValue] = field(default_factory=dict)
    """The items by full key."""
    routes: dict[int, Route] = field(default_factory=dict)
    changes: dict[int, Change] = field(default_factory=dict)
    groups: dict[str, GroupRecord] = field(default_factory=dict)
    stale: dict[str, str] = field(default_factory=dict)
    """By broker group, what the store has forgotten of its seals: the store's data was put back."""
    latest: int = 0

    @property
    def route(self) -> Route | None:
        return self.routes.get(self.latest)

    @property
    def broker_groups(self) -> list[str]:
        """All broker groups with a partition of any version, in order."""
        return sorted({part.group for route in self.routes.values() for part in route.partitions})

    @property
    def fenced(self) -> list[int]:
        """The fenced partitions of older versions.
        Their broker groups have not reported the seal yet.
        """
        published = [
            change for version, change in sorted(self.changes.items()) if version <= self.latest
        ]
        return [
            number
            for change in published
            for number, sequence in sorted(change.sealed.items())
            if sequence == FENCED
        ]

    def partition(self, number: int) -> PhysicalPartition | None:
        """The partition with that number. Partitions never change."""
        found = (route.partition(number) for _, route in sorted(self.routes.items(), reverse=True))
        return next((part for part in found if part is not None), None)

    @property
    def pending(self) -> Change | None:
        """The change under way: prepared or sealed, not published."""
        change = self.changes.get(self.latest + 1)
        return (
            change
            if change is not None and change.phase in (Phase.PREPARED, Phase.SEALED)
            else None
        )

    def put(self, item: KeyValue) -> None:
        """Apply an item. An item of an unknown kind is kept and has no effect."""
        self.items[item.key] = item
        what, _, name = item.key[len(ROUTES) + len(self.subject) + 1 :].partition("/")
        if what == "v":
            self.routes[int(name)] = Route.decode(item.value)
        elif what == "c":
            self.changes[int(name)] = Change.decode(item.value)
        elif what == "g":
            self.groups[name] = GroupRecord.decode(item.value)
        elif what == "stale":
            self.stale[name] = item.value.decode()
        elif what == "latest":
            self.latest = int(item.value)

    def drop(self, key: str) -> None:
        """Remove an item that was deleted with its group or its subject."""
        self.items.pop(key, None)
        what, _, name = key[len(ROUTES) + len(self.subject) + 1 :].partition("/")
        if what == "g":
            self.groups.pop(name, None)
        elif what == "stale":
            self.stale.pop(name, None)
        elif what == "v":
            self.routes.pop(int(name), None)
        elif what == "c":
            self.changes.pop(int(name), None)
        elif what == "latest":
            self.latest = 0


def ordered_state(subject: str, items: Iterable[KeyValue]) -> OrderedState:
    """Decode the state from a listing of `/qmq/routes/S/`."""
    state = OrderedState(subject)
    for item in items:
        state.put(item)
    return state
