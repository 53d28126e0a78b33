"""A blocking connection to a broker's data port: sends frames and receives answers in the broker's
order.

Used by tasks, which have nothing else to do while they wait. Several requests may be in flight; the
caller matches answers by request id.

Rules:
* A payload is received into its own memory, which is never overwritten, so views into it stay
  valid.
* A connection that failed is closed for good. The outcome of its unanswered requests is unknown.

Over TLS, too, one thread may send while another one receives. Python's `ssl.SSLSocket` (before
3.13) must not be used by two threads at the same time, and a thread waiting in `recv` would block
the sender. So the socket is non-blocking: each OpenSSL call holds a lock, and threads wait without
the lock.
"""

from __future__ import annotations

import select
import socket
import ssl
import threading
from contextlib import suppress
from types import TracebackType
from typing import Final, NamedTuple, Self

import numpy as np

from qmq import limits
from qmq.columns.servers.metaservers import token_for
from qmq.errors import (
    DeadlineExceeded,
    InvalidArgument,
    NotConnected,
    Outcome,
    ProtocolViolation,
    QmqError,
)
from qmq.process.address import parse
from qmq.rpc.server_name import ANY_SERVER, ServerName
from qmq.security.tls import Credentials, Tls, ended_unheard, tls_failed
from qmq.wire import frame as frames
from qmq.wire import frame_payloads as wire
from qmq.wire.frame import HEADER, HEADER_BYTES, Frame, FrameKind

_WAIT_S: Final = 0.05
"""How long a thread waits before it tries again, because the other thread's OpenSSL call may have
read the data it waits for.
"""


class TlsSocket:
    """The socket methods that a broker connection needs.
    `settimeout` sets how long a call may wait.
    """

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
        # Not `select.select`, which accepts no descriptor above 1,023: a Spark worker may have many
        # open files.
        poll = select.poll()
        poll.register(
            self._socket,
            select.POLLIN if isinstance(wish, ssl.SSLWantReadError) else select.POLLOUT,
        )
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


_BUFFERS_MAX: Final = 512
"""Buffers of one system call."""
CONNECT_S: Final = 5.0
"""Timeout of connecting and of the handshake, each."""
ANSWER_S: Final = 15.0
"""Timeout of an expected answer. It detects machines that lost power,
which do not close connections.
"""


class Head(NamedTuple):
    """The head of an answer, before its payload."""

    kind: int
    request_id: int
    payload_bytes: int


class BlockingConnection:
    """An open connection, made by `connect`. Used by one thread, or by one thread that sends and
    another that receives.
    """

    def __init__(
        self, address: str, server: ServerName, found: socket.socket | TlsSocket, timeout_s: float
    ) -> None:
        self.address, self.server = address, server
        self.is_open = True
        self.answered_id = 0
        """The request id of the last answer, even if it was an error."""
        self.inflight_bytes_max = 0
        """The broker's limit of unanswered PRODUCE bytes per connection."""
        self._socket = found
        self._socket.settimeout(timeout_s)
        self._next_id = 1
        self._head = memoryview(bytearray(HEADER_BYTES))

    @classmethod
    def connect(
        cls,
        address: str,
        answer_s: float = ANSWER_S,
        *,
        client: str = "spark",
        server: ServerName = ANY_SERVER,
    ) -> BlockingConnection:
        """Connect to a server and say hello.
        Raises NotConnected, TlsFailed, WrongServer, ProtocolViolation.
        """
        try:
            place = parse(address)
            host = place.host.strip("[]")
            found = socket.create_connection((host, place.port), CONNECT_S)
            # The kernel sizes the receive buffer, because it adapts it to the network path.
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except (OSError, InvalidArgument) as cause:
            raise NotConnected(
                f"no broker answers at {address} ({cause or 'timed out'}): is it running?"
            ) from cause
        try:
            channel = cls(address, server, secured(found, host, address), CONNECT_S)
        except OSError as cause:
            found.close()
            raise NotConnected(
                f"no broker answers at {address} ({cause or 'timed out'}): is it running?"
            ) from cause
        except BaseException:
            found.close()
            raise
        try:
            channel._greet(client)
        except BaseException:
            channel.close()
            raise
        channel._socket.settimeout(answer_s)
        return channel

    def _greet(self, client: str) -> None:
        self.send(
            FrameKind.HELLO,
            wire.Hello(
                wire.PROTOCOL_VERSION, client, token_for(self.address), self.server.pack()
            ).pack(),
        )
        answer = self._first_answer()
        if answer.kind != FrameKind.WELCOME:
            raise ProtocolViolation(
                f"a frame of kind {answer.kind} is not an answer to HELLO: is {self.address} "
                "the data port of a broker?"
            )
        welcome = wire.Welcome.unpack(answer.payload)
        ServerName(replica=welcome.broker).require(
            self.server
        )  # release 0.2.0 does not check whom a HELLO means
        self.inflight_bytes_max = welcome.inflight_bytes_max

    def _first_answer(self) -> Frame:
        """Raises what `receive` raises; TlsFailed if the connection ends before the
        server says anything.
        """
        try:
            return self.receive()
        except NotConnected as failure:
            if isinstance(failure.__cause__, OSError):
                raise ended_unheard(self.address, Tls.from_environment()) from failure
            raise

    # --- out --------------------------------------------------------------------------------------

    def send(self, kind: int, *buffers: bytes | memoryview, deadline_ms: int = 0) -> int:
        """Send a request and return its id, which the answer will have.
        Raises NotConnected, DeadlineExceeded.
        """
        number = self._next_id
        self._next_id = number + 1 if number < 0xFFFF_FFFF else 1
        size = sum([len(each) for each in buffers])
        self._send_all([frames.header(kind, number, size, deadline_ms), *buffers])
        return number

    def _send_all(self, buffers: list[bytes | memoryview]) -> None:
        self._require_open()
        try:
            while buffers:
                sent = self._socket.sendmsg(buffers[:_BUFFERS_MAX])
                buffers = _behind(buffers, sent)
        except OSError as cause:
            self._fail(cause)

    # --- in ---------------------------------------------------------------------------------------

    def receive(self) -> Frame:
        """The next answer. Raises what `receive_head` raises."""
        head = self.receive_head()
        return Frame(head.kind, head.request_id, 0, self.receive_payload(head.payload_bytes))

    def receive_head(self) -> Head:
        """The head of the next answer. Call `receive_payload` next to receive its whole payload.

        Raises:
            the error that the broker answered with; `answered_id` is the request's.
            NotConnected: the connection ended.
            DeadlineExceeded: no answer in time. The connection is closed.
            ProtocolViolation: the received bytes are not an answer. The connection is closed.
        """
        self._require_open()
        self._fill(self._head)
        length, kind, flags, _, request_id, _ = HEADER.unpack(self._head)
        if not HEADER_BYTES <= length <= limits.ANSWER_BYTES_MAX or flags:
            self.close()
            raise ProtocolViolation(
                f"not a frame: length {length}, kind {kind}, flags {flags}; is "
                f"{self.address} the data port of a broker?"
            )
        self.answered_id = request_id
        if kind == FrameKind.ERROR:
            self._raise(request_id, self.receive_payload(length - HEADER_BYTES))
        return Head(kind, request_id, length - HEADER_BYTES)

    def receive_payload(self, size: int) -> memoryview:
        """Receive a number of bytes into new memory. Raises NotConnected, DeadlineExceeded."""
        payload = np.empty(size, np.uint8).data
        self._fill(payload)
        return payload

    def _raise(self, request_id: int, payload: memoryview) -> None:
        failure = wire.unpack_error(payload)
        if request_id == 0:
            self.close()
            raise NotConnected(
                f"{self.address} closed the connection: {failure.message}", outcome=Outcome.UNKNOWN
            ) from failure
        raise failure

    def _fill(self, view: memoryview) -> None:
        at = 0
        try:
            while at < len(view):
                count = self._socket.recv_into(view[at:])
                if not count:
                    raise ConnectionResetError("the broker closed it")
                at += count
        except OSError as cause:
            self._fail(cause)

    def call(self, kind: int, *buffers: bytes | memoryview, deadline_ms: int = 0) -> memoryview:
        """Send a request and wait for its answer; no other request may be in flight. Raises what
        `receive` raises.
        """
        number = self.send(kind, *buffers, deadline_ms=deadline_ms)
        answer = self.receive()
        if answer.request_id != number:
            self.close()
            raise ProtocolViolation(
                f"{self.address} answered request {answer.request_id} instead of {number}"
            )
        return answer.payload

    # --- the end ----------------------------------------------------------------------------------

    def _require_open(self) -> None:
        if not self.is_open:
            raise NotConnected(
                f"the connection to {self.address} is closed", outcome=Outcome.UNKNOWN
            )

    def _fail(self, cause: OSError) -> None:
        self.close()
        failure: QmqError
        if isinstance(cause, TimeoutError):
            failure = DeadlineExceeded(
                f"no answer from {self.address} in time", outcome=Outcome.UNKNOWN
            )
        else:
            failure = NotConnected(
                f"the connection to {self.address} ended: {cause}", outcome=Outcome.UNKNOWN
            )
        raise failure from cause

    def close(self) -> None:
        """Close the connection and wake up a waiting thread. May be called again."""
        self.is_open = False
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _behind(buffers: list[bytes | memoryview], sent: int) -> list[bytes | memoryview]:
    """The buffers that remain after a number of bytes was sent."""
    for at, each in enumerate(buffers):
        if sent < len(each):
            return [memoryview(each)[sent:], *buffers[at + 1 :]]
        sent -= len(each)
    return []
