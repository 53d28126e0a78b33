"""A connection whose other end says that it is a replica, from both sides: what the replication has of it, and what it has of that."""

from __future__ import annotations

from typing import Protocol

from qmq.wire.frame import Frame


class ReplicaConnection(Protocol):
    """The connection."""

    def answer_peer(self, payload: bytes) -> None: ...

    def trust_peer(self) -> None:
        """The other end has proved what it is: take frames as large as replicas send them."""
        ...

    def close_peer(self) -> None: ...


class ReplicaPeer(Protocol):
    """Who takes what the other end says."""

    def take(self, frame: Frame) -> None:
        """A frame has come. Raises ProtocolViolation."""
        ...

    def ended(self) -> None:
        """The connection has ended."""
        ...
