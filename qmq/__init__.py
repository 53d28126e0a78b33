"""QMQ: a distributed message broker. Applications import everything from this module.

    async with qmq.connect("localhost:20880") as mq:
        await mq.send("flight.departed", body, key="N14228", tags=["UA"])
        await mq.send("flight.reminder", body, delay=timedelta(hours=1))
        async for message in mq.consumer("flight.departed", group="ops"):
            ...

`qmq.blocking.connect` is the same for scripts without asyncio.

Each name is imported at its first use. Python runs this file before any module of `qmq`, also when a package below the client, such as
`qmq_ordering`, imports `qmq.errors`.
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
    from qmq.security.tls import Tls

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
    "BatchReceipt": "qmq.client.receipts:BatchReceipt",
    "BrowsedMessage": "qmq.client.browse_selection:BrowsedMessage",
    "Client": "qmq.client.client:Client",
    "Consumer": "qmq.client.consumer:Consumer",
    "Context": "qmq.client.listening.context:Context",
    "DelayedId": "qmq.model:DelayedId",
    "DelayedMessage": "qmq.client.delayed_message:DelayedMessage",
    "DelayedProducer": "qmq.client.delayed_producer:DelayedProducer",
    "Fencing": "qmq.model:Fencing",
    "Interceptor": "qmq.client.interceptors:Interceptor",
    "Message": "qmq.client.message:Message",
    "MessageId": "qmq.model:MessageId",
    "Messages": "qmq.client.message:Messages",
    "Order": "qmq.model:Order",
    "OrderedConsumer": "qmq.client.ordered.ordered_consumer:OrderedConsumer",
    "OrderedMessage": "qmq.client.ordered.ordered_message:OrderedMessage",
    "OrderedProducer": "qmq.client.ordered.ordered_producer:OrderedProducer",
    "Outcome": "qmq.errors:Outcome",
    "Outgoing": "qmq.client.interceptors:Outgoing",
    "Producer": "qmq.client.producer:Producer",
    "QmqError": "qmq.errors:QmqError",
    "Receipt": "qmq.client.receipts:Receipt",
    "Receipts": "qmq.client.receipts:Receipts",
    "Reject": "qmq.client.listening.outcomes:Reject",
    "Retry": "qmq.client.listening.outcomes:Retry",
    "SettleReport": "qmq.client.settle_report:SettleReport",
    "SubjectConfig": "qmq.model:SubjectConfig",
    "SubjectFlush": "qmq.model:SubjectFlush",
    "Ticket": "qmq.client.receipts:Ticket",
    "Tls": "qmq.security.tls:Tls",
    "TraceContext": "qmq.client.tracing:TraceContext",
    "blocking": "qmq.blocking",
    "errors": "qmq.errors",
    "payload": "qmq.client.payloads",
    "run": "qmq.event_loop:run",
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
    """A client of the cluster whose metaservers are at `addresses` ("host:port"; several are separated by commas, or given as a list). The
    default is QMQ_SERVER, then the context that QMQ_CONTEXT names, then "localhost:20880".

    The client connects when it is first used. With `create_subjects` the first message to an unknown subject creates it, if the metaserver
    allows it. `interceptors` see every message sent and handled, the first one outermost (docs/TRACING.md). `name` identifies the client to
    operators (`qmq pause client`); the default is made of host and process. `state_dir` is a folder. The client keeps there, for its next
    start, the acknowledgements that no broker could receive. The default is QMQ_STATE_DIR, then ~/.local/state/qmq; False keeps none
    (docs/DELIVERY.md). `tls` says where certificates are, if the cluster uses TLS; the default is QMQ_TLS_CA, QMQ_TLS_CERT and QMQ_TLS_KEY
    (docs/SECURITY.md). `token` says who this client is, if its certificate does not: the token, the `Path` of a file that holds it, or a
    function that returns the current one. The default is QMQ_TOKEN_FILE, then QMQ_TOKEN (docs/ACCESS.md). `delivery_timeout` is how long
    a message may take to be stored before its sender gets DeadlineExceeded; the default is two minutes. Raises InvalidArgument for a
    malformed address, InvalidName.
    """
    from qmq.blocking import beside
    from qmq.client.client import Client
    from qmq.client.connection import timing_with
    from qmq.security.contexts import default_server
    from qmq.security.tls_network import network_of

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
