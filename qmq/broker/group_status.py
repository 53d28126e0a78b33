"""A broker's status in its group, and operators' changes of it. A node without replicas is a group of one."""

from __future__ import annotations

from typing import Protocol

from qmq.broker.broker import Broker
from qmq.errors import InvalidArgument
from qmq.proto.v1 import control_pb2 as pb


class GroupStatus(Protocol):
    """The replica's interface for the control port."""

    def describe(self) -> pb.ReplicaStatus:
        """The replica's status; the control port adds the rest."""
        ...

    async def transfer(self, to: str) -> pb.TransferResponse:
        """Hand the mastership over. Raises NotMaster, InvalidArgument, Unavailable."""
        ...

    async def change(self, *, add: str = "", remove: str = "") -> pb.ChangeReplicasResponse:
        """Add a replica to the group, or remove one. Raises NotMaster, InvalidArgument, Unavailable."""
        ...

    def read_log(self, log: int, position: int, bytes_max: int) -> bytes:
        """Whole entries of a log from a position on, their checksums checked. Raises LogDamaged, InvalidArgument."""
        ...

    async def hold(self, token: str, hold_ms: int) -> None:
        """Begin no new request for a time. Raises NotMaster, InvalidArgument, Unavailable."""
        ...

    async def held_logs(self, token: str) -> pb.HeldLogs:
        """The ends of the logs; everything before them is committed. Raises Unavailable if the hold has ended."""
        ...

    def release(self, token: str) -> None:
        """End a hold. Raises Unavailable if the hold had ended before."""
        ...


class SingleGroupStatus:
    """The status of a node that has no replicas."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def describe(self) -> pb.ReplicaStatus:
        store, name = self._broker.store, self._broker.config.name
        return pb.ReplicaStatus(
            replica=name,
            role="master",
            epoch=store.epoch,
            master=name,
            last_index=store.index,
            stored_index=store.flushed_index,
            commit_index=store.committed_index,
            message_position=store.messages.end,
            action_position=store.actions.end,
            is_whole=True,
            membership_version=1,
            voters=[name],
            is_serving=True,
        )

    async def transfer(self, to: str) -> pb.TransferResponse:
        """Raises InvalidArgument."""
        raise InvalidArgument("a `qmq dev` node has no other replica to transfer the mastership to")

    async def change(self, *, add: str = "", remove: str = "") -> pb.ChangeReplicasResponse:
        """Raises InvalidArgument."""
        raise InvalidArgument("a `qmq dev` node cannot have replicas: start a cluster with `qmq broker` (docs/DEPLOY.md)")

    def read_log(self, log: int, position: int, bytes_max: int) -> bytes:
        """Raises InvalidArgument."""
        raise InvalidArgument("this node has no replicas to read its log")

    async def hold(self, token: str, hold_ms: int) -> None:
        """Raises InvalidArgument."""
        raise InvalidArgument("a `qmq dev` node cannot be backed up while it runs: stop it, and copy its folder")

    async def held_logs(self, token: str) -> pb.HeldLogs:
        """Raises InvalidArgument."""
        raise InvalidArgument("a `qmq dev` node cannot hold writes: only replicas of a broker group can")

    def release(self, token: str) -> None:
        """Raises InvalidArgument."""
        raise InvalidArgument("a `qmq dev` node cannot hold writes: only replicas of a broker group can")
