"""Reads the state of an ordered subject's route, partitions and groups over the public admin API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from qmq.operations.route_facts import facts, read_partitions

if TYPE_CHECKING:
    from qmq.client.client import Client


async def described(mq: Client, subject: str, version: int = 0) -> dict[str, Any]:
    """A subject's facts. The broker groups of partitions of other versions come from the history and the first route."""
    found = await mq.metadata.describe_route(subject, version)
    places = {each.number: each for each in found.route.partitions}
    wanted = read_partitions(found) | set(found.route.fenced)
    if wanted - places.keys():
        places |= {each.number: each for change in await mq.metadata.route_history(subject) for each in change.targets}
    if wanted - places.keys():
        places |= {each.number: each for each in (await mq.metadata.describe_route(subject, 1)).route.partitions}
    return facts(found, places)
