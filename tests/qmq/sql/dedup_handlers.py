"""The handlers of the kill tests: two writes, which must be there both or not at all."""

from __future__ import annotations

from sqlalchemy import text

import qmq

_INSERT = "INSERT INTO effect VALUES ('{group}')"
_ADD = "UPDATE total SET effects = effects + 1"


async def bill(body: bytes, context: qmq.Context) -> None:
    """A handler with SQLAlchemy in the event loop."""
    await context.connection.execute(text(_INSERT.format(group=context.group)))
    await context.connection.execute(text(_ADD))


def bill_in_thread(body: bytes, context: qmq.Context) -> None:
    """A handler with SQLAlchemy in a thread."""
    context.connection.execute(text(_INSERT.format(group=context.group)))
    context.connection.execute(text(_ADD))


def bill_by_driver(body: bytes, context: qmq.Context) -> None:
    """A handler with a plain driver."""
    cursor = context.connection.cursor()
    cursor.execute(_INSERT.format(group=context.group))
    cursor.execute(_ADD)
