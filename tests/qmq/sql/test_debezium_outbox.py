"""An outbox in Debezium's layout: written in the application's transaction, taken in by a watchdog,
each row sent once and in order.
"""

from __future__ import annotations

import asyncio
import json
import logging
from uuid import UUID, uuid4

import pytest
from outbox_support import async_engine_of, client, engine_of, is_empty, left, received
from sqlalchemy import Engine, text
from support import eventually
from support.databases import Database

from qmq.errors import InvalidArgument, InvalidName
from qmq.node.dev_node import Node
from qmq.sql.debezium_outbox import (
    DebeziumEvent,
    DebeziumIntake,
    DebeziumTable,
    body_of,
    message_id,
    migration,
    time_ordered_id,
    write_event,
    write_event_blocking,
)
from qmq.sql.outbox_runner import EngineRunner

ORDER = DebeziumEvent("order", "42", "OrderCreated", {"id": 42})


def make_table(engine: Engine, more: str = "") -> None:
    with engine.begin() as connection:
        connection.execute(text(migration(engine.dialect.name).replace("\n);", f"{more}\n)")))


def foreign_row(
    engine: Engine,
    aggregate: str,
    key: str,
    payload: str,
    created: int,
    identifier: str | None = None,
) -> None:
    """A row as a program in another language writes it: its id is random."""
    with engine.begin() as connection:
        connection.execute(
            text(
                "INSERT INTO outboxevent (id, aggregatetype, aggregateid, type, payload, "
                "created) VALUES (:i, :a, :k, 'Changed', :p, :c)"
            ),
            {"i": identifier or str(uuid4()), "a": aggregate, "k": key, "p": payload, "c": created},
        )


@pytest.mark.sampled
async def test_an_event_commits_with_the_transaction_and_is_sent_as_event_router_does(
    database: Database, node: Node
) -> None:
    with engine_of(database) as engine:
        make_table(engine)
        async with async_engine_of(database) as business:
            async with business.begin() as connection:
                await write_event(connection, ORDER)
            async with business.connect() as connection:
                await write_event(connection, DebeziumEvent("order", "43", "OrderCreated", {}))
                await connection.rollback()
        (row,) = left(engine, "id, aggregatetype, aggregateid, type, payload", "outboxevent")
        assert str(row.id) == str(ORDER.id)
        assert row.aggregatetype == "order"
        assert row.aggregateid == "42"
        assert row.type == "OrderCreated"
        async with client(node.address) as mq, mq.outbox_watchdog(engine, debezium=DebeziumTable()):
            (message,) = await received(mq, "outbox.event.order", 1)
            await is_empty(engine, "outboxevent")
            await is_empty(engine)
    assert (message.id.to_bytes(), message.key, json.loads(message.body)) == (
        ORDER.id.bytes,
        "42",
        {"id": 42},
    )
    assert message.headers == {"id": str(ORDER.id).encode(), "eventType": b"OrderCreated"}


@pytest.mark.sampled
async def test_rows_of_other_programs_keep_the_order_of_a_column_that_grows(
    database: Database, node: Node
) -> None:
    with engine_of(database) as engine:
        make_table(engine, ",\n    created BIGINT NOT NULL")
        for number in range(120):
            foreign_row(engine, "order", "42", json.dumps({"n": number}), number)
        source = DebeziumTable(subject="shop.{aggregatetype}", order_by="created")
        async with client(node.address) as mq, mq.outbox_watchdog(engine, debezium=source):
            found = await received(mq, "shop.order", 120)
            await is_empty(engine, "outboxevent")
        assert [json.loads(each.body)["n"] for each in found] == list(range(120))


@pytest.mark.sampled
async def test_two_that_take_rows_in_at_the_same_time_make_one_message_of_each(
    database: Database,
) -> None:
    with engine_of(database) as engine:
        make_table(engine)
        for number in range(130):
            with engine.begin() as connection:
                write_event_blocking(
                    connection, DebeziumEvent("order", str(number), "OrderCreated", number)
                )
        intakes = [
            DebeziumIntake(EngineRunner(engine), DebeziumTable(), "qmq_outbox") for _ in range(2)
        ]

        async def move_all(intake: DebeziumIntake) -> int:
            moved = 0
            while left(engine, "id", "outboxevent"):
                try:
                    moved += await intake.move()
                except (
                    Exception
                ) as failure:  # the other one was quicker: the database, or the intake, says so
                    logging.getLogger("test").info("%s", failure)
                await asyncio.sleep(0)
            return moved

        await asyncio.gather(*map(move_all, intakes))
        rows = left(engine, "message_id")
        assert len(rows) == len({bytes(row.message_id) for row in rows}) == 130


@pytest.mark.sampled
async def test_a_row_that_is_not_a_message_stays_and_does_not_hold_up_others(
    database: Database, node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    with engine_of(database) as engine:
        make_table(engine, ",\n    created BIGINT NOT NULL")
        for number, aggregate in enumerate(("no name!", "order", "order")):
            foreign_row(engine, aggregate, "1", str(number), number)
        async with (
            client(node.address) as mq,
            mq.outbox_watchdog(engine, debezium=DebeziumTable(order_by="created")),
        ):
            assert [each.body for each in await received(mq, "outbox.event.order", 2)] == [
                b"1",
                b"2",
            ]
            await eventually(
                lambda: (
                    [row.aggregatetype for row in left(engine, "aggregatetype", "outboxevent")]
                    == ["no name!"]
                )
            )
        assert "stays there" in caplog.text
        caplog.clear()


@pytest.mark.sampled
async def test_an_id_that_is_used_twice_does_not_hold_up_other_rows(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    with engine_of(database) as engine:
        make_table(engine, ",\n    created BIGINT NOT NULL")
        intake, identifier = (
            DebeziumIntake(EngineRunner(engine), DebeziumTable(order_by="created"), "qmq_outbox"),
            str(uuid4()),
        )
        foreign_row(engine, "order", "1", "1", 1, identifier)
        assert await intake.move() == 1
        foreign_row(engine, "order", "1", "2", 2, identifier)
        for number in range(3, 60):
            foreign_row(engine, "order", "1", str(number), number)
        assert await intake.move() == 57
        assert await intake.move() == 0
        assert [str(row.id) for row in left(engine, "id", "outboxevent")] == [identifier]
        assert caplog.text.count("waits: the outbox has a message of its id") == 1
        with engine.begin() as connection:
            connection.execute(text("DELETE FROM qmq_outbox"))  # the messages are sent
        assert await intake.move() == 1
        assert len(left(engine, "id")) == 1
    caplog.clear()


async def test_a_missing_table_is_logged_and_its_rows_are_sent_once_it_is_made(
    node: Node, tmp_path: object, caplog: pytest.LogCaptureFixture
) -> None:
    from support.databases import sqlite_database

    with engine_of(sqlite_database(tmp_path / "business.sqlite")) as engine:  # type: ignore[operator]
        async with client(node.address) as mq, mq.outbox_watchdog(engine, debezium=DebeziumTable()):
            await eventually(lambda: "no such table" in caplog.text)
            make_table(engine)
            with engine.begin() as connection:
                write_event_blocking(connection, ORDER)
            assert [each.id.to_bytes() for each in await received(mq, "outbox.event.order", 1)] == [
                ORDER.id.bytes
            ]


def test_ids_that_are_made_later_sort_later() -> None:
    made = [
        time_ordered_id(lambda at=at: 1_700_000_000_000_000_000 + at * 1_000) for at in range(3_000)
    ]  # type: ignore[misc]
    assert made == sorted(made, key=str)
    assert {each.version for each in made} == {7}
    assert {each.variant for each in made} == {"specified in RFC 4122"}


@pytest.mark.parametrize(
    "given",
    [ORDER.id, str(ORDER.id), ORDER.id.bytes, memoryview(ORDER.id.bytes)],
    ids=["UUID", "text", "bytes", "memoryview"],
)
def test_an_id_is_the_same_message_however_a_driver_returns_it(given: object) -> None:
    number, shown = message_id(given)
    assert (number.to_bytes(), shown) == (ORDER.id.bytes, str(ORDER.id))


def test_an_id_that_is_not_a_uuid_gets_a_derived_id() -> None:
    first, again, other = message_id("event-1"), message_id("event-1"), message_id("event-2")
    assert first == again != other
    assert first[1] == "event-1"


@pytest.mark.parametrize(
    ("payload", "body"),
    [
        (None, b""),
        (b"\x00", b"\x00"),
        (memoryview(b"m"), b"m"),
        ('{"a": 1}', b'{"a": 1}'),
        ({"a": "é"}, '{"a":"é"}'.encode()),
        ([1], b"[1]"),
    ],
)
def test_a_payload_is_the_body(payload: object, body: bytes) -> None:
    assert body_of(payload) == body


def test_invalid_tables_columns_and_subjects_are_refused() -> None:
    for wrong in ({"order_by": "created; DROP"}, {"subject": "{other}"}, {"subject": "{"}):
        with pytest.raises(InvalidArgument):
            DebeziumTable(**wrong)
    with pytest.raises(InvalidName):
        DebeziumTable("no table")
    assert UUID(DebeziumEvent("a", "b", "c").row()["id"]).version == 7
