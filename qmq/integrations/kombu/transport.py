"""The connection of kombu: a link to the cluster, and its channels."""

from __future__ import annotations

import time
from queue import Empty
from typing import Any, Final

from kombu.transport import virtual

import qmq
from qmq.integrations.cluster_link import ClusterLink
from qmq.integrations.kombu.channel import Channel
from qmq.integrations.kombu.stream_queues import StreamQueues

DEFAULT_PORT: Final = 20880
CONNECT_S: Final = 5.0


class Transport(virtual.Transport):
    """See `qmq.integrations.kombu`. The password of the URL is the client's token.

    Transport options:

    retention         a timedelta: how long new queues keep messages, whether consumed or not; default: the brokers'
    group             one consumer group for all queues; default: one for each queue, of its name
    prefix            of every subject
    lease             a timedelta after which the tasks of a silent worker go to others; default 30 s
    priority_steps    such as [0, 3, 6, 9]: a subject for each; default: no priorities
    stream_exchanges  patterns of exchanges whose messages are for the queues that are bound at the moment, whichever process bound them, as
                      fan-outs' are; default: those of Celery's events and remote control
    tls               a `qmq.Tls`
    """

    Channel = Channel
    default_port = DEFAULT_PORT  # type: ignore[assignment]
    driver_type = "qmq"
    driver_name = "qmq"
    implements = virtual.Transport.implements.extend(
        asynchronous=True, exchange_type=frozenset(["direct", "topic", "fanout"]), heartbeats=False
    )
    connection_errors = (*virtual.Transport.connection_errors, qmq.errors.Unavailable, qmq.errors.ClientClosed)  # type: ignore[assignment]
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
        """Connect. Raises NotConnected, NotAuthenticated."""
        params: Any = self.client
        options = params.transport_options
        address = f"{params.hostname or 'localhost'}:{params.port or self.default_port}"
        retention = options.get("retention")

        def connect() -> qmq.Client:
            return qmq.connect(address, state_dir=False, tls=options.get("tls"), token=params.password or None)

        self._link = ClusterLink(
            connect, params.connect_timeout or CONNECT_S, None if retention is None else int(retention.total_seconds() * 1000)
        )
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
        """Deliver one message for each reader whose channel takes one now. Returns whether there was any."""
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
