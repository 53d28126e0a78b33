"""Bugs in whom a replica believes."""

from __future__ import annotations

from qmq_replication.arrivals import Arrival, Arrivals, Door
from qmq_replication.core import Replica
from qmq_replication.proof import PeerHello

from qmq.wire.frame import Frame, FrameKind
from sim.bugs.planting import in_node, in_replica


class _Credulous(Arrival):
    def _check_proof(self, frame: Frame) -> None:
        assert frame.kind == FrameKind.REPLICA_HELLO


class _Open(Arrivals):
    def accept(self, first: Frame, door: Door) -> Arrival:
        return _Credulous(self, PeerHello.unpack(first.payload), door)


def _belongs(self: Replica, sender: str) -> bool:
    return True


in_node("believe a hello without its proof", arrivals_class=_Open)
in_replica("hear who does not belong to the group", _belongs=_belongs)
