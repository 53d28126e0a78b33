"""How a broker stands in its group: what operators ask it, and have it do. A node without replicas is a group of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from qmq.broker.broker import Broker
from qmq.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class PeerInfo:
    replica: str
    match_index: int
    in_step: bool
    silent_ms: int


@dataclass(frozen=True, slots=True)
class ReplicaInfo:
    replica: str
    role: str
    epoch: int
    master: str
    last_index: int
    stored_index: int
    commit_index: int
    message_position: int
    action_position: int
    is_whole: bool
    membership_version: int
    voters: tuple[str, ...]
    learners: tuple[str, ...]
    peers: tuple[PeerInfo, ...]
    is_serving: bool


@dataclass(frozen=True, slots=True)
class Transferred:
    master: str
    epoch: int
    refused_ms: int


class GroupStatus(Protocol):
    """What the control port needs of a replica."""

    def describe(self) -> ReplicaInfo:
        """How it stands now."""
        ...

    async def transfer(self, to: str) -> Transferred:
        """Hand the mastership over. Raises NotMaster, InvalidArgument, Unavailable."""
        ...

    async def change(self, *, add: str = "", remove: str = "") -> ReplicaInfo:
        """Let a replica join or leave. Raises NotMaster, InvalidArgument, Unavailable."""
        ...

    def read_log(self, log: int, position: int, bytes_max: int) -> bytes:
        """Whole entries of a log from a position on, their checksums checked. Raises LogDamaged, InvalidArgument."""
        ...


class SingleGroupStatus:
    """A node that has no replicas, and can have none."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def describe(self) -> ReplicaInfo:
        store, name = self._broker.store, self._broker.config.name
        return ReplicaInfo(
            name,
            "master",
            store.epoch,
            name,
            store.index,
            store.flushed_index,
            store.committed_index,
            store.messages.end,
            store.actions.end,
            True,
            1,
            (name,),
            (),
            (),
            True,
        )

    async def transfer(self, to: str) -> Transferred:
        """Raises InvalidArgument."""
        raise InvalidArgument("this node has no replicas: there is nobody to hand over to")

    async def change(self, *, add: str = "", remove: str = "") -> ReplicaInfo:
        """Raises InvalidArgument."""
        raise InvalidArgument("a `qmq dev` node stays alone: start a cluster with `qmq broker` (docs/DEPLOY.md)")

    def read_log(self, log: int, position: int, bytes_max: int) -> bytes:
        """Raises InvalidArgument."""
        raise InvalidArgument("this node has no replicas to read its log")
