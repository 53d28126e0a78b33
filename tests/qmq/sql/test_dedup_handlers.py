"""Handlers and the transaction that they get: no half effect is committed, and no record without
its effect.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest
import sqlalchemy.orm
from dedup_ways import Boom, Way, effects, message, rows, say, ways
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError, PendingRollbackError
from support.databases import Database

from qmq.errors import InvalidArgument


async def test_a_handler_that_commits_is_refused_and_nothing_is_committed(
    database: Database,
) -> None:
    async with ways(database) as found:
        for number, way in enumerate(found):
            with pytest.raises(InvalidArgument, match="commit is for the listener"):
                await way.work(message(number), lambda handed: handed.commit())
            assert effects(database) == []
            assert await way.work(message(number))
            assert effects(database) == [str(message(number).id)]
            rows(database, "DELETE FROM effect")


async def test_a_commit_by_a_back_door_is_refused_too(database: Database) -> None:
    async with ways(database, "session") as [way]:
        with pytest.raises(InvalidArgument, match="for the listener"):
            await way.work(message(0), lambda handed: handed.connection().commit())
        assert effects(database) == []
        assert await way.work(message(0)), "nothing says that it was done"


async def test_a_handler_that_ignores_a_refused_commit_has_its_whole_effect_or_none(
    database: Database,
) -> None:
    def commit(handed: Any) -> None:
        with suppress(InvalidArgument):
            handed.commit()
        assert effects(database) == []

    async with ways(database) as found:
        for number, way in enumerate(found):
            # its transaction is over; sessions and drivers do not notice
            if way.name in (
                "engine",
                "async-engine",
            ):
                with pytest.raises(PendingRollbackError):
                    await way.work(message(number), commit)
                assert effects(database) == []
            else:
                assert await way.work(message(number), commit)
                assert effects(database) == [str(message(number).id)]
                rows(database, "DELETE FROM effect")


async def test_a_handler_that_rolled_back_and_continued_commits_nothing(database: Database) -> None:
    def roll_back(handed: Any) -> None:
        handed.rollback()
        say(handed, "INSERT INTO effect VALUES ('half')")

    async with ways(database, "engine", "async-engine", "session", "async-session") as found:
        for number, way in enumerate(found):
            with pytest.raises(InvalidArgument, match="rolled back"):
                await way.work(message(number), roll_back)
            assert effects(database) == []


async def test_a_handler_that_swallows_the_error_of_its_transaction_commits_nothing(
    database: Database,
) -> None:
    """PostgreSQL ends the transaction with any error, MySQL with a deadlock, SQLite with a full
    disk: the test causes these errors.
    """

    def swallow(handed: Any) -> None:
        if database.kind == "postgresql":
            with suppress(Exception):
                say(handed, "SELECT * FROM nothing")
            return
        say(handed, "ROLLBACK")
        say(handed, "INSERT INTO effect VALUES ('half')")

    async with ways(database) as found:
        for number, way in enumerate(found):
            with pytest.raises(Exception, match=r"rolled back|aborted"):
                await way.work(message(number), swallow)
            assert effects(database) == []
            assert rows(database, "SELECT * FROM qmq_dedup") == []


async def test_another_consumers_record_after_our_rollback_is_not_taken_for_ours(
    database: Database,
) -> None:
    async with ways(database, "engine", "session") as found:
        for number, way in enumerate(found):

            def lose(handed: Any, number: int = number) -> None:
                say(handed, "ROLLBACK")
                rows(
                    database,
                    (
                        f"INSERT INTO qmq_dedup VALUES ('g', 'orders', '{message(number).id}', "
                        "'another', 0)"
                    ),
                )
                say(handed, "INSERT INTO effect VALUES ('second')")

            with pytest.raises(InvalidArgument, match="rolled back"):
                await way.work(message(number), lose)
            assert effects(database) == []


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
async def test_if_the_commit_itself_fails_nothing_is_done(database: Database) -> None:
    async with ways(database) as found:
        rows(database, "CREATE TABLE customer (id INTEGER PRIMARY KEY)")
        rows(
            database,
            (
                "CREATE TABLE bill (customer INTEGER REFERENCES customer DEFERRABLE INITIALLY "
                "DEFERRED)"
            ),
        )
        for number, way in enumerate(found):
            with pytest.raises(Exception, match="violates foreign key"):
                await way.work(
                    message(number), lambda handed: say(handed, "INSERT INTO bill VALUES (1)")
                )
            assert effects(database) == []
        assert await found[0].work(message(0))


async def test_a_handler_that_is_cancelled_has_no_effect(database: Database) -> None:
    async with ways(database, "async-engine", "async-session") as found:
        for number, way in enumerate(found):
            is_inside = asyncio.Event()

            async def work(
                way: Way = way, number: int = number, is_inside: asyncio.Event = is_inside
            ) -> None:
                async with way.dedup.once(message(number), "g") as once:
                    await once.connection.execute(text("INSERT INTO effect VALUES ('half')"))
                    is_inside.set()
                    await asyncio.Event().wait()

            task = asyncio.create_task(work())
            await is_inside.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await way.work(message(number))
    assert effects(database) == [str(message(number).id) for number in range(2)]


async def test_savepoints_are_the_handlers_own(database: Database) -> None:
    def nest(handed: Any) -> None:
        with handed.begin_nested():
            say(handed, "INSERT INTO effect VALUES ('kept')")
        with suppress(Boom), handed.begin_nested():
            say(handed, "INSERT INTO effect VALUES ('undone')")
            raise Boom

    async with ways(database, "engine", "async-engine", "session", "async-session") as found:
        for number, way in enumerate(found):
            assert await way.work(message(number), nest), way.name
    assert effects(database).count("kept") == 4
    assert "undone" not in effects(database)


async def test_what_a_session_has_not_written_yet_is_part_of_the_effect(database: Database) -> None:
    metadata = sqlalchemy.MetaData()
    effect = sqlalchemy.Table(
        "effect", metadata, sqlalchemy.Column("id", sqlalchemy.String(64), primary_key=True)
    )
    registry = sqlalchemy.orm.registry()

    class Effect:
        def __init__(self, id: str) -> None:
            self.id = id

    registry.map_imperatively(Effect, effect)

    async with ways(database, "session", "async-session") as found:
        rows(database, "CREATE UNIQUE INDEX once ON effect (id)")
        for number, way in enumerate(found):
            assert await way.work(
                message(number), lambda session, name=way.name: session.add(Effect(name))
            )
            with pytest.raises(IntegrityError):
                await way.work(
                    message(10 + number), lambda session, name=way.name: session.add(Effect(name))
                )
            assert len(rows(database, "SELECT * FROM qmq_dedup")) == 1 + number
    assert [each for each in effects(database) if "s" in each] == ["async-session", "session"]
    registry.dispose()
