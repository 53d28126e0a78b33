"""The gateway for RocketMQ's clients of `qmq dev`, in the same process as its broker.

The node sees the gateway as an ordinary client without a token, so the access rules apply to it.
One port serves clients with TLS (the default of the Java client) and without. DATA/gateway/ca.pem
is the authority of its certificate.
"""

from __future__ import annotations

from pathlib import Path

from qmq.client.client import Client
from qmq.gateway.config import GatewayConfig
from qmq.gateway.server import GatewayServer, tls_with_own_authority
from qmq.process.event_loop import Clock
from qmq.rpc.network import Network


class DevGateway:
    """Call `start`, then `stop`. `server` is the node's own address, `folder` the place of the
    gateway's authority. On a network with TLS, the gateway's port uses the same TLS as the others.
    """

    def __init__(
        self, server: str, folder: Path, host: str, port: int, clock: Clock, network: Network
    ) -> None:
        self._client = Client(server, clock=clock, network=network, state_dir=False)
        tls = (
            tls_with_own_authority(folder, host)
            if network.is_machine and network.credentials is None
            else None
        )
        config = GatewayConfig(host, port, takes_plaintext=tls is not None)
        self.server = GatewayServer(self._client, config, clock=clock, network=tls or network)
        """The gateway, as `qmq gateway` runs it."""

    @property
    def address(self) -> str:
        """The address for RocketMQ's clients."""
        return self.server.address

    @property
    def port(self) -> int:
        return self.server.port

    async def start(self) -> None:
        """Serve clients. Raises OSError if the port is taken."""
        await self.server.start()

    async def stop(self) -> None:
        """Release the clients' messages, and leave the groups."""
        await self.server.stop()
        await self._client.close()
