"""Plants a bug: a Node with one replaced class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from qmq_replication.coordinator import Coordinator
from qmq_replication.core import Replica
from qmq_replication.election import Election
from qmq_replication.leader import Leader
from qmq_replication.ready import ReplicaState

from sim.node import Node

BUGS: dict[str, type[Node]] = {}


class _Buggy(Node):
    checks_places = False


def in_node(name: str, **methods: Any) -> None:
    """A bug in carrying out."""
    BUGS[name] = type("BuggyNode", (_Buggy,), methods)


def in_replica(name: str, **methods: Any) -> None:
    """A bug in the core: methods of Replica."""
    in_node(name, replica_class=type("BuggyReplica", (Replica,), methods))


def in_state(name: str, **methods: Any) -> None:
    """A bug in the state that the roles share."""
    buggy = type("BuggyState", (ReplicaState,), methods)

    def begin(self: Replica, *args: Any, **options: Any) -> None:
        Replica.__init__(self, *args, **options)
        self.state.__class__ = buggy

    in_replica(name, __init__=begin)


def in_step(name: str, message: type, handle: Callable[[Any, str, Any], None]) -> None:
    """A bug in how one message is answered."""

    def step(self: Replica, now_ms: int, sender: str, received: Any) -> None:
        if isinstance(received, message):
            self.state.now_ms = now_ms
            handle(self, sender, received)
        else:
            Replica.step(self, now_ms, sender, received)

    in_replica(name, step=step)


def in_leader(name: str, **methods: Any) -> None:
    """A bug on the master's side."""
    buggy = type("BuggyLeader", (Leader,), methods)

    def lead(self: Replica) -> None:
        Replica.lead(self)
        assert self.leader is not None
        self.leader.__class__ = buggy

    in_replica(name, lead=lead)


def in_election(name: str, **methods: Any) -> None:
    """A bug in elections."""
    buggy = type("BuggyElection", (Election,), methods)

    def begin(self: Replica, *args: Any, **options: Any) -> None:
        Replica.__init__(self, *args, **options)
        self.election.__class__ = buggy

    in_replica(name, __init__=begin)


def in_coordinator(name: str, **methods: Any) -> None:
    """A bug in the dealings with the store."""
    in_node(name, coordinator_class=type("BuggyCoordinator", (Coordinator,), methods))
