"""The pages of an ordered subject.

*Route*: its logical partitions by version. A person sees the plan of a change, makes it, and watches it.

*Lanes*: which consumer holds which range of logical partitions, and the keys that groups parked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

from starlette.responses import Response

from qmq.console.drawings import KINDS, VERSIONS_MAX, lane_ranges, partition_ranges, ring, version_ranges
from qmq.console.page import ConsolePage, RefusedRequest, Show, number_of
from qmq.console.pages.subject import subject_of
from qmq.console.wording import command
from qmq.errors import InvalidArgument, QmqError
from qmq.model import check_name
from qmq.operations.parked_keys import unparked
from qmq.operations.routes import change_facts, described, place_facts, plan_facts
from qmq.operations.text import key_text
from qmq.proto.v1 import meta_pb2 as pb

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
        """Parse an address or a form; the result is empty if there is no change. Raises InvalidArgument."""
        verb = given.get("verb", "").strip()
        if not verb:
            return cls()
        if verb not in VERBS:
            raise InvalidArgument(f"a route is split, merged or moved, not {verb!r}")
        partitions = _numbers("partitions", given.get("partitions", ""))
        if not partitions or (len(partitions) > 1) is not (verb == "merge"):
            raise InvalidArgument("a merge names two partitions or more, a split or a move names one")
        to = given.get("to", "").strip()
        if verb == "move" and not to:
            raise InvalidArgument("a move needs the partition's new broker group")
        return cls(verb, partitions, _numbers("at", given.get("at", "")), number_of("parts", given.get("parts", ""), 0, 1024), to)

    def operation(self) -> dict[str, Any]:
        """The operation for `MetadataClient.change_route`."""
        if self.verb == "merge":
            return {"merge": pb.MergeOperation(partitions=self.partitions, broker_group=self.to)}
        if self.verb == "move":
            return {"move": pb.MoveOperation(partition=self.partitions[0], broker_group=self.to)}
        count = len(self.at) + 1 if self.at else self.parts or 2
        groups = [self.to] * count if self.to else []
        parts = 0 if self.at else count
        return {"split": pb.SplitOperation(partition=self.partitions[0], at=sorted(self.at), parts=parts, broker_groups=groups)}

    def line(self, subject: str) -> str:
        """The command line that makes the same change."""
        options: dict[str, Any] = {"to": self.to}
        if self.verb == "split":
            options |= {"at": self.at, "parts": None if self.at else self.parts or None}
        return command("route", self.verb, subject, *self.partitions, **options)


def _numbers(name: str, text: str) -> tuple[int, ...]:
    return tuple(number_of(name, each, 0, NUMBER_MAX) for each in text.replace(",", " ").split())


async def show_route(page: ConsolePage) -> Response:
    """Show the route; with a change in the address, also its plan."""
    subject = subject_of(page)
    found = await described(page.mq, subject)
    asked, plan, failure = RouteRequest(), None, ""
    try:
        asked = RouteRequest.of(page.request.query_params)
        if asked.verb:
            plan = await _plan(page, subject, asked)
    except QmqError as cause:
        failure = str(cause)
    history = await page.mq.metadata.route_history(subject)
    groups = sorted({each["broker_group"] for each in [*found["partitions"], *(plan["after"] if plan else [])]})
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


async def _versions(page: ConsolePage, subject: str, found: dict[str, Any]) -> dict[int, list[dict[str, Any]]]:
    """The partitions of the latest route versions."""
    latest = found["version"]
    older = range(max(1, latest - VERSIONS_MAX + 1), latest)
    routes = await asyncio.gather(*[page.mq.metadata.describe_route(subject, version) for version in older])
    return {each.route.version: [place_facts(part) for part in each.route.partitions] for each in routes} | {latest: found["partitions"]}


def _following(found: dict[str, Any]) -> list[dict[str, Any]]:
    """The groups that still read older route versions, each with the versions that its lanes read. Pure."""
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
    planned = await page.mq.metadata.change_route(subject, **asked.operation(), from_version=now.route.version, dry_run=True)
    return plan_facts(now, planned, await page.mq.metadata.route_history(subject))


async def change_route(page: ConsolePage) -> Response:
    """Make a planned change, if the route still has the version for which the plan was made."""
    form, subject = await page.form(), subject_of(page)
    if form.get("confirm", "").strip() != subject:
        raise RefusedRequest(HTTPStatus.BAD_REQUEST, page.words("refused.confirm", name=subject))
    asked = RouteRequest.of(form)
    version = number_of("version", form.get("version", ""), 0, NUMBER_MAX)
    if not asked.verb or not version:
        raise InvalidArgument("the form names no change, or no version from which it starts: plan it first")
    reason = f"console: {await page.caller.principal()}"
    made = await page.mq.metadata.change_route(subject, **asked.operation(), from_version=version, reason=reason)
    return page.back(f"/subjects/{subject}/route", page.words("route.changed", version=made.change.to_version))


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
    route = await described(page.mq, subject)
    return await page.render(
        "lanes.html",
        subject=subject,
        route=route,
        left={each["group"]: each["left"] for each in route["groups"]},
        strips={each["group"]: lane_ranges(each["lanes"], route["logical_partitions"]) for each in route["groups"]},
        parked=await _parked(page, subject, route),
        make_command=command,
    )


async def _parked(page: ConsolePage, subject: str, route: dict[str, Any]) -> list[ShownParkedKey]:
    found = []
    for group in [each["group"] for each in route["groups"] if each["parked_keys"]]:
        keys = await page.mq.metadata.parked(subject, group, keys_max=PARKED_MAX)
        found += [ShownParkedKey(group, key_text(each.key), each.partition, each.messages) for each in keys]
    return found


async def act_on_key(page: ConsolePage) -> Response:
    """Give a parked key's messages back in order, or skip them for good; a skip asks for the key."""
    form, subject = await page.form(), subject_of(page)
    verb, group, key = form.get("verb", ""), check_name("group", form.get("group", "")), form.get("key", "")
    if verb not in ("replay", "skip"):
        raise InvalidArgument(f"a parked key is replayed or skipped, not {verb!r}")
    if verb == "skip" and form.get("confirm", "") != key:
        raise RefusedRequest(HTTPStatus.BAD_REQUEST, page.words("refused.confirm", name=key))
    done = await unparked(page.mq, subject, group, key, is_replay=verb == "replay", dry_run=False)
    return page.back(f"/subjects/{subject}/lanes", page.words(f"lanes.key_{verb}", name=key, count=sum(row[2] for row in done)))


LANE_PAGES: Final[tuple[tuple[str, Show], ...]] = (("/subjects/{subject}/lanes", show_lanes),)
LANE_ACTS: Final[tuple[tuple[str, Show], ...]] = (("/subjects/{subject}/lanes", act_on_key),)
