"""An asyncio client belongs to the event loop in which it was first used. In a second `asyncio.run`
every call works or says what to do.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, TypeVar

import pytest
from support import NodeProcess

import qmq
from qmq.errors import ClientClosed, InvalidArgument
from qmq.model import Order, SubjectConfig

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::RuntimeWarning")
"""asyncio warns of connections that are open when their event loop ends."""

T = TypeVar("T")

LATER: Final = timedelta(hours=1)
NUMBERS: Final = itertools.count()
WAIT_S: Final = 60.0
"""A call that waits for a loop that has ended would wait for ever."""


@dataclass(frozen=True, slots=True)
class Used:
    """A client after its first event loop, and what it made there."""

    client: qmq.Client
    producer: qmq.Producer
    ordered_producer: qmq.OrderedProducer
    delayed_producer: qmq.client.producing.delayed.DelayedProducer
    consumer: qmq.Consumer
    message: qmq.Message
    ordered_consumer: qmq.OrderedConsumer
    ordered_message: qmq.OrderedMessage
    stuck: qmq.Producer
    """A producer whose cluster does not answer."""
    ticket: Awaitable[object]
    """Undecided: of `stuck`."""


Call = Callable[[Used], object]


async def use(client: qmq.Client) -> Used:
    with suppress(qmq.errors.SubjectExists):
        await client.metadata.create_subject(
            SubjectConfig("o", order=Order.STRICT, logical_partitions=16)
        )
    for number in range(3):
        await client.send("s", b"%d" % number)
        await client.send("o", b"%d" % number, key="k")
    await client.send("s", b"later", delay=LATER)
    producer, ordered, delayed = (
        client.producer("s"),
        client.ordered_producer("o"),
        client.delayed_producer("s"),
    )
    await producer.send(b"4")
    await ordered.send(b"4", "k")
    # a consumer whose loop has ended keeps its messages until its lease ends
    group = f"g{next(NUMBERS)}"
    consumer, ordered_consumer = (
        client.consumer("s", group, ack="explicit"),
        client.ordered_consumer("o", group, ack="explicit"),
    )
    message, ordered_message = await anext(aiter(consumer)), await anext(aiter(ordered_consumer))
    stuck = qmq.connect("127.0.0.1:1", state_dir=False).producer("s")
    ticket = stuck.send(b"")
    return Used(
        client,
        producer,
        ordered,
        delayed,
        consumer,
        message,
        ordered_consumer,
        ordered_message,
        stuck,
        ticket,
    )


async def all_of(items: AsyncIterator[Any]) -> list[Any]:
    return [each async for each in items]


REFUSED: Final[dict[str, Call]] = {
    "send": lambda used: used.client.send("s", b""),
    "send, another subject": lambda used: used.client.send("another", b""),
    "send, delayed": lambda used: used.client.send("s", b"", delay=LATER),
    "send, ordered": lambda used: used.client.send("o", b"", key="k"),
    "send, with other acks": lambda used: used.client.send("s", b"", acks="master"),
    "send_many": lambda used: used.client.send_many("s", [b""]),
    "send_many, delayed": lambda used: used.client.send_many("s", [b""], delays=LATER),
    "Producer.send": lambda used: used.producer.send(b""),
    "Producer.flush": lambda used: used.stuck.flush(),
    "Producer.close": lambda used: used.stuck.close(),
    "OrderedProducer.send": lambda used: used.ordered_producer.send(b"", "k"),
    "DelayedProducer.send": lambda used: used.delayed_producer.send(b"", due=LATER),
    "an undecided ticket": lambda used: used.ticket,
    "producer": lambda used: used.client.producer("s"),
    "ordered_producer": lambda used: used.client.ordered_producer("o"),
    "delayed_producer": lambda used: used.client.delayed_producer("s"),
    "consumer": lambda used: used.client.consumer("s", "another"),
    "ordered_consumer": lambda used: used.client.ordered_consumer("o", "another"),
    "async for": lambda used: anext(aiter(used.consumer)),
    "anext": lambda used: anext(used.consumer),
    "pull": lambda used: used.consumer.pull(1),
    "join": lambda used: used.consumer.join(),
    "ack_sync": lambda used: used.message.ack_sync(),
    "ack": lambda used: used.message.ack(),
    "nack": lambda used: used.message.nack(),
    "reject": lambda used: used.message.reject(),
    "release": lambda used: used.message.release(),
    "async for, ordered": lambda used: anext(aiter(used.ordered_consumer)),
    "take": lambda used: used.ordered_consumer.take(),
    "pull, ordered": lambda used: used.ordered_consumer.pull(),
    "ack, ordered": lambda used: used.ordered_message.ack(),
    "fail": lambda used: used.ordered_message.fail(),
    "browse": lambda used: all_of(used.client.browse("s")),
    "outbox": lambda used: used.client.outbox_watchdog([]),
}
WORK: Final[dict[str, Call]] = {
    "metadata": lambda used: used.client.metadata.find_subject("s"),
    "access": lambda used: used.client.access.whoami(),
    "delayed": lambda used: all_of(used.client.delayed.list("s")),
    "Consumer.close": lambda used: used.consumer.close(),
    "OrderedConsumer.close": lambda used: used.ordered_consumer.close(),
    "close": lambda used: used.client.close(),
}


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


def used_in_first_loop(address: str) -> Used:
    """A client whose event loop has ended."""
    return asyncio.run(limited(use(qmq.connect(address, state_dir=False))))


async def limited(work: Awaitable[T]) -> T:
    async with asyncio.timeout(WAIT_S):
        return await work


def in_new_loop(call: Call, used: Used) -> object:
    """What the call returns in a new event loop."""

    async def called() -> object:
        found = call(used)
        return await limited(found) if isinstance(found, Awaitable) else found

    return asyncio.run(called())


@pytest.mark.parametrize("call", REFUSED)
def test_in_a_second_loop_a_call_says_that_the_first_has_ended(address: str, call: str) -> None:
    used = used_in_first_loop(address)
    with pytest.raises(ClientClosed, match=r"make a client in each asyncio\.run"):
        in_new_loop(REFUSED[call], used)
    asyncio.run(limited(used.client.close()))


@pytest.mark.parametrize("call", WORK)
def test_in_a_second_loop_calls_to_metaservers_and_closing_work(address: str, call: str) -> None:
    used = used_in_first_loop(address)
    in_new_loop(WORK[call], used)
    asyncio.run(limited(used.client.close()))


def test_a_client_that_was_not_used_yet_works_in_a_second_loop(address: str) -> None:
    client = qmq.connect(address, state_dir=False)
    asyncio.run(limited(client.metadata.find_subject("s")))
    asyncio.run(limited(use(client)))


def test_a_client_of_a_loop_that_runs_says_that_it_belongs_to_another(address: str) -> None:
    async def all_calls() -> None:
        async with qmq.connect(address, state_dir=False) as client:
            used = await use(client)
            for name in (
                "send",
                "Producer.send",
                "an undecided ticket",
                "consumer",
                "async for",
                "pull",
                "browse",
            ):
                with pytest.raises(InvalidArgument, match="belongs to another event loop"):
                    await asyncio.to_thread(in_new_loop, REFUSED[name], used)
            used.stuck.abort()

    asyncio.run(limited(all_calls()))


@pytest.mark.parametrize(
    "make", ["producer", "ordered_producer", "delayed_producer", "consumer", "ordered_consumer"]
)
def test_outside_of_an_event_loop_a_client_says_that_it_needs_one(address: str, make: str) -> None:
    with pytest.raises(InvalidArgument, match="no event loop runs here"):
        getattr(qmq.connect(address, state_dir=False), make)(
            *["s", "g"][: 2 if "consumer" in make else 1]
        )
