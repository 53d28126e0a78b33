"""A gateway that listens: its calls, and what runs beside them. It keeps nothing on disk, so run as many as needed."""

from __future__ import annotations

import asyncio
import os
from typing import Final

import grpc

from qmq.client.client import Client
from qmq.clock import Clock, SystemClock
from qmq.file_descriptors import connections_max, limit
from qmq.gateway.client_sessions import SESSIONS_MAX, ClientSessions
from qmq.gateway.gateway_config import GatewayConfig
from qmq.gateway.group_readers import GroupReaders, HandedOut
from qmq.gateway.group_receiving import GroupReceiving
from qmq.gateway.half_messages import CheckPlan
from qmq.gateway.invisible_messages import GATEWAY_ID_BYTES, InvisibleMessages
from qmq.gateway.messaging_service import MessagingService
from qmq.gateway.topic_catalog import TopicCatalog
from qmq.gateway.topic_sending import TopicSending
from qmq.gateway.topic_transactions import TopicTransactions
from qmq.network import NETWORK, Network
from qmq.proto.rocketmq import service_pb2_grpc
from qmq.rpc_server import RpcBounds, rpc_server

STOP_GRACE_S: Final = 1.0
BOUNDS: Final = RpcBounds(connections_max=SESSIONS_MAX, calls_max=SESSIONS_MAX)


class GatewayServer:
    """`start`, then `stop`. The client is its owner's, who closes it after `stop`."""

    def __init__(self, client: Client, config: GatewayConfig, *, clock: Clock | None = None, network: Network = NETWORK) -> None:
        clock = clock or SystemClock()
        self._config, self._network = config, network
        catalog = TopicCatalog(lambda: client.metadata, clock.monotonic_ms, creates=config.creates_topics, all_ordered=config.all_ordered)
        self.sessions = ClientSessions(clock.monotonic_ms)
        self.invisible = InvisibleMessages[HandedOut](os.urandom(GATEWAY_ID_BYTES), os.urandom)
        self._readers = GroupReaders(client, clock.monotonic_ms)
        self._receiving = GroupReceiving(self._readers, catalog, self.invisible, self.sessions, config, clock)
        sending = TopicSending(client, catalog, config.body_bytes_max, clock)
        self._transactions = TopicTransactions(client, self.sessions, clock, CheckPlan(config.transactions))
        self._service = MessagingService(client, catalog, sending, self._receiving, self._transactions, self.sessions, config)
        self._server: grpc.aio.Server | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.port = config.port

    @property
    def address(self) -> str:
        return f"{self._config.host}:{self.port}"

    async def start(self) -> None:
        """Serve. Raises OSError if the port is taken."""
        bounds = RpcBounds(connections_max(BOUNDS.connections_max, limit()), BOUNDS.calls_max)
        self._server = rpc_server(bounds)
        service_pb2_grpc.add_MessagingServiceServicer_to_server(self._service, self._server)
        self.port = self._network.bind(self._server, self._config.host, self._config.port)
        await self._server.start()
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._sweep()), loop.create_task(self._check_transactions())]

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self._config.sweep_ms / 1000)
            self._receiving.sweep()
            self._readers.tidy()

    async def _check_transactions(self) -> None:
        while True:
            await asyncio.sleep(self._config.transactions.look_ms / 1000)
            await self._transactions.look()

    async def stop(self) -> None:
        """Answer what is under way for a moment, then give back what is in clients' hands, and leave the groups."""
        if self._server is not None:
            await self._server.stop(STOP_GRACE_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._receiving.give_back_all()
        await self._readers.close()
