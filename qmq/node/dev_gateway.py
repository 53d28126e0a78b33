"""The RocketMQ gateway of `qmq dev`. The node sees it as an ordinary client without a token, so the access rules apply to it."""

from __future__ import annotations

from qmq.client.client import Client
from qmq.clock import Clock
from qmq.gateway.gateway_config import GatewayConfig
from qmq.gateway.gateway_server import GatewayServer
from qmq.network import Network


class DevGateway:
    """`start`, then `stop`. `server` is the node's own address."""

    def __init__(self, server: str, host: str, port: int, clock: Clock, network: Network) -> None:
        self._client = Client(server, clock=clock, network=network, state_dir=False)
        self._server = GatewayServer(self._client, GatewayConfig(host, port), clock=clock, network=network)

    @property
    def address(self) -> str:
        """The address for RocketMQ's clients."""
        return self._server.address

    @property
    def port(self) -> int:
        return self._server.port

    async def start(self) -> None:
        """Serve. Raises OSError if the port is taken."""
        await self._server.start()

    async def stop(self) -> None:
        """Give back what clients hold, and leave the groups."""
        await self._server.stop()
        await self._client.close()
