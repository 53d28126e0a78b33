"""Old records are deleted in batches, by the database's clock; never the record of a message that
may still be delivered.
"""

from __future__ import annotations

import logging
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
from dedup_ways import Named, Way, effects, message, rows, ways
from sqlalchemy import Update, text
from sqlalchemy.sql.elements import ClauseElement
from support.databases import Database, sqlite_database

from qmq.model import MessageId
from qmq.sql import dedup_records
from qmq.sql.connection import Executor
from qmq.sql.dedup import EXPIRE_EVERY
from qmq.sql.dedup_records import EXPIRE_BATCH, statements_for
from qmq.sql.dedup_tables import Record
from qmq.sql.dedup_transactions import openers

KEEP = timedelta(days=7)
_DAY_MS = 86_400_000


def age(database: Database, days: float, where: str = "1 = 1") -> None:
    """Make these records this many days older."""
    rows(
        database,
        f"UPDATE qmq_dedup SET recorded_ms = recorded_ms - {int(days * _DAY_MS)} WHERE {where}",
    )


def recorded(database: Database) -> int:
    return int(rows(database, "SELECT COUNT(*) FROM qmq_dedup")[0][0])


async def look(way: Way, number: int) -> None:
    """A process that begins looks for old records after its first message."""
    assert await Way(way.name, way.database, way.given, keep=KEEP).work(
        message(number), group="other"
    )


async def test_records_go_when_they_are_older_than_keep_and_not_before(database: Database) -> None:
    async with ways(database, keep=KEEP) as found:
        for number, way in enumerate(found):
            rows(database, "DELETE FROM qmq_dedup")
            for each in (1, 2, 3):
                await way.work(message(10 * number + each))
            age(database, 6.99)
            await way.work(message(10 * number + 3))
            age(database, 0.02)
            await look(way, 10 * number + 4)
            left = sorted(
                str(_text(row[0])) for row in rows(database, "SELECT message_id FROM qmq_dedup")
            )
            assert left == [str(message(10 * number + each).id) for each in (3, 4)], way.name


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


@pytest.mark.parametrize("years", [-3, 3])
async def test_a_wrong_clock_of_the_database_deletes_no_record(
    database: Database, years: int
) -> None:
    """The brokers' clocks are right, and say that it is `years` earlier or later than the database
    says.
    """
    now_ms = time.time_ns() // 1_000_000 + years * 365 * _DAY_MS
    async with ways(database, keep=KEEP) as found:
        for number, way in enumerate(found):
            rows(database, "DELETE FROM qmq_dedup")
            first = Named(id=MessageId(7, 10 * number, 0), append_time_ms=now_ms)
            assert await way.work(first)
            if years < 0:  # it was recorded before the database's clock jumped ahead
                age(database, -years * 365)
            assert int(rows(database, "SELECT recorded_ms FROM qmq_dedup")[0][0]) >= now_ms - 60_000
            looking = Way(way.name, way.database, way.given, keep=KEEP)
            assert await looking.work(
                Named(id=MessageId(7, 10 * number + 1, 0), append_time_ms=now_ms + _DAY_MS)
            )
            assert not await way.work(first), way.name


async def test_a_message_that_is_handed_out_again_keeps_its_record_for_as_long_again(
    database: Database,
) -> None:
    async with ways(database, "engine", keep=KEEP) as [way]:
        await way.work(message(1))
        for number in range(3):
            age(database, 6.9, f"message_id = '{message(1).id}'")
            assert not await way.work(message(1))
            await look(way, 100 + number)
        assert not await way.work(message(1))
    assert effects(database).count(str(message(1).id)) == 1


async def test_a_record_that_is_touched_while_it_is_about_to_go_stays(database: Database) -> None:
    """Which records are old was read; then one is handed out again; then the old ones are
    deleted.
    """
    async with ways(database, "engine", keep=KEEP) as [way]:
        await way.work(message(1))
        await way.work(message(2))
        age(database, 8)
        opener, _ = openers(database.connect, None, None)
        assert opener is not None
        with opener() as transaction:
            statements = statements_for(database.dialect, "qmq_dedup")

            def read_and_delete(executor: Executor) -> int:
                class Slow:
                    execute, execute_many = executor.execute, executor.execute_many

                    def fetch(self, *said: object) -> object:
                        found = executor.fetch(*said)  # type: ignore[arg-type]
                        transaction.commit()
                        redelivery = threading.Thread(
                            target=way.work_sync, args=(message(1), None, "g")
                        )
                        redelivery.start()
                        redelivery.join(30)
                        return found

                return dedup_records.expire(
                    Slow(), statements, 7 * _DAY_MS, message(1).append_time_ms
                )  # type: ignore[arg-type]

            assert transaction.run(read_and_delete) == 2
            transaction.commit()
        assert not await way.work(message(1))
        assert recorded(database) == 1


async def test_a_record_that_goes_between_being_seen_and_being_touched_is_written_again(
    database: Database,
) -> None:
    async with ways(database, "engine") as [way]:
        await way.work(message(1))
        opener, _ = openers(database.connect, None, None)
        assert opener is not None
        with opener() as transaction:

            def claim(executor: Executor) -> bool:
                class Slow:
                    def execute(
                        self, statement: ClauseElement, parameters: dict[str, object]
                    ) -> int:
                        if isinstance(statement, Update):
                            executor.execute(text("DELETE FROM qmq_dedup"), {})
                        return executor.execute(statement, parameters)

                named = message(1)
                record = Record("g", named.subject, str(named.id), "0" * 32, named.append_time_ms)
                return dedup_records.claim(
                    Slow(), statements_for(database.dialect, "qmq_dedup"), record
                )  # type: ignore[arg-type]

            assert not transaction.run(claim)
            transaction.commit()
        assert not await way.work(message(1))
    assert effects(database) == [str(message(1).id)]


async def test_old_records_go_in_small_batches_the_oldest_first(database: Database) -> None:
    async with ways(database, "async-engine") as [way]:
        values = ", ".join(
            f"('old', 'orders', '{number}', 'somebody', {number})"
            for number in range(2 * EXPIRE_BATCH)
        )
        rows(database, f"INSERT INTO qmq_dedup VALUES {values}")
        left = []
        for number in range(3):
            await look(way, 100 + number)
            left.append(
                rows(
                    database,
                    "SELECT COUNT(*), MIN(recorded_ms) FROM qmq_dedup WHERE token = 'somebody'",
                )[0]
            )
    assert [tuple(each) for each in left] == [(EXPIRE_BATCH, EXPIRE_BATCH), (0, None), (0, None)]


async def test_more_old_records_go_than_new_ones_come(tmp_path: Path) -> None:
    assert EXPIRE_BATCH > EXPIRE_EVERY
    database = sqlite_database(tmp_path / "business.sqlite")
    async with ways(database, "engine") as [way]:
        for number in range(EXPIRE_EVERY):
            await way.work(message(number))
        age(database, 8)
        await way.work(message(EXPIRE_EVERY))
    assert recorded(database) == 1


async def test_a_message_is_done_even_if_old_records_cannot_be_deleted(
    database: Database, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise OSError("the database is tired")

    monkeypatch.setattr(dedup_records, "expire", fail)
    async with ways(database) as found:
        with caplog.at_level(logging.WARNING, "qmq.sql"):
            for number, way in enumerate(found):
                assert await way.work(message(number))
                assert not await way.work(message(number))
    assert caplog.text.count("the database is tired") == len(found)
    assert len(effects(database)) == len(found)
