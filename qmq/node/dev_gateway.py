"""The RocketMQ gateway of `qmq dev`. The node sees it as an ordinary client without a token, so the access rules apply to it.

It serves clients with TLS, which Java's expects, and without it at one port. DATA/gateway/ca.pem is the authority of its certificate.
"""

from __future__ import annotations

from pathlib import Path

from qmq.client.client import Client
from qmq.clock import Clock
from qmq.gateway.gateway_config import GatewayConfig
from qmq.gateway.gateway_network import tls_with_own_authority
from qmq.gateway.gateway_server import GatewayServer
from qmq.network import Network


class DevGateway:
    """`start`, then `stop`. `server` is the node's own address, `folder` where the gateway keeps its authority. On a network that has TLS
    already, the gateway's port is like the others.
    """

    def __init__(self, server: str, folder: Path, host: str, port: int, clock: Clock, network: Network) -> None:
        self._client = Client(server, clock=clock, network=network, state_dir=False)
        tls = tls_with_own_authority(folder, host) if network.is_machine and network.credentials is None else None
        config = GatewayConfig(host, port, takes_plaintext=tls is not None)
        self._server = GatewayServer(self._client, config, clock=clock, network=tls or network)

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
