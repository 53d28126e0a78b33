"""The gateway's server with its background tasks, TLS at its port, and its metrics
(docs/reference/metrics.md has the table). A gateway stores nothing on disk, so you can run as many
as needed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import grpc

from qmq.client.client import Client
from qmq.errors import QmqError
from qmq.gateway.clients import SESSIONS_MAX, GatewayCredentials, claimed_access_key
from qmq.gateway.config import GatewayConfig
from qmq.gateway.parts import GatewayIdentities, GatewayParts
from qmq.gateway.service import MessagingService, headers_of
from qmq.gateway.status import CallCounters, Refused
from qmq.metrics.figures import COUNTER, GAUGE, Figure, Reading, one
from qmq.process.event_loop import Clock, SystemClock
from qmq.proto.rocketmq import service_pb2_grpc
from qmq.rpc.channel import abort
from qmq.rpc.network import NETWORK, Network, RpcPort
from qmq.rpc.server import (
    RequestBodies,
    RpcBounds,
    RpcListener,
    add_unregistered,
    late_stream,
    late_unary,
    rpc_server,
)
from qmq.rpc.tls_network import TlsNetwork
from qmq.security.audit import AuditLog
from qmq.security.principal import ANONYMOUS, RpcPeers, peer_address
from qmq.security.tls import Credentials, ExpiryWarning, Tls
from qmq.text import joined

log = logging.getLogger("qmq.gateway")

STOP_GRACE_S: Final = 1.0
LEAVE_S: Final = 4.0
"""How long a gateway that stops tries to tell the cluster. Twice that and the grace are less than
the 10 s that Docker gives a process.
"""
BOUNDS: Final = RpcBounds(connections_max=SESSIONS_MAX, calls_max=SESSIONS_MAX)


class GatewayServer:
    """`start`, then `stop`.

    Without `credentials` all clients are served with `client`; the caller closes it after `stop`.
    With `credentials` each access key is served with its own client, which `connect` makes from its
    token. `network` is for the gateway's port. `audit` records failed TLS handshakes, and calls
    whose signature is missing or wrong.
    """

    def __init__(
        self,
        client: Client,
        config: GatewayConfig,
        *,
        clock: Clock | None = None,
        network: Network = NETWORK,
        credentials: GatewayCredentials | None = None,
        connect: Callable[[str], Client] | None = None,
        audit: AuditLog | None = None,
    ) -> None:
        clock = clock or SystemClock()
        self._config, self._network, self._credentials = config, network, credentials
        self.parts = GatewayParts(client, config, clock)
        """Of whom no credentials name."""
        self._identities = GatewayIdentities(connect or (lambda _: client), config, clock)
        self._service = MessagingService(self._parts_for, config)
        self._audit = audit or AuditLog()
        self._peers: RpcPeers = {}
        self._served: RpcPort | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._looks: dict[GatewayParts, asyncio.Task[None]] = {}
        """The looks for transactions that are under way."""
        self.port = config.port

    @property
    def counters(self) -> CallCounters:
        """How calls were answered."""
        return self._service.counters

    @property
    def all_parts(self) -> list[GatewayParts]:
        """The parts that serve each identity that called."""
        return [self.parts, *self._identities.all]

    @property
    def address(self) -> str:
        return joined(self._config.host, self.port)

    def _parts_for(self, call: str, headers: Mapping[str, str], peer: str) -> GatewayParts:
        if self._credentials is None:
            return self.parts
        try:
            keys = self._credentials.authenticate(headers)
        except Refused as failure:
            self._audit.refuse(
                principal=str(ANONYMOUS),
                how="none",
                address=peer_address(peer, self._peers),
                action=call,
                on=claimed_access_key(headers),
                error=failure.message,
            )
            raise
        return self._identities.parts_of(keys)

    def _is_signed(self, headers: Mapping[str, str]) -> bool | None:
        """Whether a call has the signature that it needs; None if this gateway needs none."""
        if self._credentials is None:
            return None
        try:
            self._credentials.authenticate(headers)
        except Refused:
            return False
        return True

    async def start(self) -> None:
        """Serve. Raises OSError if the port is taken."""
        bounds = BOUNDS.fitting(self._network.rpc_descriptors(self._config.host))
        shares_port, takes_plaintext = self._config.shares_port, self._config.takes_plaintext
        door = RpcListener(
            bounds,
            self._refused,
            self._peers,
            shares_port=shares_port,
            takes_plaintext=takes_plaintext,
        )
        server = rpc_server(door, (_SignatureFirst(self._is_signed, self._peers),))
        add_unregistered(
            service_pb2_grpc.add_MessagingServiceServicer_to_server, self._service, server
        )
        self._served = await self._network.serve(server, self._config.host, self._config.port, door)
        self.port = self._served.port
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self._sweep()),
            loop.create_task(self._check_transactions()),
        ]

    def _refused(self, address: str, why: str) -> None:
        """Record that TLS did not accept a peer."""
        self._audit.refuse(
            principal=str(ANONYMOUS), how="none", address=address, action="TLS handshake", on=why
        )

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self._config.sweep_ms / 1000)
            for each in self.all_parts:
                try:
                    each.sweep()
                except Exception:
                    log.exception("messages whose invisible time is over could not be given back")

    async def _check_transactions(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._config.transactions.look_ms / 1000)
            # Each identity by itself: one with many transactions, or with producers that do not
            # read, delays no other.
            for each in self.all_parts:
                if each not in self._looks:
                    self._looks[each] = loop.create_task(each.transactions.check_due())
                    self._looks[each].add_done_callback(partial(self._looked, each))

    def _looked(self, parts: GatewayParts, look: asyncio.Task[None]) -> None:
        del self._looks[parts]
        if not look.cancelled() and look.exception() is not None:
            log.error(
                "transactions without a decision could not be searched", exc_info=look.exception()
            )

    async def stop(self) -> None:
        """Answer running calls for a moment, then return the messages that clients hold, and leave
        the groups. A cluster that cannot be reached is not waited for.
        """
        if self._served is not None:
            await self._served.stop(STOP_GRACE_S)
        tasks = [*self._tasks, *self._looks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await leave(self.parts.close(), self._identities.close())


class _SignatureFirst(grpc.aio.ServerInterceptor):
    """Reads the request of a call after its signature was checked. Of a call without the signature
    nothing is read: its method, which refuses it by its headers, gets None.
    """

    def __init__(
        self, is_signed: Callable[[Mapping[str, str]], bool | None], peers: RpcPeers
    ) -> None:
        self._is_signed, self._peers = is_signed, peers
        self._bodies = RequestBodies()

    async def _request(self, context: Any) -> Any:
        is_signed = self._is_signed(headers_of(context))
        if is_signed is False:
            return None
        address = peer_address(context.peer(), self._peers)
        try:
            return await self._bodies.read(context, "" if is_signed else address)
        except QmqError as failure:
            await abort(context, failure, "")

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming:
            return handler

        async def unary(context: Any) -> Any:
            return await handler.unary_unary(await self._request(context), context)

        async def stream(context: Any) -> AsyncIterator[Any]:
            async for each in handler.unary_stream(await self._request(context), context):
                yield each

        return (
            late_stream(handler, stream)
            if handler.response_streaming
            else late_unary(handler, unary)
        )


async def leave(*closing: Awaitable[None]) -> None:
    """Close the connections to the cluster, within `LEAVE_S` seconds.

    Messages that are then still held are delivered again when their lease ends, and clients repeat
    sends without an answer.
    """
    try:
        async with asyncio.timeout(LEAVE_S):
            await asyncio.gather(*closing)
    except TimeoutError:
        log.warning(
            (
                "the cluster did not answer within %g s: what clients hold is received again "
                "when its lease ends"
            ),
            LEAVE_S,
        )


def tls_of(cert: Path, key: Path) -> Network:
    """A network whose ports use the certificate. Raises InvalidArgument for unusable files."""
    # Clients show no certificates, so any certificate can serve as their authority: here it is the
    # gateway's own.
    files = Credentials(Tls(cert, cert, key, requires_clients=False))
    return TlsNetwork(files, ExpiryWarning(files).look)


def tls_with_own_authority(folder: Path, host: str) -> Network | None:
    """The same with a new certificate, signed by an authority in the folder (`ca.pem`). None
    without `cryptography`.
    """
    try:
        from qmq.security.certificates import create_authority, has_authority, issue
    except ImportError:
        return None
    if not has_authority(folder):
        create_authority(folder)
    made = issue(folder, "gateway", "node", sorted({host, "localhost", "127.0.0.1"}))
    return tls_of(made.cert, made.key)


CALLS: Final = Figure(
    "qmq_gateway_calls_total",
    COUNTER,
    ("method", "language", "code"),
    "Calls of RocketMQ's clients, by the code of the answer.",
)
CLIENTS: Final = Figure(
    "qmq_gateway_clients",
    GAUGE,
    (),
    "RocketMQ's clients that sent a call in the last two minutes, or have a stream.",
)
INVISIBLE: Final = Figure(
    "qmq_gateway_invisible_messages",
    GAUGE,
    (),
    "Messages that clients received and have not acknowledged.",
)


class GatewaySource:
    """Reports the metrics of one process's gateway."""

    figures: Final = (CALLS, CLIENTS, INVISIBLE)

    def __init__(self, server: GatewayServer) -> None:
        self._server = server

    def read(self) -> Iterator[Reading | None]:
        yield Reading(
            CALLS,
            [
                ((each.call, each.language, each.code), count)
                for each, count in self._server.counters.counts.items()
            ],
        )
        parts = self._server.all_parts
        yield one(CLIENTS, sum(each.sessions.alive for each in parts))
        yield one(INVISIBLE, sum(len(each.invisible) for each in parts))
