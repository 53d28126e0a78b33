"""*Lanes* of an ordered subject: which consumer holds which range of logical partitions, and the keys that groups parked."""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

from starlette.responses import Response

from qmq.console.command_lines import command
from qmq.console.page import ConsolePage, RefusedRequest, Show
from qmq.console.range_strip import lane_ranges
from qmq.console.subject_pages import subject_of
from qmq.errors import InvalidArgument
from qmq.model import check_name
from qmq.operations.key_texts import key_text
from qmq.operations.parked_keys import unparked
from qmq.operations.route_reading import described

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


PAGES: Final[tuple[tuple[str, Show], ...]] = (("/subjects/{subject}/lanes", show_lanes),)
ACTS: Final[tuple[tuple[str, Show], ...]] = (("/subjects/{subject}/lanes", act_on_key),)
