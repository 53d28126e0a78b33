"""Dependencies for FastAPI, on the lifespan of `qmq.integrations.starlette`.

Mq = Annotated[qmq.Client, Depends(messaging.client)]
Box = Annotated[Outbox, outbox(messaging, engine)]
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from fastapi import Depends

from qmq.integrations.starlette import QmqLifespan
from qmq.sql.outbox import Outbox


def outbox(messaging: QmqLifespan, engine: Any, **options: Any) -> Any:
    """A dependency: an outbox in its own transaction on a SQLAlchemy engine, committed before the
    response is sent. If the path function raises, the transaction is rolled back and no message is
    sent; if the commit fails, the response is an error. `options` are those of `Client.outbox`.
    """

    async def box() -> AsyncIterator[Outbox]:
        async with messaging.client().outbox(engine, **options) as made:
            yield made

    # By default FastAPI ends a dependency after the response: the caller would see success before
    # the commit.
    return Depends(box, scope="function")
