"""A console that is loaded when a browser first connects to it. Its libraries take a fifth of the
memory of an idle node, and few nodes of `qmq dev` are looked at.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from qmq.console.config import ConsoleConfig

if TYPE_CHECKING:
    from qmq.console.app import ConsoleServer

log = logging.getLogger("qmq.console")

PACKAGES: Final = ("jinja2", "jwt", "starlette", "uvicorn")


def is_installed() -> bool:
    """Whether the console can be loaded (`pip install qmq[console]`)."""
    return all(find_spec(each) is not None for each in PACKAGES)


class ConsoleOnDemand:
    """Listens between `start` and `stop`, on an IPv4 address."""

    def __init__(self, config: ConsoleConfig) -> None:
        self._config = config
        self._key = secrets.token_urlsafe(24)
        self._listening: socket.socket | None = None
        self._loading: asyncio.Task[None] | None = None
        self._console: ConsoleServer | None = None

    def start(self) -> str:
        """Listen, and return the address for browsers. Raises OSError if the port is taken."""
        listening = socket.create_server((self._config.host, self._config.port), backlog=1024)
        listening.setblocking(False)
        self._listening = listening
        asyncio.get_running_loop().add_reader(listening, self._connected, listening)
        return self._config.url(listening.getsockname()[1], self._key)

    def _connected(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(listening)
        self._loading = loop.create_task(self._load(listening))

    async def _load(self, listening: socket.socket) -> None:
        try:
            # In a thread, so that the node serves its clients meanwhile.
            await asyncio.to_thread(import_module, "qmq.console.app")
            from qmq.console.app import ConsoleServer

            self._console = ConsoleServer(self._config, key=self._key)
            await self._console.start(listening)
        except Exception:
            log.exception("the console cannot be loaded")
            self._console = None
            listening.close()

    async def stop(self) -> None:
        """End, as `ConsoleServer.stop`. Does nothing before `start`."""
        if self._listening is None:
            return
        if self._loading is None:
            asyncio.get_running_loop().remove_reader(self._listening)
        else:
            self._loading.cancel()
            await asyncio.gather(self._loading, return_exceptions=True)
        if self._console is not None:
            await self._console.stop()
        self._listening.close()
