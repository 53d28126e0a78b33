"""The network between replicas: lost, late, doubled and reordered messages, repetitions much later, cuts one way or both, clogged links.

When a process dies, messages on their way to it are lost with its connections. Messages that it sent may still arrive.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from qmq_replication.ready import Ack, Message

from sim.world import World

if TYPE_CHECKING:
    from sim.node import Node
    from sim.plan import Plan

LATE_MS = 60_000
REMEMBERED = 40


class Network:
    """All links. `cut` has the (from, to) pairs that drop everything, `clogged` the messages that wait in stopped links."""

    def __init__(self, world: World, plan: Plan, nodes: dict[str, Node], faults: Counter[str]) -> None:
        self._world = world
        self._plan = plan
        self._nodes = nodes
        self._faults = faults
        self._worst = plan.drop + plan.double + plan.late + plan.slow
        self.cut: set[tuple[str, str]] = set()
        self.clogged: dict[tuple[str, str], list[tuple[int, Message]]] = {}
        self.is_calm = False
        self._arrives: dict[tuple[str, str], int] = {}
        self._remembered: dict[str, dict[tuple[str, int], tuple[int, Message]]] = {}

    def send(self, sender: str, to: str, message: Message) -> None:
        """Put a message on its way."""
        if to not in self._nodes or (self.cut and (sender, to) in self.cut):
            return
        random = self._world.random.random
        node = self._nodes[to]
        fate = 1.0 if self.is_calm else random()
        if self.clogged and (sender, to) in self.clogged:
            self.clogged[sender, to].append((node.boot, message))
        elif fate >= self._worst:
            if self._plan.late and (fate > 0.97 or isinstance(message, Ack)):
                self._remember(sender, node, message)
            world, link = self._world, (sender, to)
            at = world.now + 1 + int(random() * 9)
            if self._plan.is_ordered:
                at = self._arrives[link] = max(at, self._arrives.get(link, 0))
            world.after(at - world.now, self._deliver, node, node.boot, sender, message)
        else:
            self._mistreat(fate, sender, node, message)

    def _remember(self, sender: str, node: Node, message: Message) -> None:
        """Keep messages for an echo: some of all kinds, and each sender's last acknowledgement of each epoch."""
        kept = self._remembered.setdefault(node.name, {})
        kept[sender, message.epoch if isinstance(message, Ack) else self._world.now] = (node.boot, message)
        if len(kept) > REMEMBERED:
            del kept[next(iter(kept))]

    def _mistreat(self, fate: float, sender: str, node: Node, message: Message) -> None:
        random, plan = self._world.random.random, self._plan
        if fate < plan.drop:
            self._faults["message dropped"] += 1
            return
        delay_ms = 1 + int(random() * 9)
        if fate < plan.drop + plan.double:
            self._faults["message doubled"] += 1
            self._world.after(1 + int(random() * 9), self._deliver, node, node.boot, sender, message)
        elif fate < plan.drop + plan.double + plan.late:
            self._faults["message repeated late"] += 1
            self._world.after(int(random() * LATE_MS), self._deliver, node, node.boot, sender, message)
        else:
            self._faults["message slow"] += 1
            delay_ms = 10 + int(random() * plan.slow_ms)
        self._world.after(delay_ms, self._deliver, node, node.boot, sender, message)

    def _deliver(self, node: Node, boot: int, sender: str, message: Message) -> None:
        if node.boot == boot and not (self.cut and (sender, node.name) in self.cut):
            node.receive(sender, message)

    # --- faults --------------------------------------------------------------------------------------------------------

    def heal(self) -> None:
        """Restore all links."""
        self.cut.clear()

    def isolate(self, name: str, *, is_inward: bool = True, is_outward: bool = True) -> None:
        """Cut one replica off, perhaps in one direction only."""
        for other in self._nodes:
            if is_inward:
                self.cut.add((other, name))
            if is_outward:
                self.cut.add((name, other))

    def split(self, left: set[str], right: set[str]) -> None:
        """Cut all links between two sides."""
        self.cut |= {(a, b) for a in left for b in right} | {(b, a) for a in left for b in right}

    def clog(self, link: tuple[str, str]) -> None:
        """Stop a link without losing messages."""
        self.clogged.setdefault(link, [])

    def flow(self, link: tuple[str, str]) -> None:
        """Restore a stopped link; everything that waited arrives, in any order."""
        node = self._nodes[link[1]]
        for boot, message in self.clogged.pop(link, ()):
            self._world.after(1 + int(self._world.random.random() * 9), self._deliver, node, boot, link[0], message)

    def flow_backwards(self, link: tuple[str, str], within_ms: int) -> None:
        """The same, the latest first and the oldest last."""
        waiting = self.clogged.pop(link, [])
        for number, (boot, message) in enumerate(reversed(waiting)):
            self._world.after(1 + number * within_ms // len(waiting), self._deliver, self._nodes[link[1]], boot, link[0], message)

    def echo(self, name: str) -> None:
        """Deliver copies of recent and of old messages to a replica, all in one step."""
        self._faults["echo"] += 1
        for (sender, _), (boot, message) in self._remembered.pop(name, {}).items():
            self._world.after(1 + int(self._world.random.random() * 30), self._deliver, self._nodes[name], boot, sender, message)

    def tell_of_loss(self, name: str) -> None:
        """Close the connections of a process that died, or whose links broke; its peers notice soon."""
        for node in self._nodes.values():
            if node.name != name:
                self._world.after(1 + int(self._world.random.random() * 50), self._disconnected, node, node.boot, name)

    def _disconnected(self, node: Node, boot: int, name: str) -> None:
        if node.boot == boot:
            node.lost(name)
