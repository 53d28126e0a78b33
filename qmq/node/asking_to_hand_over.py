"""Asks a replica of this machine to hand its mastership over, before its process is stopped (`qmq broker hand-over`, a pod's preStop).

A process that gets SIGTERM hands over, too. An earlier hand-over has two advantages. The former master still answers, so it sends clients
to the new master instead of closing their connections. And a hand-over that fails, because no other replica is in step, is tried again.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import grpc

from qmq.errors import Unavailable
from qmq.network import Network
from qmq.proto.v1 import control_pb2 as pb
from qmq.proto.v1 import control_pb2_grpc
from qmq.rpc import typed_error
from qmq.server_name import ServerName, always

CALL_S: Final = 5.0
"""The deadline of one answer. It is longer than a replica waits for its successor."""
AGAIN_S: Final = 0.2
MASTER: Final = "master"


async def hand_over(network: Network, address: str, replica: ServerName, wait_s: float) -> str:
    """Ask until another replica leads, or there is no other voter. `address` is the `replica`'s control port. Returns the group's master.

    Raises Unavailable if no other replica has taken over after `wait_s`, or the replica does not answer; AccessDenied.
    """
    channel = network.channel(address, always(replica))
    stub = control_pb2_grpc.BrokerControlStub(channel)
    try:
        async with asyncio.timeout(wait_s) as limit:
            while True:
                try:
                    return await _once(stub, address)
                except Unavailable:
                    remaining_s = (limit.when() or 0.0) - asyncio.get_running_loop().time()
                    if remaining_s < AGAIN_S:
                        raise
                await asyncio.sleep(AGAIN_S)
    except TimeoutError:
        raise Unavailable(f"no other replica took over from {address} within {wait_s:g} s: see `qmq cluster status`") from None
    finally:
        await channel.close()


async def _once(stub: Any, address: str) -> str:
    try:
        now: pb.ReplicaStatus = await stub.DescribeReplica(pb.DescribeReplicaRequest(), timeout=CALL_S)
        if now.role != MASTER or set(now.voters) <= {now.replica}:
            return now.master
        done: pb.TransferResponse = await stub.Transfer(pb.TransferRequest(), timeout=CALL_S)
        return done.master
    except grpc.RpcError as failure:  # a TLS channel raises another subclass than a plain one
        raise typed_error(failure, address) from failure
