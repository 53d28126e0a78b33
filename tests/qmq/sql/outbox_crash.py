"""A process that dies at one point between a message's transaction and the broker: `python
outbox_crash.py URL ADDRESS TABLE POINT`.

It prints the message's id as soon as it has one. The exit status is 9 if it died at the given
point.
"""

from __future__ import annotations

import asyncio
import os
import sys
from datetime import timedelta
from typing import Any

from sqlalchemy import create_engine

import qmq
from qmq.sql.outbox_relay import OutboxSender
from qmq.sql.outbox_statements import Operations
from qmq.sql.outbox_watchdog import Watchdog

SHORT = timedelta(seconds=1)


def die(*_: Any, **__: Any) -> Any:
    """End the process as a power cut would."""
    os._exit(9)


def arrange(point: str) -> None:
    """Have it die there."""
    settle = Operations.settle

    async def settle_sent(self: Operations, sent: Any, failed: Any) -> None:
        if sent:
            if point == "deleted":
                await settle(self, sent, failed)
            die()

    if point == "committed":
        OutboxSender.send_committed = die  # type: ignore[method-assign]
    elif point == "watchdog_took_the_lease":
        Watchdog.start_deliveries = die  # type: ignore[method-assign]
    elif point in ("sent", "deleted", "watchdog_sent"):
        Operations.settle = settle_sent  # type: ignore[method-assign]


async def run(url: str, address: str, table: str, point: str) -> None:
    """Send a message to a subject named as the point."""
    engine = create_engine(url)
    async with qmq.connect(address) as mq:
        if point.startswith("watchdog"):
            await mq.outbox_watchdog(engine, tables=[table], lease=SHORT).run()
        with engine.begin() as connection:
            async with mq.outbox(connection, table=table, grace=SHORT) as box:
                print(box.send(point, b"x", key="k"), flush=True)
            if point == "inserted":
                die()
        await box.committed()


if __name__ == "__main__":
    arrange(sys.argv[4])
    asyncio.run(run(*sys.argv[1:]))
