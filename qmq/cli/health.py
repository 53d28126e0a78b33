"""`qmq health`: whether a server serves, for whoever starts and watches processes. Exit status 0 if it does, 3 if it does not."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from qmq.cli.output import Json, run, show
from qmq.errors import NotConnected

app = typer.Typer(no_args_is_help=True, help="Whether a server serves: exit status 0 if it does.")

HEALTH_S: Final = 3.0
"""Below the five seconds that docker-compose.yml gives a check, with the time that Python needs to start."""

Address = Annotated[str, typer.Argument(help="HOST:PORT.")]


@app.command("meta")
def meta(address: Address = "localhost:20880", as_json: Json = False) -> None:
    """Ask a metaserver for the first answer of a watch: it comes at once, out of memory, whoever else is away."""
    run(_meta(address))
    show("health", ("address", "health"), [(address, "serving")], as_json=as_json)


async def _meta(address: str) -> None:
    import grpc

    from qmq.proto.v1 import meta_pb2, meta_pb2_grpc
    from qmq.rpc import CHANNEL_OPTIONS, typed_error

    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        call = meta_pb2_grpc.MetaStub(channel).Watch(meta_pb2.WatchRequest(), timeout=HEALTH_S)
        try:
            async for _ in call:
                call.cancel()
                return
        except grpc.aio.AioRpcError as cause:
            raise typed_error(cause, address) from cause
    raise NotConnected(f"what answers at {address} ended the watch at once")


@app.command("broker")
def broker(address: Address = "localhost:20882", as_json: Json = False) -> None:
    """Ask a broker's control port how its replica stands: a slave is as healthy as a master."""
    role = run(_broker(address))
    show("health", ("address", "health"), [(address, role)], as_json=as_json)


async def _broker(address: str) -> str:
    import grpc

    from qmq.proto.v1 import control_pb2, control_pb2_grpc
    from qmq.rpc import CHANNEL_OPTIONS, typed_error

    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        stub = control_pb2_grpc.BrokerControlStub(channel)
        try:
            status = await stub.DescribeReplica(control_pb2.DescribeReplicaRequest(), timeout=HEALTH_S)
        except grpc.aio.AioRpcError as cause:
            raise typed_error(cause, address) from cause
    return str(status.role)
