"""QMQ: a distributed message broker. This is all of its public face for applications.

    async with qmq.connect("localhost:20880") as mq:
        await mq.send("flight.departed", body, key="N14228", tags=["UA"])
        await mq.send("flight.reminder", body, delay=timedelta(hours=1))
        async for message in mq.consumer("flight.departed", group="ops"):
            ...

`qmq.blocking.connect` is the same for scripts without asyncio.
"""

from __future__ import annotations

from collections.abc import Sequence

from qmq import errors
from qmq.client.client import Client
from qmq.client.consumer import Consumer
from qmq.client.delayed_message import DelayedMessage
from qmq.client.delayed_producer import DelayedProducer
from qmq.client.message import Message, Messages
from qmq.client.ordered.consumer import OrderedConsumer
from qmq.client.ordered.message import OrderedMessage
from qmq.client.ordered.producer import OrderedProducer
from qmq.client.producer import Producer
from qmq.client.receipts import BatchReceipt, Receipt, Receipts, Ticket
from qmq.errors import Outcome, QmqError
from qmq.model import DelayedId, Fencing, MessageId, Order, SubjectConfig

__version__ = "0.1.0"

__all__ = [
    "BatchReceipt",
    "Client",
    "Consumer",
    "DelayedId",
    "DelayedMessage",
    "DelayedProducer",
    "Fencing",
    "Message",
    "MessageId",
    "Messages",
    "Order",
    "OrderedConsumer",
    "OrderedMessage",
    "OrderedProducer",
    "Outcome",
    "Producer",
    "QmqError",
    "Receipt",
    "Receipts",
    "SubjectConfig",
    "Ticket",
    "connect",
    "errors",
]


def connect(addresses: str | Sequence[str] = "localhost:20880", *, create_subjects: bool = True) -> Client:
    """A client of the cluster whose metaservers are at `addresses` ("host:port", several with commas or as a list).

    Nothing is opened until it is needed. With `create_subjects` the first message to an unknown subject creates it, if the
    metaserver allows it. Raises InvalidArgument for what is no address.
    """
    return Client(addresses, create_subjects=create_subjects)
