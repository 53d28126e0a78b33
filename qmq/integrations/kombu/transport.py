"""The connection of kombu: a link to the cluster, and its channels."""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping
from datetime import timedelta
from queue import Empty
from typing import Any, Final

from kombu.transport import virtual

import qmq
from qmq.errors import InvalidArgument
from qmq.integrations.cluster_link import ClusterLink
from qmq.integrations.kombu.arrivals import StreamQueues
from qmq.integrations.kombu.channel import Channel
from qmq.model import texts
from qmq.process.address import Address

DEFAULT_PORT: Final = 20880
CONNECT_S: Final = 5.0
DELIVERY_TIMEOUT: Final = timedelta(seconds=20)
OWN_OPTIONS: Final = (
    "retention",
    "group",
    "prefix",
    "lease",
    "priority_steps",
    "stream_exchanges",
    "tls",
    "delivery_timeout",
)
KOMBUS_OPTIONS: Final = (
    *(
        "max_retries",
        "interval_start",
        "interval_step",
        "interval_max",
        "connect_retries_timeout",
        "errback",
        "callback",
    ),
    *("confirm_publish", "body_encoding", "deadletter_queue"),
)
"""Transport options that kombu itself reads;
and `confirm_publish`, which every publish to QMQ is.
"""
PRIORITY_MAX: Final = 255


def _check(params: Any, options: Mapping[str, Any]) -> None:
    """Raises InvalidArgument for a setting that would be ignored."""
    unknown = sorted(set(options) - {*OWN_OPTIONS, *KOMBUS_OPTIONS})
    if unknown:
        raise InvalidArgument(
            f"QMQ has no transport options {', '.join(unknown)}: it has {', '.join(OWN_OPTIONS)}"
        )
    for name in ("group", "prefix"):
        if not isinstance(options.get(name, ""), str):
            raise InvalidArgument(f"the transport option {name} is a text, not {options[name]!r}")
    texts("the transport option stream_exchanges", options.get("stream_exchanges", ()))
    steps = options.get("priority_steps", ())
    if not isinstance(steps, list | tuple) or not all(
        type(each) is int and 0 <= each <= PRIORITY_MAX for each in steps
    ):
        raise InvalidArgument(
            "the transport option priority_steps is a list of numbers from 0 to "
            f"{PRIORITY_MAX}, not {steps!r}"
        )
    if options.get("confirm_publish", True) is not True:
        raise InvalidArgument(
            "QMQ confirms every publish: leave the transport option confirm_publish out"
        )
    for name in ("retention", "lease", "delivery_timeout"):
        found = options.get(name)
        if found is not None and (not isinstance(found, timedelta) or found <= timedelta(0)):
            raise InvalidArgument(
                f"the transport option {name} is a timedelta longer than 0, not {found!r}"
            )
    if params.virtual_host not in (None, "", "/"):
        raise InvalidArgument(
            f"a URL of QMQ has no path, and this one has {params.virtual_host!r}: use the "
            "transport option prefix"
        )
    if params.ssl:
        raise InvalidArgument(
            "QMQ does not read kombu's `ssl` (Celery's broker_use_ssl): use the transport "
            "option tls, a qmq.Tls"
        )
    if params.userid and not params.password:
        raise InvalidArgument(
            "a URL of QMQ has no user, and its password is the token: write qmq://:TOKEN@host"
        )


class Transport(virtual.Transport):
    """See `qmq.integrations.kombu`. The password of the URL is the client's token.

    Transport options:

    retention         a timedelta: how long new queues keep messages, whether consumed or not;
                      default: the brokers'
    group             one consumer group for all queues; default: one for each queue, of its name
    prefix            of every subject
    lease             a timedelta after which the tasks of a silent worker go to others; default
                      30 s
    priority_steps    such as [0, 3, 6, 9]: a subject for each; default: no priorities
    stream_exchanges  patterns of exchanges whose messages are for the queues that are bound at the
                      moment, whichever process bound them, as fan-outs' are; default: those of
                      Celery's events and remote control
    tls               a `qmq.Tls`
    delivery_timeout  a timedelta: how long a message may take to be stored before its sender gets
                      an error; default 20 s. Celery sends it again then, unless `retry=False`
    """

    Channel = Channel
    default_port = DEFAULT_PORT  # type: ignore[assignment]
    driver_type = "qmq"
    driver_name = "qmq"
    implements = virtual.Transport.implements.extend(
        asynchronous=True, exchange_type=frozenset(["direct", "topic", "fanout"]), heartbeats=False
    )
    connection_errors = (
        *virtual.Transport.connection_errors,
        qmq.errors.Unavailable,
        qmq.errors.ClientClosed,
    )  # type: ignore[assignment]
    channel_errors = (*virtual.Transport.channel_errors, qmq.errors.CallerError)  # type: ignore[assignment]

    _link: ClusterLink | None = None
    _hub: Any = None

    def __init__(self, client: Any, **kwargs: Any) -> None:
        super().__init__(client, **kwargs)
        self.streams = StreamQueues()

    @property
    def link(self) -> ClusterLink | None:
        """The link; None if there is none, or if this process inherited it."""
        return self._link if self._link is not None and self._link.is_usable else None

    def driver_version(self) -> str:
        return qmq.__version__

    def establish_connection(self) -> Transport:
        """Connect. Raises NotConnected, NotAuthenticated, and InvalidArgument for a setting that
        would be ignored.
        """
        params: Any = self.client
        options = params.transport_options
        _check(params, options)
        address = str(
            Address(params.hostname or "localhost", int(params.port or self.default_port))
        )
        retention = options.get("retention")

        def connect() -> qmq.Client:
            return qmq.connect(
                address,
                state_dir=False,
                tls=options.get("tls"),
                token=params.password or None,
                delivery_timeout=options.get("delivery_timeout", DELIVERY_TIMEOUT),
            )

        self._link = ClusterLink(
            connect,
            params.connect_timeout or CONNECT_S,
            None if retention is None else int(retention.total_seconds() * 1000),
        )
        # Programs drop connections and pools without closing them: a socket is closed with its last
        # reference, and so is a link, which has threads.
        weakref.finalize(self, self._link.abandon).atexit = False
        return super().establish_connection()  # type: ignore[no-any-return]

    def close_connection(self, connection: Any) -> None:
        """Give back what is unsettled, and disconnect."""
        link = self.link
        if link is None:
            return
        if self._hub is not None:
            self._hub.remove_reader(link.signal)
            self._hub = None
        try:
            super().close_connection(connection)
            self.streams.close(link)
        finally:
            self._link = None
            link.close()

    def verify_connection(self, connection: Any) -> bool:
        return self.link is not None

    def drain_events(self, connection: Any, timeout: float | None = None, **kwargs: Any) -> None:
        """Deliver received messages; wait for one if there is none. Raises TimeoutError."""
        link = self._open_link()
        until = None if timeout is None else time.monotonic() + timeout
        while not self._deliver_ready():
            if not link.wait(None if until is None else until - time.monotonic()):
                raise TimeoutError
            link.calm()

    def _open_link(self) -> ClusterLink:
        if self.link is None:
            raise qmq.errors.ClientClosed("the connection is closed")
        return self.link

    def _deliver_ready(self) -> bool:
        """Deliver one message for each reader whose channel takes one now. Returns whether there
        was any.
        """
        delivered = False
        for channel in list(self.channels):
            try:
                while not channel.closed:
                    channel.drain_events(callback=self._deliver)
                    delivered = True
            except Empty:
                continue
        return delivered

    def register_with_event_loop(self, connection: Any, loop: Any) -> None:
        """Have kombu's event loop deliver messages."""
        self._hub = loop
        loop.add_reader(self._open_link().signal, self.on_readable, connection, loop)
        self._open_link().wake()

    def on_readable(self, connection: Any, loop: Any) -> None:
        """Messages arrived, or verdicts made room for more."""
        self._open_link().calm()
        self._deliver_ready()
