"""Connections between the replicas of a group: one outgoing connection to each peer for our messages. The peer's messages arrive over the
connection that the peer opened.

Messages to an unreachable peer are dropped, since the core tolerates loss. Messages of one round of the event loop are sent with one write.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from qmq import limits
from qmq.errors import InvalidArgument, ProtocolViolation, QmqError
from qmq.invariants import InvariantBroken
from qmq.network import NETWORK, Network
from qmq.security.principal import CertificateNames
from qmq.security.tls import tls_failed
from qmq.wire import frame as frames
from qmq.wire.frame import Frame, FrameKind
from qmq.wire.frame_payloads import unpack_error
from qmq.wire.frame_stream import FrameStream
from qmq_replication.inbound_links import new_nonce
from qmq_replication.peer_proof import DIALS, LISTENS, PeerHello, ProofStep, is_proof, prove

log = logging.getLogger("qmq.replication")

RETRY_S: Final = 0.1
RETRY_S_MAX: Final = 1.0
CONNECT_S: Final = 2.0


class Secret:
    """The group's secret. It is unknown until the coordination store answers."""

    def __init__(self, value: bytes = b"") -> None:
        self.value = value
        self.known = asyncio.Event()
        self.know(value)

    def know(self, value: bytes) -> None:
        if value:
            self.value = value
            self.known.set()


class Link:
    """The connection to one peer. It is open once both ends have proved themselves."""

    def __init__(
        self, name: str, address: str, hello: PeerHello, secret: Secret, on_lost: Callable[[str], None], network: Network = NETWORK
    ) -> None:
        self.name = name
        self.address = address
        self._network = network
        self._group_hello = hello
        self._secret = secret
        self._on_lost = on_lost
        self._stream: FrameStream | None = None
        """The stream, once the link may send messages."""
        self._dialled: FrameStream | None = None
        self._hello = hello
        self._challenge = ""
        self._violation: ProtocolViolation | None = None
        self._refusal = ""
        """The last logged reason, so that repeated refusals are logged once."""
        self._is_closed = False
        self._task = asyncio.get_running_loop().create_task(self._stay_connected())
        self._proved = asyncio.Event()
        self._ended = asyncio.Event()

    @property
    def is_open(self) -> bool:
        """True if the link can send messages."""
        return self._stream is not None and self._stream.is_open

    async def _stay_connected(self) -> None:
        failures = 0
        while not self._is_closed:
            try:
                await self._secret.known.wait()
                await self._connect()
                failures = 0
                await self._ended.wait()
                self._on_lost(self.name)
            except ssl.SSLError as cause:
                failures += 1
                self._refuse(tls_failed(self.address, cause))
            except (OSError, TimeoutError, InvalidArgument):
                failures = 0  # reset the pause, so that a starting peer is reached soon
            except ProtocolViolation as refusal:
                failures += 1
                self._refuse(refusal)
            except Exception:
                failures += 1
                log.exception("connecting to replica %s at %s failed: trying again", self.name, self.address)
            self._hang_up()
            await asyncio.sleep(min(RETRY_S * 2 ** min(failures, 8), RETRY_S_MAX))

    def _refuse(self, refusal: QmqError) -> None:
        """Log why there is no connection, once for each reason."""
        if str(refusal) != self._refusal:
            self._refusal = str(refusal)
            log.warning("replica %s at %s: %s", self.name, self.address, refusal)

    async def _connect(self) -> None:
        """Raises OSError, TimeoutError, InvalidArgument, and ProtocolViolation if the other end refuses us or is another replica."""
        self._ended.clear()
        self._proved.clear()
        self._challenge, self._violation = "", None
        self._hello = self._group_hello._replace(to=self.name, nonce=new_nonce())
        stream = FrameStream(
            on_frames=self._on_frames,
            on_closed=self._closed,
            on_writable=lambda: None,
            on_violation=self._violated,
            frame_bytes_max=limits.HELLO_BYTES_MAX,
        )
        async with asyncio.timeout(CONNECT_S):
            await self._network.connect(self.address, lambda: stream)
            self._dialled = stream
            self._require_certificate(stream)
            self._say(self._hello.pack())
            await self._proved.wait()
        if self._stream is None:
            raise self._violation or ConnectionResetError("the other side closed the connection before the proofs were exchanged")

    def _require_certificate(self, stream: FrameStream) -> None:
        """The host's name was checked already, but another server may listen there. Raises ProtocolViolation."""
        transport = stream.transport
        if transport is None or transport.get_extra_info("sslcontext") is None:
            return
        if not CertificateNames.of_peer(transport.get_extra_info("peercert")).names_server(self.name):
            raise ProtocolViolation(f"its certificate is not for {self.name!r}: issue one with `qmq cert server {self.name}`")

    def _say(self, payload: bytes) -> None:
        if self._dialled is None:
            raise InvariantBroken("nothing was dialled")
        self._dialled.put(frames.frame(FrameKind.REPLICA_HELLO, 0, payload))
        self._dialled.flush()

    def _on_frames(self, received: list[Frame]) -> None:
        """Handle the handshake. After it, the only frame is an error that ends the connection. Raises ProtocolViolation."""
        for each in received:
            if each.kind == FrameKind.ERROR:
                raise ProtocolViolation(f"it refused the connection: {unpack_error(each.payload)}")
            if each.kind != FrameKind.REPLICA_HELLO or self._stream is not None:
                raise ProtocolViolation(f"it answers with a frame of kind {each.kind} where none is expected")
            self._prove(ProofStep.unpack(each.payload))

    def _prove(self, step: ProofStep) -> None:
        secret = self._secret.value
        if not self._challenge:
            self._challenge = step.nonce
            self._say(ProofStep(proof=prove(secret, DIALS, self._hello, step.nonce)).pack())
            return
        if not is_proof(step.proof, secret, LISTENS, self._hello, self._challenge):
            raise ProtocolViolation("it does not know the group's secret")
        self._stream, self._refusal = self._dialled, ""
        self._proved.set()

    def _violated(self, violation: ProtocolViolation) -> None:
        self._violation = violation
        if self._stream is not None:
            log.warning("replica %s at %s: %s", self.name, self.address, violation)

    def _closed(self, _: Exception | None) -> None:
        self._stream = None
        self._proved.set()
        self._ended.set()

    def _hang_up(self) -> None:
        """Close the connection."""
        if self._dialled is not None:
            self._dialled.close()
            self._dialled = None

    def put(self, pieces: list[bytes]) -> bool:
        """Queue a frame; False if the link is not open."""
        if self._stream is None or not self._stream.is_open:
            return False
        self._stream.put(frames.header(FrameKind.REPLICA, 0, sum(map(len, pieces))), *pieces)
        return True

    def flush(self) -> None:
        """Write the queued frames."""
        if self._stream is not None:
            self._stream.flush()

    async def close(self) -> None:
        self._is_closed = True
        self._task.cancel()
        self._hang_up()
        with suppress(asyncio.CancelledError):
            await self._task


class Mesh:
    """All links of this replica."""

    def __init__(self, hello: PeerHello, secret: Secret, on_lost: Callable[[str], None], network: Network = NETWORK) -> None:
        self._hello = hello
        self._secret = secret
        self._on_lost = on_lost
        self._network = network
        self._links: dict[str, Link] = {}
        self._full: dict[str, Link] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()

    def update(self, addresses: dict[str, str]) -> None:
        """Set the peers, by data address."""
        for name in [each for each, link in self._links.items() if addresses.get(each) != link.address]:
            task = self._loop.create_task(self._links.pop(name).close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        for name, address in addresses.items():
            if name not in self._links:
                self._links[name] = Link(name, address, self._hello, self._secret, self._on_lost, self._network)

    def send(self, to: str, pieces: list[bytes]) -> None:
        """Send a frame, or drop it if the link is not open."""
        link = self._links.get(to)
        if link is not None and link.put(pieces):
            if not self._full:
                self._loop.call_soon(self.flush)
            self._full[to] = link

    def flush(self) -> None:
        """Write the queued frames of all links."""
        full, self._full = self._full, {}
        for link in full.values():
            link.flush()

    async def close(self) -> None:
        links, self._links = self._links, {}
        for link in links.values():
            await link.close()
        for task in list(self._closing):
            await task
