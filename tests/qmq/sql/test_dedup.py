"""SqlDedup on every kind of database, through every API: the record and the effect are written
together or not at all.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from dedup_ways import WAYS, Boom, Named, Way, away, effects, message, rows, ways
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine
from support import eventually
from support.databases import Database, sqlite_database

from qmq.errors import InvalidArgument, NotConnected, Overloaded, Unavailable
from qmq.model import MessageId


async def test_a_message_has_its_effect_once_however_often_it_comes_and_by_whichever_way(
    database: Database,
) -> None:
    async with ways(database) as found:
        for number, way in enumerate(found):
            assert await way.work(message(number)), way.name
        for number in range(len(found)):
            for way in found:
                assert not await way.work(message(number)), way.name
    assert effects(database) == [str(message(number).id) for number in range(len(WAYS))]


async def test_what_a_handler_wrote_before_it_raised_is_gone_and_the_message_is_new_again(
    database: Database,
) -> None:
    def fail(handed: Any) -> None:
        raise Boom

    async with ways(database) as found:
        for number, way in enumerate(found):
            for _ in range(2):
                with pytest.raises(Boom):
                    await way.work(message(number), fail)
            assert rows(database, "SELECT * FROM qmq_dedup") == []
        assert effects(database) == []
        for number, way in enumerate(found):
            assert await way.work(message(number)), way.name


async def test_group_subject_and_id_each_tell_messages_apart_to_the_last_byte(
    database: Database,
) -> None:
    same = message(1)
    async with ways(database, "engine") as [way]:
        assert await way.work(same)
        assert await way.work(same, group="G"), "groups that differ by case"
        assert await way.work(Named("Orders", same.id)), "subjects that differ by case"
        long = "s" * 127
        assert await way.work(Named(long, same.id), group="g" * 127 + "%" + "c" * 127)
        assert not await way.work(Named(long, same.id), group="g" * 127 + "%" + "c" * 127)
        assert await way.work(Named(long, same.id), group="g" * 127 + "%" + "c" * 126 + "d")
        assert await way.work(Named("%dlq%" + long, same.id))
        assert not await way.work(Named("%dlq%" + long, same.id))
        assert await way.work(Named(same.subject, MessageId(2**64 - 1, 2**48 - 1, 2**16 - 1)))
        assert await way.work(Named(same.subject, MessageId(2**64 - 1, 2**48 - 1, 2**16 - 2)))


async def test_a_key_of_the_applications_own_counts_to_the_last_byte_and_is_never_cut(
    database: Database,
) -> None:
    keys = ["a", "A", "a ", "ä", "a\u0308", "x" * 254 + "y", "x" * 254 + "z", "日" * 85]
    async with ways(database, key=lambda each: each.key) as found:
        for way in found:
            for key in keys:
                each = Named(way.name)
                object.__setattr__(each, "key", key)
                assert await way.work(each), (way.name, key)
                assert not await way.work(each), (way.name, key)
            for key in ("", "a\0b", "x" * 256, "日" * 86, "\ud800", None, b"a"):
                object.__setattr__(each, "key", key)
                with pytest.raises(InvalidArgument, match="key"):
                    await way.work(each)


@pytest.mark.sampled
async def test_of_two_consumers_with_the_same_message_the_second_waits_and_finds_it_done(
    database: Database,
) -> None:
    """SQLite has one writer at a time: the second one waits for the lock of the whole database
    instead.
    """
    async with ways(database) as found:
        for first in found:
            for second in (found[0], found[1]):
                number = len(effects(database))
                is_inside, may_go = threading.Event(), threading.Event()

                def hold(
                    handed: Any,
                    is_inside: threading.Event = is_inside,
                    may_go: threading.Event = may_go,
                ) -> None:
                    is_inside.set()
                    assert may_go.wait(30)

                # Run in another thread with its own loop: an async handler that waits blocks its
                # loop.
                slow = asyncio.create_task(
                    asyncio.to_thread(_run_elsewhere, database, first.name, number, hold)
                )
                await asyncio.to_thread(is_inside.wait, 30)
                quick = asyncio.create_task(second.work(message(number)))
                await asyncio.sleep(0)
                may_go.set()
                assert await slow
                assert not await quick, (first.name, second.name)
                assert len(effects(database)) == number + 1


def _run_elsewhere(database: Database, name: str, number: int, step: Any) -> bool:
    async def main() -> bool:
        async with ways(database, name) as [way]:
            return await way.work(message(number), step)

    return asyncio.run(main())


async def test_if_the_first_of_two_fails_the_second_has_the_effect(database: Database) -> None:
    is_inside, may_go = threading.Event(), threading.Event()

    def hold_and_fail(handed: Any) -> None:
        is_inside.set()
        assert may_go.wait(30)
        raise Boom

    async with ways(database, "engine", "async-engine") as found:
        for number, second in enumerate(found):
            is_inside.clear()
            may_go.clear()
            slow = asyncio.create_task(
                asyncio.to_thread(_run_elsewhere, database, "engine", number, hold_and_fail)
            )
            await asyncio.to_thread(is_inside.wait, 30)
            quick = asyncio.create_task(second.work(message(number)))
            await asyncio.sleep(0)
            may_go.set()
            with pytest.raises(Boom):
                await slow
            assert await quick
    assert len(effects(database)) == 2


@pytest.mark.sampled
@pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
@pytest.mark.parametrize("isolation", ["REPEATABLE READ", "SERIALIZABLE"])
async def test_under_strict_isolation_the_second_of_two_is_done_or_later_never_new(
    database: Database, isolation: str
) -> None:
    engine = create_engine(database.sync_url, isolation_level=isolation)
    is_inside, may_go = threading.Event(), threading.Event()

    def hold(handed: Any) -> None:
        is_inside.set()
        assert may_go.wait(30)

    async with ways(database, "engine"):
        first, second = Way("engine", database, engine), Way("engine", database, engine)
        await first.work(message(1))
        await second.work(message(2))
        slow = asyncio.create_task(first.work(message(3), hold))
        await asyncio.to_thread(is_inside.wait, 30)
        quick = asyncio.create_task(second.work(message(3)))
        await asyncio.sleep(0)
        may_go.set()
        assert await slow
        with suppress(Overloaded):
            assert not await quick
        assert not await second.work(message(3))
    engine.dispose()
    assert effects(database) == [str(message(number).id) for number in (1, 2, 3)]


async def test_a_lock_that_cannot_be_taken_means_later_and_never_done(database: Database) -> None:
    statements = {
        "postgresql": "SET lock_timeout = '50ms'",
        "mariadb": "SET innodb_lock_wait_timeout = 1",
        "sqlite": "PRAGMA busy_timeout = 50",
    }

    def impatient() -> Any:
        connection = database.connect()
        connection.cursor().execute(statements[database.kind])
        connection.commit()
        return connection

    other = database.connect()
    async with ways(database, "driver") as [way]:
        await way.work(message(0))
        hasty = Way("driver", database, impatient)
        await hasty.work(message(1))
        record = "INSERT INTO qmq_dedup VALUES ('g', 'orders', '{}', 'somebody', 0)"
        other.cursor().execute(record.format(message(2).id))
        with pytest.raises(Overloaded):
            await hasty.work(message(2))
        other.rollback()
        assert await hasty.work(message(2))
    other.close()
    assert effects(database) == [str(message(number).id) for number in range(3)]


@pytest.mark.sampled
async def test_while_the_database_is_away_nothing_is_done_and_nothing_skipped(
    database: Database,
) -> None:
    if database.server is None:
        for given in (
            create_engine(f"sqlite:///{database.name}/away"),
            lambda: sqlite3.connect(f"{database.name}/away"),
        ):
            with pytest.raises(NotConnected):
                await Way("engine", database, given).work(message(1))
        return
    async with ways(database) as found:
        for way in found:
            assert await way.work(message(1)) == (way is found[0])
        with away(database):
            for number, way in enumerate(found):
                with pytest.raises(Unavailable):
                    await way.work(message(2 + number))
        for number, way in enumerate(found):
            with suppress(Unavailable):  # a pool may have more than one connection that is broken
                await way.work(message(2 + number))
            await way.work(message(2 + number))
            assert not await way.work(message(1))
    assert effects(database) == [str(message(number).id) for number in range(1, 2 + len(WAYS))]


@pytest.mark.sampled
@pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
async def test_a_database_that_goes_away_under_the_handler_takes_record_and_effect_with_it(
    database: Database,
) -> None:
    def lose(handed: Any) -> None:
        with away(database):
            pass

    async with ways(database, "engine", "async-engine") as found:
        for number, way in enumerate(found):
            with pytest.raises(Exception, match=r"server|connection|onnection"):
                await way.work(message(number), lose)
            while True:
                with suppress(Unavailable):
                    assert await way.work(message(number))
                    break
    assert len(effects(database)) == 2


async def test_a_message_that_gets_no_connection_of_the_pool_is_told_why(tmp_path: Path) -> None:
    database = sqlite_database(tmp_path / "business.sqlite")
    small: dict[str, Any] = {"pool_size": 1, "max_overflow": 0, "pool_timeout": 0.1}
    engine, async_engine = (
        create_engine(database.sync_url, **small),
        create_async_engine(database.async_url, **small),
    )
    async with ways(database):
        with (
            engine.connect(),
            pytest.raises(Overloaded, match="no connection of the engine's pool came free"),
        ):
            await Way("engine", database, engine).work(message(1))
        async with async_engine.connect():
            with pytest.raises(Overloaded, match="no connection of the engine's pool came free"):
                await Way("async-engine", database, async_engine).work(message(1))
    engine.dispose()
    await async_engine.dispose()


async def test_handlers_that_are_cancelled_anywhere_return_their_connection(tmp_path: Path) -> None:
    database = sqlite_database(tmp_path / "business.sqlite")
    engine = create_async_engine(database.async_url, pool_size=1, max_overflow=0)
    async with ways(database):
        way = Way("async-engine", database, engine)
        for rounds in range(0, 150, 3):
            task = asyncio.create_task(way.work(message(rounds)))
            for _ in range(rounds):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            await eventually(lambda: engine.pool.checkedout() == 0)  # type: ignore[attr-defined]
        assert await way.work(message(1_000))
    await engine.dispose()
