"""QMQ: a distributed message broker. Applications import everything from this module.

    async with qmq.connect("localhost:20880") as mq:
        await mq.send("flight.departed", body, key="N14228", tags=["UA"])
        await mq.send("flight.reminder", body, delay=timedelta(hours=1))
        async for message in mq.consumer("flight.departed", group="ops"):
            ...

`qmq.blocking.connect` is the same for scripts without asyncio.

Each name is imported at its first use. Python runs this file before any module of `qmq`, also when
a package below the client, such as `qmq_ordering`, imports `qmq.errors`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from datetime import timedelta

    from qmq import blocking as blocking
    from qmq import errors
    from qmq.client import payloads as payload
    from qmq.client.browsing import BrowsedMessage
    from qmq.client.client import Client
    from qmq.client.connection.pool import SettleReport
    from qmq.client.consuming.ack_spool import StateDir
    from qmq.client.consuming.consumer import Consumer
    from qmq.client.consuming.message import Message, Messages
    from qmq.client.consuming.ordered.consumer import OrderedConsumer
    from qmq.client.consuming.ordered.message import OrderedMessage
    from qmq.client.interceptors import BaseInterceptor, Interceptor, Outgoing
    from qmq.client.listening.context import Context, Reject, Retry
    from qmq.client.producing.delayed import DelayedMessage, DelayedProducer
    from qmq.client.producing.ordered.producer import OrderedProducer
    from qmq.client.producing.producer import Producer
    from qmq.client.producing.receipts import BatchReceipt, Receipt, Receipts, Ticket
    from qmq.client.tracing import TraceContext
    from qmq.errors import Outcome, QmqError
    from qmq.model import DelayedId, Fencing, MessageId, Order, SubjectConfig, SubjectFlush
    from qmq.process.event_loop import run
    from qmq.security.tls import Tls
    from qmq.security.tokens import Token

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

_PLACES: Final = {
    "BaseInterceptor": "qmq.client.interceptors:BaseInterceptor",
    "BatchReceipt": "qmq.client.producing.receipts:BatchReceipt",
    "BrowsedMessage": "qmq.client.browsing:BrowsedMessage",
    "Client": "qmq.client.client:Client",
    "Consumer": "qmq.client.consuming.consumer:Consumer",
    "Context": "qmq.client.listening.context:Context",
    "DelayedId": "qmq.model:DelayedId",
    "DelayedMessage": "qmq.client.producing.delayed:DelayedMessage",
    "DelayedProducer": "qmq.client.producing.delayed:DelayedProducer",
    "Fencing": "qmq.model:Fencing",
    "Interceptor": "qmq.client.interceptors:Interceptor",
    "Message": "qmq.client.consuming.message:Message",
    "MessageId": "qmq.model:MessageId",
    "Messages": "qmq.client.consuming.message:Messages",
    "Order": "qmq.model:Order",
    "OrderedConsumer": "qmq.client.consuming.ordered.consumer:OrderedConsumer",
    "OrderedMessage": "qmq.client.consuming.ordered.message:OrderedMessage",
    "OrderedProducer": "qmq.client.producing.ordered.producer:OrderedProducer",
    "Outcome": "qmq.errors:Outcome",
    "Outgoing": "qmq.client.interceptors:Outgoing",
    "Producer": "qmq.client.producing.producer:Producer",
    "QmqError": "qmq.errors:QmqError",
    "Receipt": "qmq.client.producing.receipts:Receipt",
    "Receipts": "qmq.client.producing.receipts:Receipts",
    "Reject": "qmq.client.listening.context:Reject",
    "Retry": "qmq.client.listening.context:Retry",
    "SettleReport": "qmq.client.connection.pool:SettleReport",
    "SubjectConfig": "qmq.model:SubjectConfig",
    "SubjectFlush": "qmq.model:SubjectFlush",
    "Ticket": "qmq.client.producing.receipts:Ticket",
    "Tls": "qmq.security.tls:Tls",
    "TraceContext": "qmq.client.tracing:TraceContext",
    "blocking": "qmq.blocking",
    "errors": "qmq.errors",
    "payload": "qmq.client.payloads",
    "run": "qmq.process.event_loop:run",
}
"""Where each public name is defined: "module:name", or a module."""


if not TYPE_CHECKING:  # else type checkers would accept every name

    def __getattr__(name: str) -> Any:
        if name not in _PLACES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module, _, attribute = _PLACES[name].partition(":")
        found = import_module(module)
        globals()[name] = getattr(found, attribute) if attribute else found
        return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def connect(
    addresses: str | Sequence[str] | None = None,
    *,
    create_subjects: bool = True,
    interceptors: Iterable[Interceptor] = (),
    name: str | None = None,
    state_dir: StateDir = None,
    tls: Tls | None = None,
    token: Token = None,
    delivery_timeout: timedelta | None = None,
) -> Client:
    """A client of the cluster whose metaservers are at `addresses` ("host:port"; several are
    separated by commas, or given as a list). The default is QMQ_SERVER, then the context that
    QMQ_CONTEXT names, then "localhost:20880".

    The client connects when it is first used. With `create_subjects` the first message to an
    unknown subject creates it, if the metaserver allows it. `interceptors` see every message sent
    and handled, the first one outermost (docs/TRACING.md). `name` identifies the client to
    operators (`qmq pause client`); the default is made of host and process. `state_dir` is a
    folder. The client keeps there, for its next start, the acknowledgements that no broker could
    receive. The default is QMQ_STATE_DIR, then ~/.local/state/qmq; False keeps none
    (docs/DELIVERY.md). `tls` says where certificates are, if the cluster uses TLS; the default is
    QMQ_TLS_CA, QMQ_TLS_CERT and QMQ_TLS_KEY (docs/SECURITY.md). `token` says who this client is, if
    its certificate does not: the token, the `Path` of a file that holds it, or a function that
    returns the current one. The default is QMQ_TOKEN_FILE, then QMQ_TOKEN (docs/ACCESS.md).
    `delivery_timeout` is how long a message may take to be stored before its sender gets
    DeadlineExceeded; the default is two minutes. Raises InvalidArgument for a malformed address,
    InvalidName.
    """
    from qmq.blocking import beside
    from qmq.client.client import Client
    from qmq.client.connection.connection import timing_with
    from qmq.rpc.tls_network import network_of
    from qmq.security.contexts import default_server

    return Client(
        addresses or default_server(),
        create_subjects=create_subjects,
        interceptors=interceptors,
        name=name,
        state_dir=state_dir,
        network=network_of(tls, token),
        for_threads=beside,
        timing=timing_with(delivery_timeout),
    )
