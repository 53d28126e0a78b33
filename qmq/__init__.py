"""QMQ: a distributed message broker. This module has everything that applications import.

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
from qmq.client.browse_selection import BrowsedMessage
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
from qmq.client.settle_report import SettleReport
from qmq.client.state_folder import StateDir
from qmq.client.tracing import TraceContext
from qmq.errors import Outcome, QmqError
from qmq.event_loop import run
from qmq.model import DelayedId, Fencing, MessageId, Order, SubjectConfig, SubjectFlush
from qmq.security.client_tokens import Token
from qmq.security.contexts import default_server
from qmq.security.tls import Tls
from qmq.security.tls_network import network_of

__version__ = "0.2.0"

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
    "SettleReport",
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
    """A client of the cluster whose metaservers are at `addresses` ("host:port"; several are separated by commas, or given as a list). The
    default is QMQ_SERVER, then the context that QMQ_CONTEXT names, then "localhost:20880".

    The client connects when it is first used. With `create_subjects` the first message to an unknown subject creates it, if the metaserver
    allows it. `interceptors` see every message sent and handled, the first one outermost (docs/TRACING.md). `name` identifies the client to
    operators (`qmq pause client`); the default is made of host and process. `state_dir` is a folder. The client keeps there, for its next
    start, the acknowledgements that no broker could receive. The default is QMQ_STATE_DIR, then ~/.local/state/qmq; False keeps none
    (docs/DELIVERY.md). `tls` says where certificates are, if the cluster uses TLS; the default is QMQ_TLS_CA, QMQ_TLS_CERT and QMQ_TLS_KEY
    (docs/SECURITY.md). `token` says who this client is, if its certificate does not: the token, the `Path` of a file that holds it, or a
    function that returns the current one. The default is QMQ_TOKEN_FILE, then QMQ_TOKEN (docs/ACCESS.md). Raises InvalidArgument for a
    malformed address, InvalidName.
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
