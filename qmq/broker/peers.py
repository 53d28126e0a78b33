"""The two interfaces of a connection from another replica: what replication needs from the connection, and what the connection needs from
replication.
"""

from __future__ import annotations

from typing import Protocol

from qmq.wire.frame import Frame


class ReplicaConnection(Protocol):
    """The connection."""

    def may_be(self, replica: str) -> bool:
        """Whether the peer's certificate is for this replica; without TLS always."""
        ...

    def answer_peer(self, payload: bytes) -> None: ...

    def trust_peer(self) -> None:
        """The other end has proved its identity: accept frames as large as replicas send."""
        ...

    def close_peer(self) -> None: ...


class ReplicaPeer(Protocol):
    """Takes the frames of another replica."""

    def take(self, frame: Frame) -> None:
        """Handle a frame. Raises ProtocolViolation."""
        ...

    def ended(self) -> None:
        """The connection has ended."""
        ...
