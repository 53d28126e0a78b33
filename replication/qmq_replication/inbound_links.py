"""Connections that other replicas open to this one. Messages are accepted only after the peer has proved its identity (peer_proof.py).

    a hello with an unknown name, or with our own    refused
    a hello with a name that TLS does not confirm    refused: the certificate belongs to another replica
    a proof that does not hold                       refused
    a second connection of a proved peer             the first is closed; if its other end is alive, that end notices

A connection without a proof may send small frames only, and leaves no state when it ends.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from typing import Final, Protocol

from qmq.errors import ProtocolViolation, Unavailable
from qmq.wire.frame import Frame, FrameKind
from qmq_replication.peer_proof import DIALS, LISTENS, PeerHello, ProofStep, is_proof, prove

log = logging.getLogger("qmq.replication")

NONCE_BYTES: Final = 16


def new_nonce() -> str:
    """Make an unpredictable number."""
    return secrets.token_hex(NONCE_BYTES)


class InboundConnection(Protocol):
    """A connection at the listening end."""

    def may_be(self, replica: str) -> bool:
        """True if the peer's certificate is for `replica`. Without TLS it is always True, and only the proof tells."""
        ...

    def answer_peer(self, payload: bytes) -> None:
        """Send a step of the handshake."""
        ...

    def trust_peer(self) -> None:
        """Allow frames as large as replicas send them."""
        ...

    def close_peer(self) -> None: ...


class InboundLinks:
    """All proved links, by name. `members` returns who may connect, `heard` gets a peer's frames."""

    def __init__(
        self,
        group: str,
        name: str,
        *,
        secret: Callable[[], bytes],
        members: Callable[[], tuple[str, ...]],
        heard: Callable[[str, Frame], None],
    ) -> None:
        self.group = group
        self.name = name
        self.secret = secret
        self.members = members
        self.heard = heard
        self.refused = 0
        """Hellos and proofs that were refused."""
        self.proved: dict[str, InboundLink] = {}

    def accept(self, first: Frame, connection: InboundConnection) -> InboundLink:
        """Accept the hello of a connection. Raises ProtocolViolation if it cannot be a replica, Unavailable if that is not known yet."""
        try:
            return InboundLink(self, PeerHello.unpack(first.payload), connection)
        except ProtocolViolation:
            self.refused += 1
            raise


class InboundLink:
    """One connection."""

    def __init__(self, arrivals: InboundLinks, hello: PeerHello, connection: InboundConnection) -> None:
        self._arrivals = arrivals
        self._hello = hello
        self._connection = connection
        self._nonce = new_nonce()
        self._is_proved = False
        if (hello.group, hello.to) != (arrivals.group, arrivals.name):
            raise ProtocolViolation(f"this is {arrivals.name} of group {arrivals.group}, the peer dialled {hello.to!r} of {hello.group!r}")
        if hello.replica == arrivals.name or hello.replica not in arrivals.members():
            raise ProtocolViolation(f"{hello.replica!r} is not another replica of group {arrivals.group}")
        if not connection.may_be(hello.replica):
            raise ProtocolViolation(
                f"the certificate of this connection is not for {hello.replica!r}: issue one with `qmq cert server {hello.replica}`"
            )
        if not arrivals.secret():
            raise Unavailable("this replica has not read its group's secret from the coordination store yet: connect again")
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
        """Handle a message. Messages on an older connection of a peer may be from before its restart: they are ignored."""
        if self._arrivals.proved.get(self._hello.replica) is not self:
            return
        if frame.kind != FrameKind.REPLICA:
            raise ProtocolViolation(f"a replica does not send frames of kind {frame.kind}")
        self._arrivals.heard(self._hello.replica, frame)

    def _check_proof(self, frame: Frame) -> None:
        hello, secret = self._hello, self._arrivals.secret()
        if frame.kind != FrameKind.REPLICA_HELLO:
            raise ProtocolViolation(f"{hello.replica!r} sends frames of kind {frame.kind} before it has proved who it is")
        if not is_proof(ProofStep.unpack(frame.payload).proof, secret, DIALS, hello, self._nonce):
            raise ProtocolViolation(f"a peer that claims to be {hello.replica!r} does not know the secret of group {hello.group}")

    def _welcome(self) -> None:
        hello, arrivals = self._hello, self._arrivals
        older = arrivals.proved.pop(hello.replica, None)
        arrivals.proved[hello.replica] = self
        self._is_proved = True
        self._connection.trust_peer()
        self._connection.answer_peer(ProofStep(proof=prove(arrivals.secret(), LISTENS, hello, self._nonce)).pack())
        if older is not None:
            log.info("replica %s has connected again: its older connection is closed", hello.replica)
            older.close()

    def close(self) -> None:
        self._connection.close_peer()

    def ended(self) -> None:
        """The connection has ended."""
        if self._arrivals.proved.get(self._hello.replica) is self:
            del self._arrivals.proved[self._hello.replica]
