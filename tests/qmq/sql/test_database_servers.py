"""The databases that the tests run on."""

from __future__ import annotations

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import create_async_engine
from support.databases import Database


@pytest.mark.sampled
async def test_what_one_way_in_commits_the_others_see_also_after_a_restart(
    database: Database,
) -> None:
    engine = create_engine(database.sync_url)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE item (id INTEGER PRIMARY KEY, name VARCHAR(20))"))
        connection.execute(text("INSERT INTO item VALUES (1, 'größe')"))
    engine.dispose()
    if database.server is not None:
        database.server.restart()
    other = create_async_engine(database.async_url)
    async with other.connect() as reading:
        assert (await reading.execute(text("SELECT name FROM item"))).scalar_one() == "größe"
    await other.dispose()
    plain = database.connect()
    cursor = plain.cursor()
    cursor.execute("SELECT name FROM item")
    assert cursor.fetchall()[0][0] == "größe"
    cursor.close()
    plain.close()
