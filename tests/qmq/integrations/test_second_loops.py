"""Integrations in a second `asyncio.run`: what has an event loop of its own works; asyncio brokers
are started in each loop, and say so.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator

import dramatiq
import pytest
from kombu import Connection
from support import NodeProcess
from taskiq import BrokerMessage

from qmq.errors import ClientClosed
from qmq.integrations import kombu as _transport  # noqa: F401 - registers the transport
from qmq.integrations.dramatiq import DramatiqBroker
from qmq.integrations.faststream import QmqBroker as FastStreamBroker
from qmq.integrations.taskiq import QmqBroker as TaskiqBroker

pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::RuntimeWarning", "ignore::DeprecationWarning"
)
TASK = BrokerMessage(task_id="1", task_name="t", message=b"{}", labels={})


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A node in another process: the event loops of this one end."""
    process = NodeProcess(tmp_path_factory.mktemp("node"))
    yield process.start()
    process.kill()


@pytest.fixture(autouse=True)
def leftovers() -> Iterator[None]:
    """What a test leaves behind warns while the test still ignores it."""
    yield
    gc.collect()


def test_a_taskiq_broker_is_started_in_each_loop(address: str) -> None:
    broker = TaskiqBroker(address, state_dir=False)

    async def start_and_kick() -> None:
        await broker.startup()
        await broker.kick(TASK)

    asyncio.run(start_and_kick())
    with pytest.raises(ClientClosed, match="event loop"):
        asyncio.run(broker.kick(TASK))
    asyncio.run(start_and_kick())
    asyncio.run(broker.shutdown())


def test_a_faststream_broker_is_started_in_each_loop(address: str) -> None:
    broker = FastStreamBroker(address, state_dir=False)

    async def start_and_publish() -> None:
        await broker.start()
        await broker.publish("x", "s")

    asyncio.run(start_and_publish())
    with pytest.raises(ClientClosed, match="event loop"):
        asyncio.run(broker.publish("x", "s"))
    asyncio.run(broker.stop())
    asyncio.run(start_and_publish())
    asyncio.run(broker.stop())


def test_dramatiq_and_kombu_send_in_each_loop(address: str) -> None:
    broker = DramatiqBroker(address, state_dir=False)
    connection = Connection(f"qmq://{address}")
    queue = connection.SimpleQueue("q")

    async def send() -> None:
        broker.enqueue(dramatiq.Message("q", "a", (), {}, {}))
        queue.put("x")

    for _ in range(2):
        asyncio.run(send())
    queue.close()
    connection.release()
    broker.close()
