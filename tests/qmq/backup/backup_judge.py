"""What was sent to a cluster and acknowledged, and whether a restored cluster has it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from typing import Final

import qmq
from qmq.model import Order, SubjectConfig
from qmq.proto.v1 import meta_pb2 as pb

PLAIN: Final = "plain"
ORDERED: Final = "orders"
LATER: Final = "later"
GROUP: Final = "g"
KEYS: Final = tuple(f"key-{number}" for number in range(12))
BODY: Final = "x" * 300
QUIET_S: Final = 2.0
"""No message for this long: there are none left."""


@dataclass
class History:
    """The answers that clients got."""

    plain: list[bytes] = field(default_factory=list)
    ordered: dict[str, list[bytes]] = field(default_factory=lambda: {key: [] for key in KEYS})
    delayed: dict[bytes, str] = field(default_factory=dict)
    """Body to the id of the delayed message."""
    done: set[bytes] = field(default_factory=set)
    """Acknowledged by the group."""
    numbers: count[int] = field(default_factory=count)

    def body(self) -> bytes:
        return f"{next(self.numbers)} {BODY}".encode()

    async def create_subjects(self, mq: qmq.Client) -> None:
        await mq.metadata.create_subject(SubjectConfig(PLAIN))
        await mq.metadata.create_subject(SubjectConfig(LATER))
        await mq.metadata.create_subject(SubjectConfig(ORDERED, order=Order.STRICT, logical_partitions=64), partitions=2)

    async def send(self, mq: qmq.Client, rounds: int) -> None:
        """A plain message and one for each key, each round; what is recorded was acknowledged."""
        for _ in range(rounds):
            plain, mine = self.body(), {key: self.body() for key in KEYS}
            await asyncio.gather(mq.send(PLAIN, plain), *[mq.send(ORDERED, body, key=key) for key, body in mine.items()])
            self.plain.append(plain)
            for key, body in mine.items():
                self.ordered[key].append(body)

    async def send_later(self, mq: qmq.Client, messages: int, delay: timedelta) -> None:
        for _ in range(messages):
            body = self.body()
            receipt = await mq.send(LATER, body, delay=delay)
            self.delayed[body] = str(receipt.delayed_id)

    async def consume(self, mq: qmq.Client, messages: int) -> None:
        """The group handles this many plain messages."""
        async with mq.consumer(PLAIN, GROUP, ack="explicit") as consumer:
            for _ in range(messages):
                message = await anext(consumer)
                await message.ack()
                self.done.add(message.body)

    async def split(self, mq: qmq.Client) -> None:
        route = (await mq.metadata.describe_route(ORDERED)).route
        largest = max(route.partitions, key=lambda each: each.lps.end - each.lps.first)
        await mq.metadata.change_route(ORDERED, split=pb.SplitOperation(partition=largest.number, parts=2), from_version=route.version)

    def frozen(self) -> History:
        """A copy of what is acknowledged now."""
        ordered = {key: list(bodies) for key, bodies in self.ordered.items()}
        return History(list(self.plain), ordered, dict(self.delayed), set(self.done))


async def rest(mq: qmq.Client, subject: str, group: str, quiet_s: float = QUIET_S) -> list[tuple[str, bytes]]:
    """(key, body) of all that a group gets until nothing comes any more."""
    found: list[tuple[str, bytes]] = []
    is_ordered = subject == ORDERED
    consumer = mq.ordered_consumer(subject, group) if is_ordered else mq.consumer(subject, group, ack="explicit")
    async with consumer:
        while True:
            try:
                message = await asyncio.wait_for(anext(consumer), quiet_s)
            except TimeoutError:
                if await _is_all_handed_out(mq, subject, group):
                    return found
                continue
            found.append((message.key or "", message.body))
            await message.ack()


async def _is_all_handed_out(mq: qmq.Client, subject: str, group: str) -> bool:
    """Whether no broker group has a message for the group: on a busy machine nothing may come for a while although there is more."""
    if subject == ORDERED:
        route = await mq.metadata.describe_route(subject)
        return not route.silent_groups and not any(each.backlog for each in route.groups if each.group == group)
    found = await mq.metadata.describe_groups(subject, group)
    return not found.silent and not any(each.waiting + each.requeued + each.unacked for each in found)


def require_order(found: Iterable[tuple[str, bytes]], sent: dict[str, list[bytes]], least: dict[str, list[bytes]]) -> None:
    """Each key's messages are there from `least`, and first appear in the order of sending, of what was `sent`."""
    by_key: dict[str, list[bytes]] = {}
    for key, body in found:
        mine = by_key.setdefault(key, [])
        if body not in mine:
            mine.append(body)
    for key, wanted in least.items():
        got = by_key.get(key, [])
        assert got[: len(wanted)] == wanted, f"{key}: {len(wanted)} messages were acknowledged before the backup"
        assert got == sent[key][: len(got)], f"{key}: the messages are not in the order of sending"
