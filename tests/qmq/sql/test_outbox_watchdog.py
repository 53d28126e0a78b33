"""The watchdog sends the messages that were left, in order; one of several works at a time;
databases and brokers may fail and return.
"""

from __future__ import annotations

import asyncio
import contextlib
from datetime import timedelta
from pathlib import Path

import pytest
from outbox_support import (
    async_engine_of,
    bodies,
    change,
    client,
    committed_rows,
    engine_of,
    hold_lease,
    is_empty,
    left,
    received,
    watching,
)
from sqlalchemy import Engine, text
from support import NodeProcess, eventually, node_config, running
from support.databases import Database

import qmq
from qmq.errors import InvalidArgument
from qmq.model import SubjectConfig
from qmq.node.dev_node import Node

pytestmark = pytest.mark.sampled


async def test_it_sends_what_a_dead_process_left_each_key_in_order_and_deletes_it(
    database: Database, node: Node
) -> None:
    with engine_of(database) as engine:
        ids = committed_rows(
            engine, [("order", b"%d" % number, b"key-%d" % (number % 5)) for number in range(2_500)]
        )
        async with (
            client(node.address) as mq,
            async_engine_of(database) as business,
            watching(mq, business) as dogs,
        ):
            found = await received(mq, "order", 2_500)
            await is_empty(engine)
            await eventually(lambda: dogs.dogs[0].sent == 2_500)
        assert {message.id for message in found} == set(ids)
        for key in range(5):
            own = [int(message.body) for message in found if message.key == f"key-{key}"]
            assert own == list(range(key, 2_500, 5))


async def test_what_its_sender_still_claims_it_leaves_alone(database: Database, node: Node) -> None:
    with engine_of(database) as engine:
        committed_rows(engine, [("order", b"claimed", b"k")], claim_ms=3_600_000)
        committed_rows(engine, [("order", b"behind it", b"k"), ("order", b"free", b"j")])
        async with client(node.address) as mq, watching(mq, engine):
            assert await bodies(mq, "order", 1) == [b"free"]
            await eventually(lambda: len(left(engine)) == 2)
            await change(engine, "UPDATE qmq_outbox SET claimed_until = 0")
            assert await bodies(mq, "order", 2) == [b"claimed", b"behind it"]
            await is_empty(engine)


async def test_a_message_that_cannot_be_sent_is_set_aside_and_holds_up_no_other(
    database: Database, tmp_path: Path
) -> None:
    async with running(node_config(tmp_path / "node", auto_create=False)) as node:
        with engine_of(database) as engine:
            async with client(node.address, create_subjects=False) as mq:
                await mq.metadata.create_subject(SubjectConfig("order"))
                committed_rows(
                    engine,
                    [
                        ("nowhere", b"lost", b""),
                        ("order", b"first", b""),
                        ("order", b"second", b""),
                    ],
                )
                with engine.begin() as connection:
                    # as if a column had cut it
                    connection.execute(
                        text("UPDATE qmq_outbox SET content_bytes = 99 WHERE id = 2")
                    )
                async with watching(mq, engine):
                    assert await bodies(mq, "order", 1) == [b"second"]
                    await eventually(lambda: [row.state for row in left(engine, "state")] == [1, 1])
                unknown, cut = left(engine, "subject, attempts, last_error")
                assert (unknown.subject, unknown.attempts) == ("nowhere", 1)
                assert "E105" in unknown.last_error
                assert "too narrow" in cut.last_error


async def test_of_two_watchdogs_one_works_and_the_other_takes_over_when_it_leaves(
    database: Database, node: Node
) -> None:
    with engine_of(database) as engine:
        async with client(node.address) as mq, watching(mq, engine) as other:
            await eventually(lambda: other.dogs[0].is_working)
            async with watching(mq, engine) as heir:
                committed_rows(engine, [("order", b"one", b"")])
                assert await bodies(mq, "order", 1) == [b"one"]
                await is_empty(engine)
                assert not heir.dogs[0].is_working
                await other.__aexit__(None, None, None)
                await eventually(lambda: heir.dogs[0].is_working)
                committed_rows(engine, [("order", b"two", b"")])
                assert await bodies(mq, "order", 1) == [b"two"]


async def test_a_lease_whose_holder_died_is_taken_when_it_is_over(
    database: Database, node: Node
) -> None:
    with engine_of(database) as engine:
        hold_lease(engine, 700)
        async with client(node.address) as mq, watching(mq, engine) as heir:
            committed_rows(engine, [("order", b"one", b"")])
            assert await bodies(mq, "order", 1) == [b"one"]
            assert heir.dogs[0].is_working


async def test_a_holder_that_was_paused_finds_out_that_another_took_its_lease(
    database: Database, node: Node
) -> None:
    with engine_of(database) as engine:
        async with client(node.address) as mq, watching(mq, engine, lease_s=1) as paused:
            await eventually(lambda: paused.dogs[0].is_working)
            hold_lease(engine, 3_600_000)
            await eventually(lambda: not paused.dogs[0].is_working)
        assert (
            left(engine, "holder", "(SELECT holder, 1 AS id FROM qmq_outbox_lease) AS lease")[
                0
            ].holder
            == "other"
        )


@pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
async def test_it_outlives_a_restart_of_the_database(database: Database, node: Node) -> None:
    assert database.server is not None
    with engine_of(database) as engine:
        async with client(node.address) as mq, watching(mq, engine) as dogs:
            await eventually(lambda: dogs.dogs[0].is_working)
            await asyncio.to_thread(database.server.restart)
            _again(engine, [("order", b"one", b"")])
            assert await bodies(mq, "order", 1) == [b"one"]
            await is_empty(engine)


def _again(engine: Engine, rows: list[tuple[str, bytes, bytes]]) -> None:
    """The restart breaks the pool's connections: the first use raises an error."""
    with contextlib.suppress(Exception):
        left(engine)
    committed_rows(engine, rows)


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_messages_wait_for_brokers_that_are_away_and_go_when_they_are_back(
    database: Database, node_process: NodeProcess
) -> None:
    address = node_process.start()
    port, data_port = address.rpartition(":")[2], node_process.data_address.rpartition(":")[2]
    with engine_of(database) as engine:
        async with client(address, delivery_s=1.0) as mq:
            await mq.send("order", b"before")
            node_process.kill()
            async with mq.outbox(engine) as box:
                box.send("order", b"one", key="k")
                box.send("order", b"two", key="k")
            assert await box.committed() is False
            assert [row.attempts for row in left(engine, "attempts")] == [1, 1]
            async with watching(mq, engine):
                await eventually(lambda: left(engine, "attempts")[0].attempts >= 2)
                again = NodeProcess(node_process.data, "--port", port, "--data-port", data_port)
                await asyncio.to_thread(again.start)
                try:
                    await is_empty(engine)
                    found = await bodies(mq, "order", 3)
                finally:
                    again.kill()
            assert list(dict.fromkeys(found)) == [b"before", b"one", b"two"]


async def test_senseless_options_are_refused(node: Node) -> None:
    async with client(node.address) as mq:
        for options in ({"lease": timedelta(0)}, {"tables": []}, {"tables": ["no such name!"]}):
            with pytest.raises(qmq.QmqError):
                mq.outbox_watchdog(object(), **options)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument):
            mq.outbox(object(), grace=timedelta(0))
