"""`qmq broker confirm-clock` and `qmq delay confirm-clock`: an operator says that a machine's clock is right."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from qmq.cli.output import Json, fail, run, show
from qmq.cli.roles import ReplicaOptions
from qmq.errors import InvalidArgument, QmqError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

CALL_S: Final = 5.0

Yes = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")]


def confirm_clock(context: typer.Context, yes: Yes = False, as_json: Json = False) -> None:
    """Confirm that the clock of this machine is right: the retention of its replica, which waited for that, follows the clock immediately.

    Messages that are older than retention by the confirmed time are deleted then. The options before the verb, and their variables, are
    those of the server. Compare the clock with another source first.
    """
    assert context.parent is not None
    options = context.parent.obj
    assert isinstance(options, ReplicaOptions)
    try:
        replicas = options.processes()
        seen_ms = [run(_describe(each)) for each in replicas]
        if not yes:
            shown = ", ".join(datetime.fromtimestamp(each / 1000, UTC).isoformat(" ", "seconds") for each in sorted(set(seen_ms)))
            names = ",".join(each.replica for each in replicas)
            text = f"the clock shows {shown}: type {names} if this is right, then retention deletes messages by it"
            if typer.prompt(text, err=True) != names:
                fail(InvalidArgument("that is not the replica's name: nothing was confirmed"))
        behind_ms = [run(_confirm(each, time_ms)) for each, time_ms in zip(replicas, seen_ms, strict=True)]
    except QmqError as failure:
        fail(failure)
    rows = [(each.group, each.replica, *times) for each, *times in zip(replicas, seen_ms, behind_ms, strict=True)]
    show("confirmed", ("group", "replica", "time ms", "behind ms"), rows, as_json=as_json)


async def _describe(replica: ReplicaOptions) -> int:
    from qmq.proto.v1 import control_pb2 as pb

    return int((await _asked(replica, lambda stub: stub.DescribeReplica(pb.DescribeReplicaRequest(), timeout=CALL_S))).time_ms)


async def _confirm(replica: ReplicaOptions, time_ms: int) -> int:
    from qmq.proto.v1 import control_pb2 as pb

    request = pb.ConfirmClockRequest(time_ms=time_ms)
    return int((await _asked(replica, lambda stub: stub.ConfirmClock(request, timeout=CALL_S))).behind_ms)


async def _asked(replica: ReplicaOptions, ask: Callable[[Any], Awaitable[Any]]) -> Any:
    import grpc

    from qmq.proto.v1 import control_pb2_grpc
    from qmq.rpc.channel import typed_error
    from qmq.rpc.server_name import ServerName, always
    from qmq.rpc.tls_network import network_of

    address = replica.control_address()
    channel = network_of(replica.tls()).channel(address, always(ServerName(group=replica.group, replica=replica.replica)))
    try:
        return await ask(control_pb2_grpc.BrokerControlStub(channel))
    except grpc.RpcError as failure:  # a TLS channel raises another subclass than a plain one
        raise typed_error(failure, address) from failure
    finally:
        await channel.close()
