"""Bugs of trust: which messages a replica accepts."""

from __future__ import annotations

from qmq_replication.core import Replica
from qmq_replication.links import InboundConnection, InboundLink, InboundLinks, PeerHello

from qmq.wire.frame import Frame, FrameKind
from sim.bugs.planting import in_node, in_replica


class _Credulous(InboundLink):
    def _check_proof(self, frame: Frame) -> None:
        assert frame.kind == FrameKind.REPLICA_HELLO


class _Open(InboundLinks):
    def accept(self, first: Frame, connection: InboundConnection) -> InboundLink:
        return _Credulous(self, PeerHello.unpack(first.payload), connection)


def _belongs(self: Replica, sender: str) -> bool:
    return True


in_node("accept a hello without its proof", arrivals_class=_Open)
in_replica("accept messages of peers outside the group", _belongs=_belongs)
