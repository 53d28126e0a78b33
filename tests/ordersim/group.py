"""A model of replication for a broker group: which replica leads, what is committed, and what a failover loses.

A commit needs a majority. There is one unless the nemesis decides otherwise or the master is cut off. When a candidate has won an
epoch and a majority has promised it, the old master commits nothing more, even if it does not know this. The new master's log is the old
one, cut somewhere between the last committed entry and the last written one.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from qmq_coordination.broker_groups import group_key
from qmq_coordination.coordination_store import Put
from qmq_replication.membership import ReplicaMembership

from ordersim.broker import Replica

if TYPE_CHECKING:
    from ordersim.run import Simulation

REPLICAS = 3
WATCH_MS = 400


class BrokerGroup:
    """See the module."""

    replica_class: type[Replica] = Replica

    def __init__(self, simulation: Simulation, name: str) -> None:
        self.simulation = simulation
        self.world = simulation.world
        self.name = name
        self.replicas = tuple(f"{name}{number}" for number in range(1, REPLICAS + 1))
        self.committed = 0
        self.has_majority = True
        self.lives: dict[str, Replica] = {}
        """By name, the life that is or was last."""
        self.leader: Replica | None = None
        """Whom a majority promised last; its log is the group's."""
        self.candidate: Replica | None = None
        self._folders = 0
        self._idle_since = 0
        key, members = group_key(name, "members"), ReplicaMembership(1, self.replicas)
        simulation.etcd.txn((), [Put(key, members.encode())])
        self._elect(self.replicas[0])
        self.world.after(WATCH_MS, self._watch)

    # --- who may do what -------------------------------------------------------------------------------------------------

    def _is_alone(self, replica: Replica) -> bool:
        cut = self.simulation.network.cut
        return replica.name in cut and not all(name in cut for name in self.replicas)

    def may_commit(self, replica: Replica) -> bool:
        """Whether a majority follows the master."""
        return self.has_majority and not self._is_alone(replica) and self.leader is replica

    def may_promise(self, replica: Replica) -> bool:
        """Whether a majority can be reached."""
        return self.has_majority and not self._is_alone(replica)

    def catch_up(self) -> None:
        """There is a majority again: commit the waiting entries."""
        leader = self.leader
        if leader is not None and leader.is_up and not leader.loop.is_paused and leader.epoch:
            leader.loop.call_soon(leader.commit, leader.store.index)

    # --- elections -------------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Replicas miss their master after a while."""
        leader = self.leader
        is_led = leader is not None and leader.is_up and not leader.is_deposed and leader.epoch > 0
        if is_led or self.candidate is not None:
            self._idle_since = self.world.now
        elif self.world.now - self._idle_since > 600:
            self.elect()
        self.world.after(WATCH_MS + self.world.random.randint(0, 200), self._watch)

    def elect(self) -> None:
        """Another one wants to lead; or the same, if it is gone."""
        if self.candidate is not None and self.candidate.is_up:
            return
        leader = self.leader
        is_led = leader is not None and leader.is_up and leader.epoch > 0
        names = [name for name in self.replicas if not is_led or leader is None or name != leader.name]
        self._elect(self.world.random.choice(names))

    def _elect(self, name: str) -> None:
        leader = self.leader
        old = self.lives.get(name)
        if old is not None and old.is_up:
            old.kill()
        is_restart = leader is not None and leader.name == name
        folder = leader.folder if leader is not None and is_restart else self._new_folder(name)
        self.candidate = replica = self.replica_class(self.simulation, self, name, folder)
        self.lives[name] = replica
        replica.tell("starts, and wants to lead")
        replica.campaign()

    def _new_folder(self, name: str) -> Path:
        self._folders += 1
        return self.simulation.folder / f"{name}-{self._folders}"

    def promised(self, replica: Replica, epoch: int) -> None:
        """A majority follows it from now on."""
        old, self.candidate = self.leader, None
        if old is not None and old is not replica:
            old.is_deposed = True
            written = old.store.index
            until = self.world.random.randint(self.committed, max(written, self.committed))
            if old.folder == replica.folder:
                until = written
            replica.tell(f"has {until} of {written}, committed are {self.committed}")
            if old.folder != replica.folder:
                replica.store.close()
                shutil.rmtree(replica.folder)
                shutil.copytree(old.folder, replica.folder, ignore=shutil.ignore_patterns("lock", "consume"))
                replica.reopen(until)
        self.leader = replica
        replica.lead(epoch)

    def died(self, replica: Replica) -> None:
        """A process ended."""
        if self.candidate is replica:
            self.candidate = None

    def lost(self, replica: Replica) -> None:
        """A replica lost its mastership."""
        replica.is_deposed = True
        self._idle_since = self.world.now

    # --- faults ----------------------------------------------------------------------------------------------------------

    def master(self) -> Replica | None:
        """The master, if it is alive."""
        leader = self.leader
        return leader if leader is not None and leader.is_up and leader.epoch else None

    def processes(self) -> list[Replica]:
        """All living processes."""
        return [replica for replica in self.lives.values() if replica.is_up]
