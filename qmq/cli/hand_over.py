"""`qmq broker hand-over` and `qmq delay hand-over`: before a replica's process is stopped."""

from __future__ import annotations

from typing import Annotated

import typer

from qmq.cli.output import Json, fail, run, show
from qmq.cli.roles import ReplicaOptions
from qmq.errors import QmqError

Wait = Annotated[float, typer.Option("--wait", min=0, help="For how many seconds it is tried while no other replica can take over.")]


def hand_over(context: typer.Context, wait: Wait = 30.0, as_json: Json = False) -> None:
    """Hand the mastership of this machine's replica over, if it is the master, before its process is stopped.

    The options before the verb, and their variables, are those of the server: its control port, the host that it advertises, its
    certificates. A process that gets SIGTERM hands over, too; this command waits for it, and the former master still answers clients.
    """
    assert context.parent is not None
    options = context.parent.obj
    assert isinstance(options, ReplicaOptions)
    run(_hand_over(options, wait, as_json=as_json))


async def _hand_over(options: ReplicaOptions, wait_s: float, *, as_json: bool) -> None:
    import asyncio

    from qmq.node.asking_to_hand_over import hand_over as ask
    from qmq.security.tls_network import network_of
    from qmq.server_name import ServerName

    try:
        network = network_of(options.tls())
        replicas = options.processes()
        asked = [ask(network, each.control_address(), ServerName(group=each.group, replica=each.replica), wait_s) for each in replicas]
        masters = await asyncio.gather(*asked)
    except QmqError as failure:
        fail(failure)
    rows = [(each.group, each.replica, master) for each, master in zip(replicas, masters, strict=True)]
    show("masters", ("group", "replica", "master"), rows, as_json=as_json)
