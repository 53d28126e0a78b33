"""SqlDedup under a listener of a real node: failed messages are redelivered, finished ones are
acknowledged, and the effect is there once.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path

import pytest
from dedup_ways import Named, away, effects, ways
from sqlalchemy import create_engine, text
from support import eventually
from support.databases import Database, sqlite_database

import qmq
from qmq.node.dev_node import Node
from qmq.sql import SqlDedup, outbox

_SOON = [timedelta(milliseconds=20)]


async def is_done(mq: qmq.Client, subject: str, group: str) -> bool:
    """Whether all was acknowledged."""
    found = [each for each in await mq.metadata.describe_groups(subject) if each.group == group]
    return bool(found) and not any(each.waiting + each.unacked + each.requeued for each in found)


async def until_done(mq: qmq.Client, subject: str, group: str) -> None:
    await eventually(lambda: is_done(mq, subject, group))


async def test_a_handler_that_fails_twice_has_its_effect_at_the_third_attempt(
    node: Node, database: Database
) -> None:
    async with ways(database, "async-session", "driver") as found, qmq.connect(node.address) as mq:
        attempts: list[int] = []

        async def in_the_loop(body: bytes, context: qmq.Context) -> None:
            await context.connection.execute(text("INSERT INTO effect VALUES ('loop')"))
            attempts.append(context.attempt)
            if context.attempt < 3:
                raise ValueError("not yet")

        def in_a_thread(body: bytes, context: qmq.Context) -> None:
            context.connection.cursor().execute("INSERT INTO effect VALUES ('thread')")
            attempts.append(context.attempt)
            if context.attempt < 3:
                raise qmq.Retry(after=_SOON[0])

        mq.listen("orders", in_the_loop, "loop", idempotent=found[0].dedup, retry_delays=_SOON)
        mq.listen("orders", in_a_thread, "thread", idempotent=found[1].dedup)
        await mq.send("orders", b"one")
        async with mq.listening():
            await until_done(mq, "orders", "loop")
            await until_done(mq, "orders", "thread")
        assert sorted(attempts) == [1, 1, 2, 2, 3, 3]
    assert effects(database) == ["loop", "thread"]


@pytest.mark.sampled
@pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
async def test_while_the_database_is_away_messages_wait_without_attempts(
    node: Node, database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    attempts = set[int]()
    async with ways(database, "async-engine") as [way], qmq.connect(node.address) as mq:

        async def handle(body: bytes, context: qmq.Context) -> None:
            attempts.add(context.attempt)
            await context.connection.execute(text(f"INSERT INTO effect VALUES ('{body.decode()}')"))

        mq.listen("orders", handle, "g", concurrency=2, idempotent=way.dedup)
        await mq.send("orders", b"before")
        async with mq.listening():
            await until_done(mq, "orders", "g")
            with away(database):
                await mq.send_many("orders", [b"one", b"two"])
                await eventually(
                    lambda: all(f"orders/{number} attempt 1" in caplog.text for number in (1, 2))
                )
            await until_done(mq, "orders", "g")
    assert effects(database) == ["before", "one", "two"]
    assert attempts == {1}


@pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
async def test_an_abandoned_thread_may_commit_and_the_next_attempt_finds_its_effect(
    node: Node, database: Database
) -> None:
    """The second attempt waits for the record that the first one has written and not committed."""
    engine = create_engine(database.sync_url)
    is_second, attempts = threading.Event(), 0

    def handle(body: bytes, context: qmq.Context) -> None:
        nonlocal attempts
        attempts += 1
        context.connection.execute(text("INSERT INTO effect VALUES ('once')"))
        assert is_second.wait(30)

    class Seen(SqlDedup):
        """Tells when a second attempt begins."""

        def once_sync(self, message, group):  # type: ignore[no-untyped-def]
            if message.attempt > 1:
                is_second.set()
            return super().once_sync(message, group)

    async with ways(database, "engine"), qmq.connect(node.address) as mq:
        mq.listen(
            "orders",
            handle,
            "g",
            idempotent=Seen(engine),
            concurrency=2,
            timeout=timedelta(milliseconds=100),
            retry_delays=_SOON,
        )
        await mq.send("orders", b"one")
        async with mq.listening():
            await eventually(is_second.is_set)
            await until_done(mq, "orders", "g")
    assert attempts == 1
    assert effects(database) == ["once"]
    engine.dispose()


async def test_what_was_done_and_never_acknowledged_is_acknowledged_without_its_handler(
    node: Node, tmp_path: Path
) -> None:
    database = sqlite_database(tmp_path / "business.sqlite")
    async with ways(database, "async-engine") as [way], qmq.connect(node.address) as mq:
        receipt = await mq.send("orders", b"one")
        async with way.dedup.once(Named("orders", receipt.id), "g") as once:
            assert once.is_new
            await once.connection.execute(text("INSERT INTO effect VALUES ('once')"))

        async def handle(body: bytes, context: qmq.Context) -> None:
            raise AssertionError("it was done")

        mq.listen("orders", handle, "g", idempotent=way.dedup)
        async with mq.listening():
            await until_done(mq, "orders", "g")
    assert effects(database) == ["once"]


@pytest.mark.parametrize("way", ["session", "async-engine"])
async def test_a_handlers_outbox_messages_are_sent_once_and_only_with_its_effect(
    node: Node, tmp_path: Path, way: str
) -> None:
    database = sqlite_database(tmp_path / "business.sqlite")

    def in_a_thread(body: bytes, context: qmq.Context) -> None:
        with context.mq.outbox(context.connection) as box:
            box.send("next", str(context.attempt).encode())
        if context.attempt < 3:
            raise qmq.Retry(after=_SOON[0])

    async def in_the_loop(body: bytes, context: qmq.Context) -> None:
        async with context.mq.outbox(context.connection) as box:
            box.send("next", str(context.attempt).encode())
        if context.attempt < 3:
            raise qmq.Retry(after=_SOON[0])

    async with ways(database, way) as [found], qmq.connect(node.address) as mq:
        outbox.create_tables(create_engine(database.sync_url))
        mq.listen(
            "orders", in_the_loop if found.is_async else in_a_thread, "g", idempotent=found.dedup
        )
        await mq.send("orders", b"one")
        async with mq.listening():
            await until_done(mq, "orders", "g")
        async with mq.consumer("next", "readers") as consumer:
            seen = [(await anext(consumer)).body]
            await mq.send("next", b"the end")
            while seen[-1] != b"the end":
                seen.append((await anext(consumer)).body)
    assert seen == [b"3", b"the end"]
