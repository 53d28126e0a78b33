"""What a command asks metaservers with. Commands that neither send nor consume use it in place of a
`qmq.Client`: producers and consumers take longer to import than the answer takes.
"""

from __future__ import annotations

from types import TracebackType

from qmq.client.metadata.access import AccessClient
from qmq.client.metadata.service import MetadataClient
from qmq.process.address import parse_addresses
from qmq.rpc.tls_network import network_of
from qmq.security.contexts import default_server


class Administration:
    """Use it with `async with`. `metadata` and `access` are those of a `qmq.Client`."""

    def __init__(self, server: str) -> None:
        """Raises InvalidArgument, as `qmq.connect`."""
        addresses = parse_addresses(server or default_server())
        self.metadata = MetadataClient(addresses, network_of())
        self.access = AccessClient(self.metadata)

    async def __aenter__(self) -> Administration:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.metadata.close()
