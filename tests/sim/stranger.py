"""A stranger to the group that can reach every replica: it sends what a hostile machine, or a removed replica, might send.

    forge      connects in a member's name, answers the challenge with what it can know, and sends anything if it is let in
    outcast    speaks as a machine that has a valid proof, but does not belong to the group

It sees everything and aims well: it uses the epochs, indexes and rounds of the replica that it talks to. It must have no effect, so all
other checks judge it: no acknowledged entry is lost, and the group works again when the stranger stops. It has a separate random generator.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from qmq_replication.history import EpochRun
from qmq_replication.links import DIALS, LISTENS, InboundLinks, PeerHello, ProofStep, prove
from qmq_replication.ready import Ack, Append, LogReset, Message, Promise, PromiseRequest, Refusal, TakeOver

from qmq.errors import ProtocolViolation, Unavailable
from qmq.wire.frame import Frame, FrameKind
from sim.disk import Entry

if TYPE_CHECKING:
    from sim.node import Node
    from sim.run import Simulation

SECRET = b"known to the store and the replicas"
EVERY_MS = 5_000
SEEDS_EACH = 4
"""One seed in this many has a stranger."""


class NoConnection:
    """A connection whose answers reach only the stranger, which cannot use them."""

    def may_be(self, _replica: str) -> bool:
        """See `InboundConnection`."""
        return True

    def answer_peer(self, payload: bytes) -> None:
        """See `InboundConnection`."""

    def trust_peer(self) -> None:
        """See `InboundConnection`."""

    def close_peer(self) -> None:
        """See `InboundConnection`."""


class Stranger:
    """See the module."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._random = Random(simulation.seed)

    def begin(self) -> None:
        """Attack until `calm`."""
        if self._simulation.seed % SEEDS_EACH == 0 and not self._simulation.is_calm:
            self._strike()
            self._simulation.world.after(1 + int(self._random.expovariate(1 / EVERY_MS)), self.begin)

    def _strike(self) -> None:
        nodes = [node for node in self._simulation.nodes.values() if node.core is not None and not node.is_paused]
        if not nodes:
            return
        node = self._random.choice(nodes)
        others = [name for name in self._simulation.membership.replicas if name != node.name]
        kind = self._random.choice(("forge", "outcast"))
        self._simulation.faults[kind] += 1
        for message in self._volley(node):
            if kind == "forge":
                self._forge(node, self._random.choice(others or ["nobody"]), message)
            else:
                self._say(node, "outcast", message)

    def _volley(self, node: Node) -> list[Message]:
        core = node.core
        assert core is not None
        epoch, last = core.state.promised, core.state.history.last_index
        far = self._random.choice((1, 1, 10**15, (1 << 63) - 1 - epoch))
        run = EpochRun(epoch + 1, last + 1)
        peer = next(iter(core.leader.peers.values()), None) if core.leader is not None else None
        everything: list[Message] = [
            PromiseRequest(epoch + far),
            Refusal(epoch + far),
            TakeOver(epoch),
            Promise(epoch, 0, 0, True),
            Append(epoch, 0, core.state.history.last_epoch, last, (), last, last, False, None),
            Append(epoch + 1, 0, 0, 0, (), 0, 0, True, None),
            Append(epoch + 1, 0, core.state.history.last_epoch, last, (run,), last + 1, last + 1, False, (Entry(epoch + 1, -1),)),
            LogReset(epoch + 1, 0, 0, 0, [0, 0], 0),
            Ack(epoch, 0 if peer is None else peer.round, last, last, last),
            Ack(epoch, 0, 1 << 40, 1 << 40, last),
        ]
        return self._random.sample(everything, 4)

    def _forge(self, node: Node, name: str, message: Message) -> None:
        """Proofs for another connection, another direction or another secret."""
        hello = PeerHello("g", name, node.name, "nonce")
        proof = self._random.choice(
            [prove(*each) for each in ((SECRET, DIALS, hello, "before"), (SECRET, LISTENS, hello, "before"), (b"guess", DIALS, hello, ""))]
        )
        try:
            arrival = node.arrivals.accept(_frame(FrameKind.REPLICA_HELLO, hello.pack()), NoConnection())
            arrival.take(_frame(FrameKind.REPLICA_HELLO, ProofStep(proof=proof).pack()))
            arrival.take(Frame(FrameKind.REPLICA, 0, 0, message))  # type: ignore[arg-type]
        except (ProtocolViolation, Unavailable):
            return

    def _say(self, node: Node, sender: str, message: Message) -> None:
        try:
            node.receive(sender, message)
        except ProtocolViolation:
            node.receive(sender, TakeOver(0))  # carries out what was begun, as the driver does


def arrivals_of(node: Node, kind: type[InboundLinks]) -> InboundLinks:
    """A replica's listening port."""
    return kind(
        "g",
        node.name,
        secret=lambda: SECRET,
        members=lambda: node.core.members if node.core is not None else (),
        heard=lambda sender, frame: node.receive(sender, frame.payload),  # type: ignore[arg-type]
    )


def _frame(kind: FrameKind, payload: bytes) -> Frame:
    return Frame(kind, 0, 0, memoryview(payload))
