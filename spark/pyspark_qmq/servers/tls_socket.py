"""A TLS connection on which one thread sends while another one receives.

Python's `ssl.SSLSocket` (before 3.13) must not be used by two threads at the same time, and a thread waiting in `recv` would block the
sender. So the socket is non-blocking: each OpenSSL call holds a lock, and threads wait without the lock.
"""

from __future__ import annotations

import select
import socket
import ssl
import threading
from typing import Final

from qmq.security.tls import Credentials, Tls, tls_failed

_WAIT_S: Final = 0.05
"""How long a thread waits before it tries again, because the other thread's OpenSSL call may have read the data it waits for."""


class TlsSocket:
    """The socket methods that a broker connection needs. `settimeout` sets how long a call may wait."""

    def __init__(self, found: ssl.SSLSocket) -> None:
        self._timeout_s = found.gettimeout() or 60.0
        self._socket = found
        self._lock = threading.Lock()
        found.setblocking(False)

    def settimeout(self, seconds: float) -> None:
        """Set the timeout; later calls that wait longer raise TimeoutError."""
        self._timeout_s = seconds

    def sendmsg(self, buffers: list[bytes | memoryview]) -> int:
        """Send all buffers and return the number of bytes. Raises OSError."""
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
        """Receive at least one byte; 0 at the end. Raises OSError."""
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
        poll = select.poll()  # Not `select.select`, which accepts no descriptor above 1,023: a Spark worker may have many open files.
        poll.register(self._socket, select.POLLIN if isinstance(wish, ssl.SSLWantReadError) else select.POLLOUT)
        return waited_s if poll.poll(_WAIT_S * 1000) else waited_s + _WAIT_S

    def shutdown(self, how: int) -> None:
        """Wake up waiting threads. Raises OSError."""
        socket.socket.shutdown(self._socket, how)

    def close(self) -> None:
        with self._lock:
            self._socket.close()


def secured(found: socket.socket, host: str, address: str) -> TlsSocket | socket.socket:
    """Add TLS if the environment configures it. Raises TlsFailed, InvalidArgument."""
    tls = Tls.from_environment()
    if tls is None:
        return found
    try:
        return TlsSocket(Credentials(tls).client_context().wrap_socket(found, server_hostname=host))
    except ssl.SSLError as cause:
        raise tls_failed(address, cause) from cause
