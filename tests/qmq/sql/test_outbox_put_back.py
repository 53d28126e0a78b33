"""The database is put back to an older copy: rows that were sent go again, with their ids; a row
that has an old one's id stays.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest
from outbox_support import client, committed_rows, engine_of, is_empty, left, received, watching
from sqlalchemy import text
from support.databases import Database

from qmq.errors import InvalidArgument, QmqError
from qmq.node.dev_node import Node
from qmq.sql.outbox_message import OutboxMessage
from qmq.sql.outbox_relay import OutboxSender
from qmq.sql.outbox_runner import EngineRunner
from qmq.sql.outbox_sender import Fates
from qmq.sql.outbox_statements import Operations
from qmq.sql.outbox_tables import TABLE

pytestmark = pytest.mark.sampled


async def test_rows_of_an_older_copy_are_sent_again_with_their_ids(
    database: Database, node: Node
) -> None:
    with engine_of(database) as engine:
        ids = committed_rows(engine, [("order", b"%d" % number, b"k") for number in range(5)])
        with engine.begin() as connection:
            connection.execute(text(f"CREATE TABLE older_copy AS SELECT * FROM {TABLE}"))
        async with client(node.address) as mq, watching(mq, engine):
            await is_empty(engine)
            with engine.begin() as connection:
                connection.execute(text(f"INSERT INTO {TABLE} SELECT * FROM older_copy"))
                connection.execute(text("DROP TABLE older_copy"))
            await is_empty(engine)
            found = await received(mq, "order", 10)
        assert [message.id for message in found] == [*ids, *ids]


class Sending:
    """A sender during whose work something happens; then it has sent all messages, or none."""

    def __init__(self, meanwhile: Callable[[], None], error: QmqError | None) -> None:
        self._meanwhile, self._error = meanwhile, error

    async def is_ordered(self, subject: str) -> bool:
        return False

    async def send(self, subject: str, messages: Sequence[OutboxMessage]) -> Fates:
        await asyncio.to_thread(self._meanwhile)
        places = range(len(messages))
        return (
            Fates(list(places))
            if self._error is None
            else Fates([], [(place, self._error) for place in places])
        )


@pytest.mark.parametrize("error", [None, InvalidArgument("it can never be sent")])
async def test_a_row_that_has_the_id_of_a_row_under_way_stays(
    database: Database, error: QmqError | None
) -> None:
    with engine_of(database) as engine:
        committed_rows(engine, [("order", b"old", b"")])
        (old,) = left(engine, "id")

        def put_back() -> None:
            """The copy has no row, so the next one gets the same id."""
            with engine.begin() as connection:
                connection.execute(text(f"DELETE FROM {TABLE}"))
            committed_rows(engine, [("order", b"new", b"")])
            with engine.begin() as connection:
                connection.execute(text(f"UPDATE {TABLE} SET id = {old.id}"))

        sender = OutboxSender(Operations(EngineRunner(engine), TABLE), Sending(put_back, error))
        await sender.send_left("order", [old.id])
        assert [
            (bytes(row.body), row.state, row.attempts)
            for row in left(engine, "body, state, attempts")
        ] == [(b"new", 0, 0)]
