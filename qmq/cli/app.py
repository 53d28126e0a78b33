"""Builds the command line from all groups of verbs."""

from __future__ import annotations

import os
from typing import Annotated

import typer

import qmq
from qmq.cli import (
    acl,
    bench,
    broker_role,
    browse,
    cert,
    cluster_commands,
    completing,
    console,
    consume,
    copying,
    dedup_commands,
    delay,
    dev,
    dlq,
    doctor,
    exporting,
    gateway,
    group,
    health,
    lake_commands,
    logs,
    message_commands,
    meta,
    named_clusters,
    outbox_commands,
    pause,
    produce,
    protect_etcd,
    replica,
    route_commands,
    settings,
    spark,
    subject,
    top,
    why,
)
from qmq.cli.added_options import add_options
from qmq.cli.completing import complete_names
from qmq.cli.output import fail
from qmq.errors import QmqError
from qmq.security.contexts import environment_of

app = typer.Typer(name="qmq", no_args_is_help=True, pretty_exceptions_enable=False, help="QMQ: a distributed message broker.")
app.command("dev")(dev.dev)
app.command("meta")(meta.meta)
app.add_typer(broker_role.app, name="broker")
app.add_typer(delay.app, name="delay")
app.command("gateway")(gateway.gateway)
app.command("produce")(produce.produce)
app.command("consume")(consume.consume)
app.command("browse")(browse.browse)
app.command("tail")(browse.tail)
app.command("export")(exporting.export)
app.command("import")(exporting.load)
app.command("copy")(copying.copy)
app.add_typer(bench.app, name="bench")
app.add_typer(subject.app, name="subject")
app.add_typer(group.app, name="group")
app.add_typer(pause.pausing, name="pause")
app.add_typer(pause.resuming, name="resume")
app.add_typer(route_commands.app, name="route")
app.add_typer(dlq.app, name="dlq")
app.add_typer(message_commands.app, name="message")
app.add_typer(outbox_commands.app, name="outbox")
app.add_typer(dedup_commands.app, name="dedup")
app.command("why")(why.why)
app.command("console")(console.console)
app.add_typer(logs.app, name="log")
app.add_typer(cert.app, name="cert")
app.add_typer(protect_etcd.app, name="etcd")
app.add_typer(acl.rules, name="acl")
app.add_typer(acl.roles, name="role")
app.add_typer(acl.users, name="user")
app.add_typer(acl.quotas, name="quota")
app.add_typer(named_clusters.app, name="context")
app.command("config")(settings.config)
app.command("whoami")(acl.whoami)
app.add_typer(cluster_commands.app, name="cluster")
app.command("doctor")(doctor.doctor)
app.command("top")(top.top)
app.add_typer(replica.app, name="replica")
app.command("transfer")(replica.transfer)
app.add_typer(health.app, name="health")
app.add_typer(lake_commands.app, name="lake")
app.command("spark", context_settings=spark.CONTEXT)(spark.spark)


@app.callback(invoke_without_command=True)
def root(invoked: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """QMQ: a distributed message broker."""
    invoked.meta[settings.GIVEN] = dict(os.environ)
    try:
        os.environ.update(environment_of(uses_current=True))
    except (OSError, QmqError) as failure:
        if invoked.invoked_subcommand not in ("context", "config"):
            fail(failure)
    if version:
        typer.echo(qmq.__version__)
        raise typer.Exit


app.command("completion")(completing.completion)
complete_names(app)
add_options(app)
