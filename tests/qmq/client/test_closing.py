"""A client that is closed while its tasks send, through a real node."""

from __future__ import annotations

import asyncio
from pathlib import Path

from support import node_config, running

import qmq
from qmq.errors import ClientClosed

ROUNDS = 120
"""Of the event loop; the first send needs fewer for the look-up, the connection and the answer."""


async def test_a_send_never_ends_as_cancelled_when_its_client_closes(tmp_path: Path) -> None:
    """Close after each number of rounds of the event loop: during the look-up, the connection, the
    request.
    """
    outcomes = set()
    async with running(node_config(tmp_path)) as node:
        for rounds in range(ROUNDS):
            mq = qmq.connect(node.address)
            sends = [asyncio.create_task(mq.send(f"s.{number}", b"x")) for number in range(2)]
            for _ in range(rounds):
                await asyncio.sleep(0)
            await mq.close()
            for each in await asyncio.gather(*sends, return_exceptions=True):
                outcomes.add(type(each))
    # How far a send gets in so many rounds depends on the machine.
    assert ClientClosed in outcomes
    assert outcomes <= {ClientClosed, qmq.Receipt}, outcomes


async def test_a_cancelled_send_ends_as_cancelled(tmp_path: Path) -> None:
    async with running(node_config(tmp_path)) as node, qmq.connect(node.address) as mq:
        sending = asyncio.create_task(mq.send("s", b"x"))
        await asyncio.sleep(0)
        sending.cancel()
        assert isinstance(
            (await asyncio.gather(sending, return_exceptions=True))[0], asyncio.CancelledError
        )
        assert (await mq.send("s", b"y")).sequence >= 0
