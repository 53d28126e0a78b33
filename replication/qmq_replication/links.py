"""Connections between the replicas of a group, on which both ends prove that they belong to it.
There is one outgoing connection to each peer for our messages. The peer's messages arrive over the
connection that the peer opened.

Messages to an unreachable peer are dropped, since the core tolerates loss. Messages of one round of
the event loop are sent with one write.

A replica knows its group's secret from the coordination store:

    dialling replica                   listening replica
    Hello(group, replica, to, nonce)   ─▶
                                   ◀─  Challenge(nonce)
    Proof of "dials"               ─▶
                                   ◀─  Proof of "listens": from now on messages are accepted

A proof is an HMAC (RFC 2104) with SHA-256 over both names, the group, both nonces and the
direction. A recorded proof is therefore valid for no other connection, and cannot be sent back to
its sender. The secret itself never travels between replicas. Later messages are not signed: only
TLS protects against an attacker who can write into an established connection.

On connections that other replicas open to this one, messages are accepted only after the peer has
proved its identity.

    a hello with an unknown name, or with our own    refused
    a hello with a name that TLS does not confirm    refused: the certificate belongs to another
                                                     replica
    a proof that does not hold                       refused
    a second connection of a proved peer             the first is closed; if its other end is alive,
                                                     that end notices

A connection without a proof may send small frames only, and leaves no state when it ends.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import secrets
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import Final, NamedTuple, Protocol

from qmq import limits
from qmq.errors import InvalidArgument, InvariantBroken, ProtocolViolation, QmqError, Unavailable
from qmq.rpc.network import NETWORK, Network
from qmq.security.principal import CertificateNames
from qmq.security.tls import tls_failed
from qmq.wire import frame as frames
from qmq.wire.frame import Frame, FrameKind
from qmq.wire.frame_payloads import is_text, unpack_error
from qmq.wire.frame_stream import FrameStream

log = logging.getLogger("qmq.replication")

RETRY_S: Final = 0.1
RETRY_S_MAX: Final = 1.0
CONNECT_S: Final = 2.0
NONCE_BYTES: Final = 16
VERSION: Final = 2
"""The handshake's version. Increase it with every change of ready.py: a replica refuses messages
with unknown fields.
"""
DIALS: Final = "dials"
LISTENS: Final = "listens"


class PeerHello(NamedTuple):
    """The first message between replicas: the sender, the replica that it wants to reach, and a
    fresh nonce.
    """

    group: str
    replica: str
    to: str = ""
    nonce: str = ""

    def pack(self) -> bytes:
        return json.dumps({"version": VERSION, **self._asdict()}).encode()

    @classmethod
    def unpack(cls, payload: memoryview) -> PeerHello:
        """Raises ProtocolViolation."""
        found = _fields(payload)
        if found.get("version") != VERSION:
            raise ProtocolViolation(
                f"this replica speaks version {VERSION}, the other {found.get('version')}"
            )
        return cls(*[_text(found, name) for name in cls._fields])


class ProofStep(NamedTuple):
    """A later step of the handshake: a nonce, or a proof."""

    nonce: str = ""
    proof: str = ""

    def pack(self) -> bytes:
        return json.dumps(self._asdict()).encode()

    @classmethod
    def unpack(cls, payload: memoryview) -> ProofStep:
        """Raises ProtocolViolation."""
        found = _fields(payload)
        return cls(*[_text(found, name) for name in cls._fields])


def prove(secret: bytes, who: str, hello: PeerHello, challenge: str) -> str:
    """The proof of the replica that dials, or of the one that listens."""
    said = json.dumps(["qmq replica", who, *hello, challenge]).encode()
    return hmac.new(secret, said, "sha256").hexdigest()


def is_proof(proof: str, secret: bytes, who: str, hello: PeerHello, challenge: str) -> bool:
    """True if the proof is correct. Without a secret, no proof is correct."""
    return bool(secret) and hmac.compare_digest(
        proof.encode(), prove(secret, who, hello, challenge).encode()
    )


def _fields(payload: memoryview) -> dict[str, object]:
    try:
        found = json.loads(bytes(payload))
    except (ValueError, RecursionError) as cause:
        raise ProtocolViolation(f"not a replica's hello: {cause}") from None
    if not isinstance(found, dict):
        raise ProtocolViolation("not a replica's hello")
    return found


def _text(found: dict[str, object], name: str) -> str:
    value = found.get(name)
    if not isinstance(value, str):
        raise ProtocolViolation(f"not a replica's hello: {name} is missing")
    if not is_text(value):
        raise ProtocolViolation(
            f"not a replica's hello: {name} holds half of a surrogate pair, which is no character"
        )
    return value


def new_nonce() -> str:
    """Make an unpredictable number."""
    return secrets.token_hex(NONCE_BYTES)


class InboundConnection(Protocol):
    """A connection at the listening end."""

    def may_be(self, replica: str) -> bool:
        """True if the peer's certificate is for `replica`. Without TLS it is always True, and only
        the proof tells.
        """
        ...

    def answer_peer(self, payload: bytes) -> None:
        """Send a step of the handshake."""
        ...

    def trust_peer(self) -> None:
        """Allow frames as large as replicas send them."""
        ...

    def close_peer(self) -> None: ...


class InboundLinks:
    """All proved links, by name. `members` returns who may connect,
    `on_message` gets a peer's frames.
    """

    def __init__(
        self,
        group: str,
        name: str,
        *,
        secret: Callable[[], bytes],
        members: Callable[[], tuple[str, ...]],
        on_message: Callable[[str, Frame], None],
    ) -> None:
        self.group = group
        self.name = name
        self.secret = secret
        self.members = members
        self.on_message = on_message
        self.refused = 0
        """Hellos and proofs that were refused."""
        self.proved: dict[str, InboundLink] = {}

    def accept(self, first: Frame, connection: InboundConnection) -> InboundLink:
        """Accept the hello of a connection. Raises ProtocolViolation if it cannot be a replica,
        Unavailable if that is not known yet.
        """
        try:
            return InboundLink(self, PeerHello.unpack(first.payload), connection)
        except ProtocolViolation:
            self.refused += 1
            raise


class InboundLink:
    """One connection."""

    def __init__(
        self, arrivals: InboundLinks, hello: PeerHello, connection: InboundConnection
    ) -> None:
        self._arrivals = arrivals
        self._hello = hello
        self._connection = connection
        self._nonce = new_nonce()
        self._is_proved = False
        if (hello.group, hello.to) != (arrivals.group, arrivals.name):
            raise ProtocolViolation(
                f"this is {arrivals.name} of group {arrivals.group}, the peer dialled "
                f"{hello.to!r} of {hello.group!r}"
            )
        if hello.replica == arrivals.name or hello.replica not in arrivals.members():
            raise ProtocolViolation(
                f"{hello.replica!r} is not another replica of group {arrivals.group}"
            )
        if not connection.may_be(hello.replica):
            raise ProtocolViolation(
                f"the certificate of this connection is not for {hello.replica!r}: issue one "
                f"with `qmq cert server {hello.replica}`"
            )
        if not arrivals.secret():
            raise Unavailable(
                "this replica has not read its group's secret from the coordination store "
                "yet: connect again"
            )
        connection.answer_peer(ProofStep(nonce=self._nonce).pack())

    def take(self, frame: Frame) -> None:
        """Handle a frame. Raises ProtocolViolation."""
        if self._is_proved:
            self._take_message(frame)
            return
        try:
            self._check_proof(frame)
        except ProtocolViolation:
            self._arrivals.refused += 1
            raise
        self._welcome()

    def _take_message(self, frame: Frame) -> None:
        """Handle a message. Messages on an older connection of a peer may be from before its
        restart: they are ignored.
        """
        if self._arrivals.proved.get(self._hello.replica) is not self:
            return
        if frame.kind != FrameKind.REPLICA:
            raise ProtocolViolation(f"a replica does not send frames of kind {frame.kind}")
        self._arrivals.on_message(self._hello.replica, frame)

    def _check_proof(self, frame: Frame) -> None:
        hello, secret = self._hello, self._arrivals.secret()
        if frame.kind != FrameKind.REPLICA_HELLO:
            raise ProtocolViolation(
                f"{hello.replica!r} sends frames of kind {frame.kind} before it has proved "
                "who it is"
            )
        if not is_proof(ProofStep.unpack(frame.payload).proof, secret, DIALS, hello, self._nonce):
            raise ProtocolViolation(
                f"a peer that claims to be {hello.replica!r} does not know the secret of "
                f"group {hello.group}"
            )

    def _welcome(self) -> None:
        hello, arrivals = self._hello, self._arrivals
        older = arrivals.proved.pop(hello.replica, None)
        arrivals.proved[hello.replica] = self
        self._is_proved = True
        self._connection.trust_peer()
        self._connection.answer_peer(
            ProofStep(proof=prove(arrivals.secret(), LISTENS, hello, self._nonce)).pack()
        )
        if older is not None:
            log.info(
                "replica %s has connected again: its older connection is closed", hello.replica
            )
            older.close()

    def close(self) -> None:
        self._connection.close_peer()

    def ended(self) -> None:
        """The connection has ended."""
        if self._arrivals.proved.get(self._hello.replica) is self:
            del self._arrivals.proved[self._hello.replica]


class Secret:
    """The group's secret. It is unknown until the coordination store answers."""

    def __init__(self, value: bytes = b"") -> None:
        self.value = value
        self.known = asyncio.Event()
        self.set(value)

    def set(self, value: bytes) -> None:
        if value:
            self.value = value
            self.known.set()


class Link:
    """The connection to one peer. It is open once both ends have proved themselves."""

    def __init__(
        self,
        name: str,
        address: str,
        hello: PeerHello,
        secret: Secret,
        on_lost: Callable[[str], None],
        network: Network = NETWORK,
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
                log.exception(
                    "connecting to replica %s at %s failed: trying again", self.name, self.address
                )
            self._hang_up()
            await asyncio.sleep(min(RETRY_S * 2 ** min(failures, 8), RETRY_S_MAX))

    def _refuse(self, refusal: QmqError) -> None:
        """Log why there is no connection, once for each reason."""
        if str(refusal) != self._refusal:
            self._refusal = str(refusal)
            log.warning("replica %s at %s: %s", self.name, self.address, refusal)

    async def _connect(self) -> None:
        """Raises OSError, TimeoutError, InvalidArgument, and ProtocolViolation if the other end
        refuses us or is another replica.
        """
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
            self._send_step(self._hello.pack())
            await self._proved.wait()
        if self._stream is None:
            raise self._violation or ConnectionResetError(
                "the other side closed the connection before the proofs were exchanged"
            )

    def _require_certificate(self, stream: FrameStream) -> None:
        """The host's name was checked already, but another server may listen there.
        Raises ProtocolViolation.
        """
        transport = stream.transport
        if transport is None or transport.get_extra_info("sslcontext") is None:
            return
        if not CertificateNames.of_peer(transport.get_extra_info("peercert")).names_server(
            self.name
        ):
            raise ProtocolViolation(
                f"its certificate is not for {self.name!r}: issue one with `qmq cert server "
                f"{self.name}`"
            )

    def _send_step(self, payload: bytes) -> None:
        if self._dialled is None:
            raise InvariantBroken("nothing was dialled")
        self._dialled.put(frames.frame(FrameKind.REPLICA_HELLO, 0, payload))
        self._dialled.flush()

    def _on_frames(self, received: list[Frame]) -> None:
        """Handle the handshake. After it, the only frame is an error that ends the connection.
        Raises ProtocolViolation.
        """
        for each in received:
            if each.kind == FrameKind.ERROR:
                raise ProtocolViolation(f"it refused the connection: {unpack_error(each.payload)}")
            if each.kind != FrameKind.REPLICA_HELLO or self._stream is not None:
                raise ProtocolViolation(
                    f"it answers with a frame of kind {each.kind} where none is expected"
                )
            self._prove(ProofStep.unpack(each.payload))

    def _prove(self, step: ProofStep) -> None:
        secret = self._secret.value
        if not self._challenge:
            self._challenge = step.nonce
            self._send_step(ProofStep(proof=prove(secret, DIALS, self._hello, step.nonce)).pack())
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

    def __init__(
        self,
        hello: PeerHello,
        secret: Secret,
        on_lost: Callable[[str], None],
        network: Network = NETWORK,
    ) -> None:
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
        for name in [
            each for each, link in self._links.items() if addresses.get(each) != link.address
        ]:
            task = self._loop.create_task(self._links.pop(name).close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        for name, address in addresses.items():
            if name not in self._links:
                self._links[name] = Link(
                    name, address, self._hello, self._secret, self._on_lost, self._network
                )

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
