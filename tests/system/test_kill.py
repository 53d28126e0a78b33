"""kill -9 at random moments under load: what was acknowledged is there and intact, and what was
acknowledged by a consumer stays away.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from datetime import timedelta
from pathlib import Path

import pytest
from support import NodeProcess, eventually, forms
from system.group import SECURE, secured

import qmq
from qmq.errors import AccessDenied, QmqError

KILLS = int(os.environ.get("QMQ_KILLS", {"all": "50", "ci": "10", "gate": "4"}[forms.FORM]))
POLL = timedelta(seconds=0.1)


class Load:
    """A producer and a consumer that continue through every kill, and the answers that they got."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.acknowledged: set[bytes] = set()
        self.sent = 0
        self.seen: Counter[bytes] = Counter()
        self.acked: set[bytes] = set()
        self.after_ack: Counter[bytes] = Counter()
        self.is_over = False
        """Whether the node of this round was killed."""

    async def produce(self, mq: qmq.Client) -> None:
        """Send until the end of the round; a batch counts when its ticket is resolved."""
        producer = mq.producer("s", batch_messages=20, delivery_timeout_s=0.2)
        waiting = []
        while not self.is_over:
            bodies = []
            for _ in range(20):
                bodies.append(
                    b"%d:%s"
                    % (self.sent, self.chance.randbytes(self.chance.randrange(200)).hex().encode())
                )
                self.sent += 1
            tickets = producer.send_many(bodies)
            waiting.append(asyncio.create_task(self._note(tickets, bodies)))
            await asyncio.sleep(0.001)
        await asyncio.wait(waiting, timeout=0.1)
        producer.abort()
        await asyncio.wait(waiting)

    async def _note(self, tickets: object, bodies: list[bytes]) -> None:
        try:
            await tickets  # type: ignore[misc]
        except QmqError:
            return
        self.acknowledged.update(bodies)

    async def consume(self, mq: qmq.Client, name: str) -> None:
        """Consume until the round ends, acknowledging each batch and waiting for the answer."""
        consumer = mq.consumer("s", "g", name=name, ack="explicit", prefetch=200)
        while not self.is_over:
            try:
                found = await consumer.pull(50, POLL)
                self.seen.update(found.bodies)
                self.after_ack.update(body for body in found.bodies if body in self.acked)
                async with asyncio.timeout(3):
                    await found.ack_sync()
                self.acked.update(found.bodies)
            except (QmqError, TimeoutError):
                await asyncio.sleep(0.02)


async def one_round(node: NodeProcess, load: Load, number: int) -> None:
    """Start, load, and kill in the middle: a while after the first acknowledgement arrived,
    whenever that is on a busy machine.
    """
    node.start()
    mq = qmq.connect(node.address)
    load.is_over = False
    before = len(load.acked)
    work = [
        asyncio.ensure_future(load.produce(mq)),
        asyncio.ensure_future(load.consume(mq, f"c{number}")),
    ]
    await eventually(lambda: len(load.acked) > before, within_s=120)
    await asyncio.sleep(load.chance.uniform(0.0, 0.4))
    node.process.send_signal(9)  # type: ignore[union-attr]
    asyncio.get_running_loop().call_later(0.2, setattr, load, "is_over", True)
    await asyncio.gather(*work)
    node.kill()
    await mq.close()


async def drain(node: NodeProcess) -> Counter[bytes]:
    """All stored messages, read by a separate group."""
    async with qmq.connect(node.address) as mq:
        consumer, found = mq.consumer("s", "audit", prefetch=50_000), Counter[bytes]()
        while part := await consumer.pull(5000, timedelta(seconds=1)):
            found.update(part.bodies)
            part.ack_later()
        return found


@pytest.mark.smoke
@pytest.mark.parametrize("flush", forms.some(["sync", "async"], 2))
async def test_an_acknowledged_message_survives_kill_9_however_often(
    node_process: NodeProcess, tmp_path: Path, flush: str
) -> None:
    node_process.options = ("--flush", flush)
    load = Load(random.Random(forms.SEED))
    async with secured(node_process, tmp_path, secure=SECURE):
        for number in range(KILLS // 2):
            await one_round(node_process, load, number)
        node_process.start()
        await require_closed(node_process)
        stored = await drain(node_process)
    assert load.acknowledged
    assert load.acked
    assert load.acknowledged - stored.keys() == set()
    assert set(stored.values()) == {1}
    assert load.after_ack == Counter(), (
        "a message was delivered again whose acknowledgement was answered"
    )
    assert node_process.stop() == 0


async def require_closed(node: NodeProcess) -> None:
    """In the secured form, the rules still hold after all kills."""
    if SECURE:
        async with qmq.connect(node.address) as mq:
            assert (await mq.access.whoami()).mode == "enforce"
            with pytest.raises(AccessDenied):
                await mq.access.rules()
