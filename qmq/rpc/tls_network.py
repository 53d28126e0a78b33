"""The machine's network with TLS: every TCP connection is encrypted, and the server's name is
checked. Sockets in the file system are without TLS.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from qmq.process.address import UNIX, is_local, parse
from qmq.rpc.network import (
    HANDSHAKE_S,
    NETWORK,
    Factory,
    Network,
    Refused,
    RpcPort,
    ServerListener,
    TokenNetwork,
    ignored,
    open_tcp,
)
from qmq.rpc.server_name import NameSource
from qmq.security.principal import TokenSource, no_token
from qmq.security.tls import Credentials, Tls
from qmq.security.tokens import Token, token_source

if TYPE_CHECKING:
    import grpc

    from qmq.rpc.server import RpcListener

RELAYED_DESCRIPTORS: Final = 3
"""The descriptors of a connection to a gRPC server through a relay (qmq/rpc/relay.py): the peer's,
and both ends of a socket.
"""


class ServerNetwork(Network):
    """The network of a server without TLS. Control ports that other machines reach bound how many
    connections begin in a second.
    """

    def rpc_descriptors(self, host: str) -> int:
        return 1 if is_local(host) else RELAYED_DESCRIPTORS

    async def serve(
        self, server: grpc.aio.Server, host: str, port: int, door: RpcListener
    ) -> RpcPort:
        if is_local(host):
            return await super().serve(server, host, port, door)
        from qmq.rpc.relay import relay

        return await relay(server, host, port, door)


class TlsNetwork(Network):
    """`credentials` are for all ports and all connections. `on_look` is called whenever a listener
    looks at the certificates.
    """

    def rpc_descriptors(self, host: str) -> int:
        return 1 if host.startswith(UNIX) else RELAYED_DESCRIPTORS

    def __init__(
        self, credentials: Credentials, on_look: Callable[[], None] = lambda: None
    ) -> None:
        self.credentials: Credentials = credentials
        self._on_look = on_look

    def with_optional_certificates(self) -> TlsNetwork:
        return TlsNetwork(
            Credentials(replace(self.credentials.files, requires_clients=False)), self._on_look
        )

    async def listen(
        self, host: str, port: int, factory: Factory, refused: Refused = ignored
    ) -> ServerListener:
        if host.startswith(UNIX):
            return await super().listen(host, port, factory, refused)
        from qmq.rpc.tls_listener import TlsListener, listening_at  # clients do not listen

        listening = await asyncio.get_running_loop().run_in_executor(None, listening_at, host, port)
        try:
            return TlsListener(listening, factory, self.credentials, self._on_look, refused)
        except BaseException:
            listening.close()
            raise

    async def connect(self, address: str, factory: Factory) -> None:
        place = parse(address)
        if place.path:
            await super().connect(address, factory)
            return
        await open_tcp(place, factory, self.credentials.client_context(), HANDSHAKE_S)

    def channel(
        self, address: str, server: NameSource, token: TokenSource = no_token
    ) -> grpc.aio.Channel:
        from qmq.rpc.channel import RpcChannel

        credentials = None if address.startswith(UNIX) else self.credentials
        return RpcChannel(address, server, credentials=credentials, token=token)

    async def serve(
        self, server: grpc.aio.Server, host: str, port: int, door: RpcListener
    ) -> RpcPort:
        if host.startswith(UNIX):
            return await super().serve(server, host, port, door)
        from qmq.rpc.relay import relay

        return await relay(server, host, port, door, self.credentials, self._on_look)


def network_of(
    tls: Tls | None = None, token: Token = None, environment: Mapping[str, str] | None = None
) -> Network:
    """A network with the given TLS settings and token, or those of the environment (default: this
    process's). Raises InvalidArgument.
    """
    tls, source = tls or Tls.from_environment(environment), token_source(token, environment)
    found = NETWORK if tls is None else TlsNetwork(Credentials(tls))
    return found if source is None else TokenNetwork(found, source)
