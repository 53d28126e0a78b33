"""A TLS connection that one thread sends on while another one receives.

Python's `ssl.SSLSocket` (before 3.13) must not be used by two threads at once, and a thread that waits in `recv` would keep the other one
from sending. So the socket does not block: each call of OpenSSL happens under a lock, and whoever has to wait does so outside of it.
"""

from __future__ import annotations

import select
import socket
import ssl
import threading
from typing import Final

from qmq.security.tls import Credentials, Tls, tls_failed

_WAIT_S: Final = 0.05
"""How long a thread waits before it tries again: what it waits for may have been read by the other thread's call of OpenSSL."""


class TlsSocket:
    """As much of a socket as a connection to a broker needs. `settimeout` is how long a call may wait."""

    def __init__(self, found: ssl.SSLSocket) -> None:
        self._timeout_s = found.gettimeout() or 60.0
        self._socket = found
        self._lock = threading.Lock()
        found.setblocking(False)

    def settimeout(self, seconds: float) -> None:
        """Raises TimeoutError from then on, where a call waits for longer."""
        self._timeout_s = seconds

    def sendmsg(self, buffers: list[bytes | memoryview]) -> int:
        """Send all of it; how much that was. Raises OSError."""
        whole = memoryview(b"".join(buffers))
        sent, waited_s = 0, 0.0
        while sent < len(whole):
            try:
                with self._lock:
                    sent += self._socket.send(whole[sent:])
                waited_s = 0.0
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as wish:
                waited_s = self._wait(waited_s, wish)
        return sent

    def recv_into(self, view: memoryview) -> int:
        """What is there, at least a byte; 0 at the end. Raises OSError."""
        waited_s = 0.0
        while True:
            try:
                with self._lock:
                    return self._socket.recv_into(view)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as wish:
                waited_s = self._wait(waited_s, wish)

    def _wait(self, waited_s: float, wish: ssl.SSLError) -> float:
        if waited_s >= self._timeout_s:
            raise TimeoutError("timed out")
        poll = select.poll()  # `select.select` takes no descriptor above 1,023, and a Spark worker may have many files open
        poll.register(self._socket, select.POLLIN if isinstance(wish, ssl.SSLWantReadError) else select.POLLOUT)
        return waited_s if poll.poll(_WAIT_S * 1000) else waited_s + _WAIT_S

    def shutdown(self, how: int) -> None:
        """Wake up whoever waits. Raises OSError."""
        socket.socket.shutdown(self._socket, how)

    def close(self) -> None:
        with self._lock:
            self._socket.close()


def secured(found: socket.socket, host: str, address: str) -> TlsSocket | socket.socket:
    """With TLS, if the environment says so. Raises TlsFailed, InvalidArgument."""
    tls = Tls.from_environment()
    if tls is None:
        return found
    try:
        return TlsSocket(Credentials(tls).client_context().wrap_socket(found, server_hostname=host))
    except ssl.SSLError as cause:
        raise tls_failed(address, cause) from cause
