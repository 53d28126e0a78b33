"""The calls by which a client first reaches a broker, and masters set by hand."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import timedelta

import qmq
from qmq.client.metadata.cache import Master

Call = Callable[[qmq.Client], Awaitable[object]]


async def consume(mq: qmq.Client) -> object:
    return await anext(mq.consumer("s", group="g"))


async def consume_ordered(mq: qmq.Client) -> object:
    return await anext(mq.ordered_consumer("keys", group="g"))


async def browse(mq: qmq.Client) -> object:
    return [each async for each in mq.browse("s")]


async def produce(mq: qmq.Client) -> object:
    producer = mq.producer("s")
    ticket = producer.send(b"x")
    await producer.flush()
    return await ticket


CALLS: dict[str, Call] = {
    "send": lambda mq: mq.send("s", b"x"),
    "send delayed": lambda mq: mq.send("s", b"x", delay=timedelta(hours=1)),
    "send ordered": lambda mq: mq.send("keys", b"x", key="k"),
    "produce": produce,
    "consume": consume,
    "consume ordered": consume_ordered,
    "browse": browse,
}


class KnownMasters:
    """A locator that knows all masters."""

    def __init__(self, masters: dict[str, Master]) -> None:
        self._masters = masters

    async def master(self, _subject: str, group: str) -> Master:
        return self._masters[group]

    async def close(self) -> None: ...

    def doubt(self, *_: object) -> None: ...
