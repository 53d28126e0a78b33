"""QMQ: a distributed message broker. This is all of its public face for applications.

    async with qmq.connect("localhost:20880") as mq:
        await mq.send("flight.departed", body, key="N14228", tags=["UA"])
        await mq.send("flight.reminder", body, delay=timedelta(hours=1))
        async for message in mq.consumer("flight.departed", group="ops"):
            ...

`qmq.blocking.connect` is the same for scripts without asyncio.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from qmq import errors
from qmq.blocking import beside
from qmq.client import payloads as payload
from qmq.client.browsing import BrowsedMessage
from qmq.client.client import Client
from qmq.client.consumer import Consumer
from qmq.client.delayed_message import DelayedMessage
from qmq.client.delayed_producer import DelayedProducer
from qmq.client.interceptors import BaseInterceptor, Interceptor, Outgoing
from qmq.client.listening.context import Context
from qmq.client.listening.outcomes import Reject, Retry
from qmq.client.message import Message, Messages
from qmq.client.ordered.ordered_consumer import OrderedConsumer
from qmq.client.ordered.ordered_message import OrderedMessage
from qmq.client.ordered.ordered_producer import OrderedProducer
from qmq.client.producer import Producer
from qmq.client.receipts import BatchReceipt, Receipt, Receipts, Ticket
from qmq.client.state_folder import StateDir
from qmq.client.tracing import TraceContext
from qmq.errors import Outcome, QmqError
from qmq.event_loop import run
from qmq.model import DelayedId, Fencing, MessageId, Order, SubjectConfig, SubjectFlush
from qmq.security.client_tokens import Token
from qmq.security.contexts import default_server
from qmq.security.tls import Tls
from qmq.security.tls_network import network_of

__version__ = "0.1.0"

__all__ = [
    "BaseInterceptor",
    "BatchReceipt",
    "BrowsedMessage",
    "Client",
    "Consumer",
    "Context",
    "DelayedId",
    "DelayedMessage",
    "DelayedProducer",
    "Fencing",
    "Interceptor",
    "Message",
    "MessageId",
    "Messages",
    "Order",
    "OrderedConsumer",
    "OrderedMessage",
    "OrderedProducer",
    "Outcome",
    "Outgoing",
    "Producer",
    "QmqError",
    "Receipt",
    "Receipts",
    "Reject",
    "Retry",
    "SubjectConfig",
    "SubjectFlush",
    "Ticket",
    "Tls",
    "TraceContext",
    "connect",
    "errors",
    "payload",
    "run",
]


def connect(
    addresses: str | Sequence[str] | None = None,
    *,
    create_subjects: bool = True,
    interceptors: Iterable[Interceptor] = (),
    name: str | None = None,
    state_dir: StateDir = None,
    tls: Tls | None = None,
    token: Token = None,
) -> Client:
    """A client of the cluster whose metaservers are at `addresses` ("host:port", several with commas or as a list); by default where
    QMQ_SERVER or the context that QMQ_CONTEXT names says, else "localhost:20880".

    Nothing is opened until it is needed. With `create_subjects` the first message to an unknown subject creates it, if the
    metaserver allows it. `interceptors` see every message sent and handled, the first one outermost (docs/TRACING.md).
    `name` is what operators know the client by (`qmq pause client`): the host and the process, if it has none.
    Verdicts that no broker can be told at the time are kept in `state_dir`, for the next start: a folder, by default QMQ_STATE_DIR or
    ~/.local/state/qmq; False for nowhere (docs/DELIVERY.md).
    `tls` says where certificates are, if the cluster uses TLS: by default what QMQ_TLS_CA, QMQ_TLS_CERT and QMQ_TLS_KEY name
    (docs/SECURITY.md). `token` says who this client is, if its certificate does not: the token, a `Path` of the file that has it, or a
    function that gives the present one; by default what QMQ_TOKEN_FILE or QMQ_TOKEN say (docs/ACCESS.md).
    Raises InvalidArgument for what is no address, InvalidName.
    """
    return Client(
        addresses or default_server(),
        create_subjects=create_subjects,
        interceptors=interceptors,
        name=name,
        state_dir=state_dir,
        network=network_of(tls, token),
        for_threads=beside,
    )
