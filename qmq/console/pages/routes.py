"""The pages of an ordered subject.

*Route*: its logical partitions by version. A person sees the plan of a change, makes it, and
watches it.

*Lanes*: which consumer holds which range of logical partitions, and the keys that groups parked.

A route is drawn as a ring, the latest version outside, older versions inside; ranges are a strip
from the first logical partition to the last.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

from starlette.responses import Response

from qmq.console.page import ConsolePage, RefusedRequest, Show, number_of
from qmq.console.pages.subject import subject_of
from qmq.console.wording import command
from qmq.errors import InvalidArgument, QmqError
from qmq.model import check_name
from qmq.operations.letters import unparked
from qmq.operations.routes import change_facts, described, place_facts, plan_facts
from qmq.operations.text import key_text
from qmq.proto.v1 import meta_pb2 as pb

SIZE: Final = 400
"""The width and the height of the drawing; the ring's centre is in the middle."""
OUTER: Final = 190.0
RING_WIDTH: Final = 34.0
STEP: Final = 40.0
VERSIONS_MAX: Final = 4


@dataclass(frozen=True, slots=True)
class RingArc:
    """One partition in one version: an SVG path, its colour, and its label."""

    path: str
    kind: int
    version: int
    partition: int
    first: int
    end: int
    broker_group: str

    @property
    def title(self) -> str:
        return (
            f"v{self.version} · {self.partition}: {self.first} - {self.end - 1}, "
            f"{self.broker_group}"
        )


def ring(
    routes: Mapping[int, Sequence[Mapping[str, Any]]], count: int, groups: Sequence[str], kinds: int
) -> list[RingArc]:
    """The arcs of `routes` (partitions by version), the latest VERSIONS_MAX versions, of `count`
    logical partitions.
    """
    arcs: list[RingArc] = []
    for place, version in enumerate(sorted(routes, reverse=True)[:VERSIONS_MAX]):
        outer = OUTER - place * STEP
        for each in sorted(routes[version], key=lambda each: int(each["first"])):
            name = each["broker_group"]
            kind = groups.index(name) % kinds if name in groups else 0
            path = arc_path(each["first"] / count, each["end"] / count, outer, outer - RING_WIDTH)
            arcs.append(
                RingArc(path, kind, version, each["partition"], each["first"], each["end"], name)
            )
    return arcs


def arc_path(begin: float, end: float, outer: float, inner: float) -> str:
    """An SVG path from `begin` to `end` of a turn (0 to 1, clockwise from the top) between two
    radii. A whole turn consists of two half turns.
    """
    if end - begin >= 1.0:
        return (
            arc_path(begin, begin + 0.5, outer, inner)
            + " "
            + arc_path(begin + 0.5, begin + 0.99999, outer, inner)
        )
    large = 1 if end - begin > 0.5 else 0
    a, b, c, d = _point(begin, outer), _point(end, outer), _point(end, inner), _point(begin, inner)
    return f"M{a} A{outer:g} {outer:g} 0 {large} 1 {b} L{c} A{inner:g} {inner:g} 0 {large} 0 {d} Z"


def _point(turn: float, radius: float) -> str:
    angle = 2 * math.pi * turn
    return f"{SIZE / 2 + radius * math.sin(angle):.2f} {SIZE / 2 - radius * math.cos(angle):.2f}"


KINDS: Final = 6
"""Colours: broker groups, or consumers, in turn."""
STRIP_WIDTH: Final = 1000
"""The width of the whole strip."""


@dataclass(frozen=True, slots=True)
class StripRange:
    """A range in a strip WIDTH wide; `kind` chooses its colour."""

    x: float
    width: float
    kind: int
    title: str


def partition_ranges(
    places: Sequence[Mapping[str, Any]], count: int, groups: Sequence[str]
) -> list[StripRange]:
    """Partitions by their broker groups, of `count` logical partitions."""
    return [
        _drawn(
            each,
            count,
            _kind(each["broker_group"], groups),
            f"{each['partition']}: {_range(each)}, {each['broker_group']}",
        )
        for each in sorted(places, key=lambda each: int(each["first"]))
    ]


def version_ranges(
    frontier: Sequence[Mapping[str, Any]], count: int, latest: int
) -> list[StripRange]:
    """The ranges that a consumer group reads, of the latest version and of older ones."""
    return [
        _drawn(
            each,
            count,
            0 if each["version"] >= latest else 1,
            f"{_range(each)}: v{each['version']}",
        )
        for each in frontier
    ]


def lane_ranges(lanes: Sequence[Mapping[str, Any]], count: int) -> list[StripRange]:
    """Lanes by the consumers that hold them. A lane without a consumer is a gap."""
    consumers = sorted({each["consumer"] for each in lanes if each["consumer"]})
    return [
        _drawn(
            each, count, _kind(each["consumer"], consumers), f"{_range(each)}: {each['consumer']}"
        )
        for each in sorted(lanes, key=lambda each: int(each["first"]))
        if each["consumer"]
    ]


def _drawn(each: Mapping[str, Any], count: int, kind: int, title: str) -> StripRange:
    return StripRange(
        round(STRIP_WIDTH * each["first"] / count, 2),
        round(STRIP_WIDTH * (each["end"] - each["first"]) / count, 2),
        kind,
        title,
    )


def _range(each: Mapping[str, Any]) -> str:
    return f"{each['first']} - {each['end'] - 1}"


def _kind(name: str, names: Sequence[str]) -> int:
    return names.index(name) % KINDS if name in names else 0


VERBS: Final = ("split", "merge", "move")
NUMBER_MAX: Final = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """The change in a form."""

    verb: str = ""
    partitions: tuple[int, ...] = ()
    at: tuple[int, ...] = ()
    parts: int = 0
    to: str = ""

    @classmethod
    def of(cls, given: Mapping[str, str]) -> RouteRequest:
        """Parse an address or a form; the result is empty if there is no change.
        Raises InvalidArgument.
        """
        verb = given.get("verb", "").strip()
        if not verb:
            return cls()
        if verb not in VERBS:
            raise InvalidArgument(f"a route is split, merged or moved, not {verb!r}")
        partitions = _numbers("partitions", given.get("partitions", ""))
        if not partitions or (len(partitions) > 1) is not (verb == "merge"):
            raise InvalidArgument(
                "a merge names two partitions or more, a split or a move names one"
            )
        to = given.get("to", "").strip()
        if verb == "move" and not to:
            raise InvalidArgument("a move needs the partition's new broker group")
        return cls(
            verb,
            partitions,
            _numbers("at", given.get("at", "")),
            number_of("parts", given.get("parts", ""), 0, 1024),
            to,
        )

    def operation(self) -> dict[str, Any]:
        """The operation for `MetadataClient.change_route`."""
        if self.verb == "merge":
            return {"merge": pb.MergeOperation(partitions=self.partitions, broker_group=self.to)}
        if self.verb == "move":
            return {"move": pb.MoveOperation(partition=self.partitions[0], broker_group=self.to)}
        count = len(self.at) + 1 if self.at else self.parts or 2
        groups = [self.to] * count if self.to else []
        parts = 0 if self.at else count
        return {
            "split": pb.SplitOperation(
                partition=self.partitions[0], at=sorted(self.at), parts=parts, broker_groups=groups
            )
        }

    def line(self, subject: str) -> str:
        """The command line that makes the same change."""
        options: dict[str, Any] = {"to": self.to}
        if self.verb == "split":
            options |= {"at": self.at, "partitions": None if self.at else self.parts or None}
        return command("route", self.verb, subject, *self.partitions, **options)


def _numbers(name: str, text: str) -> tuple[int, ...]:
    return tuple(number_of(name, each, 0, NUMBER_MAX) for each in text.replace(",", " ").split())


async def show_route(page: ConsolePage) -> Response:
    """Show the route; with a change in the address, also its plan."""
    subject = subject_of(page)
    found = await described(page.mq.metadata, subject)
    asked, plan, failure = RouteRequest(), None, ""
    try:
        asked = RouteRequest.of(page.request.query_params)
        if asked.verb:
            plan = await _plan(page, subject, asked)
    except QmqError as cause:
        failure = str(cause)
    history = await page.mq.metadata.route_history(subject)
    groups = sorted(
        {each["broker_group"] for each in [*found["partitions"], *(plan["after"] if plan else [])]}
    )
    count = found["logical_partitions"]
    return await page.render(
        "route.html",
        400 if failure else 200,
        subject=subject,
        route=found,
        drawn=partition_ranges(found["partitions"], count, groups),
        planned=partition_ranges(plan["after"], count, groups) if plan else [],
        ring=ring(await _versions(page, subject, found), count, groups, KINDS),
        broker_groups=groups,
        following=_following(found),
        history=[change_facts(each) for each in reversed(history)],
        asked=asked,
        plan=plan,
        failure=failure,
        command=command("route", "show", subject),
        plan_command=asked.line(subject) if asked.verb else "",
        verbs=VERBS,
    )


async def _versions(
    page: ConsolePage, subject: str, found: dict[str, Any]
) -> dict[int, list[dict[str, Any]]]:
    """The partitions of the latest route versions."""
    latest = found["version"]
    older = range(max(1, latest - VERSIONS_MAX + 1), latest)
    routes = await asyncio.gather(
        *[page.mq.metadata.describe_route(subject, version) for version in older]
    )
    return {
        each.route.version: [place_facts(part) for part in each.route.partitions] for each in routes
    } | {latest: found["partitions"]}


def _following(found: dict[str, Any]) -> list[dict[str, Any]]:
    """The groups that still read older route versions,
    each with the versions that its lanes read. Pure.
    """
    count, latest = found["logical_partitions"], found["latest_version"]
    return [
        {
            "group": group["group"],
            "gate": group["gate"],
            "left": group["left"],
            "ranges": version_ranges(group["frontier"], count, latest),
        }
        for group in found["groups"]
        if group["version"] < latest or any(each["version"] < latest for each in group["frontier"])
    ]


async def _plan(page: ConsolePage, subject: str, asked: RouteRequest) -> dict[str, Any]:
    now = await page.mq.metadata.describe_route(subject)
    planned = await page.mq.metadata.change_route(
        subject, **asked.operation(), from_version=now.route.version, dry_run=True
    )
    return plan_facts(now, planned, await page.mq.metadata.route_history(subject))


async def change_route(page: ConsolePage) -> Response:
    """Make a planned change, if the route still has the version for which the plan was made."""
    form, subject = await page.form(), subject_of(page)
    if form.get("confirm", "").strip() != subject:
        raise RefusedRequest(HTTPStatus.BAD_REQUEST, page.words("refused.confirm", name=subject))
    asked = RouteRequest.of(form)
    version = number_of("version", form.get("version", ""), 0, NUMBER_MAX)
    if not asked.verb or not version:
        raise InvalidArgument(
            "the form names no change, or no version from which it starts: plan it first"
        )
    reason = f"console: {await page.caller.principal()}"
    made = await page.mq.metadata.change_route(
        subject, **asked.operation(), from_version=version, reason=reason
    )
    return page.back(
        f"/subjects/{subject}/route", page.words("route.changed", version=made.change.to_version)
    )


PAGES: Final[tuple[tuple[str, Show], ...]] = (("/subjects/{subject}/route", show_route),)
ACTS: Final[tuple[tuple[str, Show], ...]] = (("/subjects/{subject}/route", change_route),)


PARKED_MAX: Final = 200
"""Parked keys of a consumer group that are shown."""


@dataclass(frozen=True, slots=True)
class ShownParkedKey:
    """A key that a consumer group parked in a partition. `key` is in the notation of `qmq dlq`."""

    group: str
    key: str
    partition: int
    messages: int


async def show_lanes(page: ConsolePage) -> Response:
    """The lanes of each consumer group, and its parked keys."""
    subject = subject_of(page)
    route = await described(page.mq.metadata, subject)
    return await page.render(
        "lanes.html",
        subject=subject,
        route=route,
        left={each["group"]: each["left"] for each in route["groups"]},
        strips={
            each["group"]: lane_ranges(each["lanes"], route["logical_partitions"])
            for each in route["groups"]
        },
        parked=await _parked(page, subject, route),
        make_command=command,
    )


async def _parked(page: ConsolePage, subject: str, route: dict[str, Any]) -> list[ShownParkedKey]:
    found = []
    for group in [each["group"] for each in route["groups"] if each["parked_keys"]]:
        keys = await page.mq.metadata.parked(subject, group, keys_max=PARKED_MAX)
        found += [
            ShownParkedKey(group, key_text(each.key), each.partition, each.messages)
            for each in keys
        ]
    return found


async def act_on_key(page: ConsolePage) -> Response:
    """Give a parked key's messages back in order, or skip them for good;
    a skip asks for the key.
    """
    form, subject = await page.form(), subject_of(page)
    verb, group, key = (
        form.get("verb", ""),
        check_name("group", form.get("group", "")),
        form.get("key", ""),
    )
    if verb not in ("replay", "skip"):
        raise InvalidArgument(f"a parked key is replayed or skipped, not {verb!r}")
    if verb == "skip" and form.get("confirm", "") != key:
        raise RefusedRequest(HTTPStatus.BAD_REQUEST, page.words("refused.confirm", name=key))
    done = await unparked(page.mq, subject, group, key, is_replay=verb == "replay", dry_run=False)
    return page.back(
        f"/subjects/{subject}/lanes",
        page.words(f"lanes.key_{verb}", name=key, count=sum(row[2] for row in done)),
    )


LANE_PAGES: Final[tuple[tuple[str, Show], ...]] = (("/subjects/{subject}/lanes", show_lanes),)
LANE_ACTS: Final[tuple[tuple[str, Show], ...]] = (("/subjects/{subject}/lanes", act_on_key),)
