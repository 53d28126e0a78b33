"""Asks a delay replica for the state of its schedule, piece by piece: it may be longer than an answer (delay.proto, DescribeSchedule)."""

from __future__ import annotations

from typing import Any, Final

from qmq.errors import Unavailable
from qmq.proto.v1 import delay_pb2 as pb

TRIES: Final = 5
"""A checkpoint that is written between two pieces makes them useless."""


async def describe_schedule(stub: Any, *, timeout_s: float) -> pb.ScheduleDescription:
    """The whole state. `timeout_s` is for one piece. Raises grpc.RpcError; Unavailable if checkpoints follow each other too fast."""
    for _ in range(TRIES):
        found: pb.ScheduleDescription = await stub.DescribeSchedule(pb.DescribeScheduleRequest(offset=0), timeout=timeout_s)
        pieces, size = [found.state], len(found.state)
        piece = found
        while size < found.state_bytes and piece.state:
            piece = await stub.DescribeSchedule(pb.DescribeScheduleRequest(offset=size), timeout=timeout_s)
            if (piece.index, piece.state_bytes) != (found.index, found.state_bytes):
                break
            pieces.append(piece.state)
            size += len(piece.state)
        if size >= found.state_bytes:
            return pb.ScheduleDescription(state=b"".join(pieces), index=found.index, state_bytes=found.state_bytes)
    raise Unavailable("the replica writes checkpoints faster than its schedule's state can be read: ask again later")
