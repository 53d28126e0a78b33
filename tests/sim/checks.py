"""The checks after every event: Raft's five properties (Ongaro and Ousterhout, figure 3) and ours.

election safety        an epoch has one master
log matching           an (index, epoch) has one value, and one epoch before it, on every replica
leader completeness    the master of an epoch has everything that was committed in the epochs before it
state machine safety   an index is committed with one value only
durability             a committed entry is stored on a majority of the voters that the coordination store has at that moment (a replica
                       that lost it since it acknowledged it knows this, and does not count in an
                       election before it has it again)
membership             changes go from one version to the next, by one voter; when one is made, a
                       majority of the voters before it has everything committed
ours                   a process's commit position never goes back; an acknowledged entry is
                       committed, and is there at the end
"""  # noqa: E501

from __future__ import annotations

from typing import TYPE_CHECKING

from qmq_replication.membership import ReplicaMembership

from sim.world import Entry

if TYPE_CHECKING:
    from sim.node import Node


class Violation(AssertionError):
    """A property does not hold."""


class Checks:
    """Everything that was observed in one run. `committed[i]` is the entry at index i + 1."""

    def __init__(self, nodes: dict[str, Node]) -> None:
        self._nodes = nodes
        self.masters: dict[int, str] = {}
        self.written: dict[tuple[int, int], tuple[int, int]] = {}
        self.committed: list[Entry] = []
        self.committed_in: list[int] = []
        """The epoch whose master committed it first."""
        self.acknowledged: dict[int, int] = {}
        """Value by index."""
        self.flushed: dict[int, Entry] = {}
        """What was acknowledged because a majority had flushed it, by index."""

    def wrote(self, name: str, index: int, entry: Entry, epoch_before: int) -> None:
        """A replica wrote an entry after one of `epoch_before`."""
        found = self.written.setdefault((index, entry.epoch), (entry.value, epoch_before))
        if found != (entry.value, epoch_before):
            raise Violation(
                f"log matching: {name} has {(entry.value, epoch_before)} at "
                f"{(index, entry.epoch)}, another {found}"
            )

    def became_master(self, node: Node, epoch: int) -> None:
        """A replica begins to lead."""
        if self.masters.setdefault(epoch, node.name) != node.name:
            raise Violation(
                f"election safety: epoch {epoch} has {self.masters[epoch]} and {node.name}"
            )
        image = node.disk.image
        if (
            image.entries[: max(len(self.committed) - image.start, 0)]
            == self.committed[image.start :]
        ):
            return
        for index, (entry, committed_in) in enumerate(
            zip(self.committed, self.committed_in, strict=True), 1
        ):
            if committed_in < epoch and not node.disk.holds(index, entry, durably=False):
                raise Violation(
                    f"leader completeness: {node.name} leads in {epoch} without {entry} at "
                    f"{index} of {committed_in}"
                )

    def commits(self, node: Node, before: int, after: int, members: ReplicaMembership) -> None:
        """A replica reports that everything up to `after` is committed, while the coordination
        store has `members`.
        """
        if after < before:
            raise Violation(
                f"commit position: that of {node.name} went back from {before} to {after}"
            )
        image = node.disk.image
        if after > image.last:
            raise Violation(
                f"commit position: {node.name} commits {after}, but ends at {image.last}"
            )
        first = max(before, image.start)
        for index, entry in enumerate(
            image.entries[first - image.start : after - image.start], first + 1
        ):
            if index > len(self.committed):
                self._first_commit(node, index, entry, members)
            elif self.committed[index - 1] != entry:
                raise Violation(
                    f"state machine safety: {index} is {self.committed[index - 1]}, "
                    f"{node.name} commits {entry}"
                )

    def _first_commit(
        self, node: Node, index: int, entry: Entry, members: ReplicaMembership
    ) -> None:
        holders = self._holders(index, entry)
        if not members.is_majority(holders):
            raise Violation(
                f"durability: {node.name} commits {entry} at {index}, which only {holders} "
                f"of {members.voters} hold"
            )
        assert node.core is not None
        self.committed.append(entry)
        self.committed_in.append(node.core.state.promised)

    def _holders(self, index: int, entry: Entry) -> list[str]:
        return [
            name
            for name, node in self._nodes.items()
            if node.is_doubtful or node.disk.holds(index, entry, durably=node.plan.is_sync)
        ]

    def proposes(self, node: Node, after: ReplicaMembership) -> None:
        """A master takes an operator's change of the membership: a majority of the new voters was
        there a moment ago.
        """
        assert node.core is not None
        timing = node.core.state.timing
        since_ms = node.world.now - timing.suspect_ms - timing.heartbeat_ms
        there = [
            name for name, each in self._nodes.items() if each.is_up or each.died_ms >= since_ms
        ]
        if len(after.voters) < len(node.core.state.membership.voters) and not after.is_majority(
            there
        ):
            raise Violation(f"membership: {node.name} proposes {after}, and only {there} are there")

    def changes(self, before: ReplicaMembership, after: ReplicaMembership) -> None:
        """The coordination store's membership changes."""
        if after.version != before.version + 1 or len(set(before.voters) ^ set(after.voters)) > 1:
            raise Violation(f"membership: from {before} to {after}")
        if self.committed and not before.is_majority(
            holders := self._holders(len(self.committed), self.committed[-1])
        ):
            raise Violation(
                f"membership: from {before} to {after}, but what is committed is only on {holders}"
            )

    def acknowledges(self, name: str, index: int, value: int) -> None:
        """A producer got the answer that its message is stored."""
        if index > len(self.committed) or self.committed[index - 1].value != value:
            found = self.committed[index - 1 : index]
            raise Violation(
                f"acknowledged is committed: {name} acknowledges {value} at {index}, where "
                f"{found} is"
            )
        self.acknowledged[index] = value

    def acknowledges_flushed(
        self, node: Node, index: int, entry: Entry, members: ReplicaMembership
    ) -> None:
        """A producer got the answer that its message is flushed on a majority."""
        holders = [
            name
            for name, each in self._nodes.items()
            if each.is_doubtful or each.disk.holds(index, entry, durably=True)
        ]
        if not members.is_majority(holders):
            raise Violation(
                f"flushed: {node.name} says so of {entry} at {index}, which only {holders} "
                f"of {members.voters} have flushed"
            )
        self.flushed[index] = entry

    def everybody_lost_power(self) -> None:
        """A power cut of all replicas: messages that were committed in page caches may be lost,
        those flushed on a majority may not.
        """
        self.committed.clear()
        self.committed_in.clear()
        self.acknowledged.clear()

    def flushed_survived(self, node: Node) -> None:
        """After a power cut of everybody a replica must hold all that waited for a flush."""
        for index, entry in self.flushed.items():
            if not node.disk.holds(index, entry, durably=False):
                raise Violation(
                    f"flushed: {entry} at {index} is not on {node.name} after a power cut of "
                    "everybody"
                )

    def survived(self, node: Node) -> None:
        """At the end a replica must hold all that was acknowledged."""
        for index, value in self.acknowledged.items():
            if not node.disk.holds(
                index, Entry(self.committed[index - 1].epoch, value), durably=False
            ):
                raise Violation(
                    f"durability: the acknowledged message {value} at {index} is not on {node.name}"
                )
