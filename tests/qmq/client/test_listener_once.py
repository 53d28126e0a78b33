"""Listeners and a store of finished messages: the effect and its record together, the
acknowledgement after them.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import timedelta

import pytest
from support import eventually

import qmq
from qmq.client.listening.listener_options import IdempotentRun, Named
from qmq.errors import InvalidArgument, Unavailable
from qmq.node.dev_node import Node

NOW = timedelta(0)
TINY = timedelta(milliseconds=20)


class Memory:
    """A store whose transactions are lists."""

    def __init__(self) -> None:
        self.done: set[tuple[str, str]] = set()
        self.effects: list[str] = []
        self.lost_commits = 0
        """So many transactions are committed, and their end is an error all the same."""
        self.begun: Counter[int] = Counter()

    def check_handler(self, *, is_async: bool) -> None:
        if is_async and self.lost_commits < 0:
            raise InvalidArgument("this store blocks")

    @contextmanager
    def once_sync(self, message: Named, group: str) -> Iterator[IdempotentRun]:
        self.begun[threading.get_ident()] += 1
        if self.begun.total() == 1:
            raise Unavailable("the store is away")
        name = str(message.id), group
        entry = IdempotentRun(name not in self.done, [])
        yield entry
        self.done.add(name)
        self.effects += entry.connection
        if self.lost_commits > 0:
            self.lost_commits -= 1
            raise ConnectionError("the answer to the commit was lost")

    @asynccontextmanager
    async def once(self, message: Named, group: str) -> AsyncIterator[IdempotentRun]:
        with self.once_sync(message, group) as entry:
            yield entry


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "plain"])
async def test_an_effect_happens_once_even_if_the_handler_or_the_commit_fails(
    node: Node, is_async: bool
) -> None:
    async with qmq.connect(node.address) as mq:
        memory = Memory()
        memory.lost_commits = 1
        calls: list[tuple[str, int]] = []

        def work(word: str, context: qmq.Context) -> None:
            calls.append((word, context.attempt))
            context.connection.append(word)
            with pytest.raises(InvalidArgument, match="belongs to the transaction"):
                context.ack()
            with pytest.raises(InvalidArgument, match="belongs to the transaction"):
                context.message.ack_later()
            if word == "fails" and [each for each, _ in calls].count("fails") == 1:
                raise ValueError
            if word == "rejected":
                raise qmq.Reject

        async def work_in_loop(word: str, context: qmq.Context) -> None:
            work(word, context)

        mq.listen(
            "s", work_in_loop if is_async else work, "g", idempotent=memory, retry_delays=[NOW]
        )
        for word in ("done", "fails", "rejected"):
            await mq.send("s", word)
        async with mq.listening():
            # Away, done and fails once each (one of them again, since its commit was lost), fails
            # as it failed, rejected.
            await eventually(lambda: memory.begun.total() == 6)
        assert Counter(word for word, _ in calls) == {"done": 1, "fails": 2, "rejected": 1}
        assert ("done", 1) in calls, "that the store was away cost no attempt"
        assert sorted(memory.effects) == ["done", "fails"]
        async with mq.consumer("s", "g", ack="explicit") as rest:
            assert len(await rest.pull(10, TINY)) == 0
        assert (threading.get_ident() in memory.begun) is is_async


async def test_options_that_exclude_a_store_are_refused_at_registration(node: Node) -> None:
    async with qmq.connect(node.address) as mq:
        memory = Memory()
        memory.lost_commits = -1

        async def handler(body: bytes) -> None: ...

        async def many(bodies: list[bytes]) -> None: ...

        with pytest.raises(InvalidArgument, match="this store blocks"):
            mq.listen("s", handler, "g", idempotent=memory)
        with pytest.raises(InvalidArgument, match="leave out `batch`"):
            mq.listen("s", many, "g", idempotent=Memory(), batch=(10, NOW))
        with pytest.raises(InvalidArgument, match="has its own effects"):
            mq.listen("s", handler, "g", idempotent=Memory(), broadcast=True)
        with pytest.raises(InvalidArgument, match="most_once"):
            mq.listen("s", handler, "g", idempotent=Memory(), most_once=True)


async def test_each_consumer_of_a_broadcast_group_has_its_own_effect(node: Node) -> None:
    async with qmq.connect(node.address) as mq:
        memory = Memory()
        memory.begun[0] = 1

        async def work(word: str, context: qmq.Context) -> None:
            context.connection.append(word)

        for name in ("a", "b"):
            mq.listen(
                "s", work, "g", name=name, broadcast=True, start="earliest", idempotent=memory
            )
        await mq.send("s", "word")
        async with mq.listening():
            await eventually(lambda: len(memory.effects) == 2)
        assert {group for _, group in memory.done} == {"g%a", "g%b"}
