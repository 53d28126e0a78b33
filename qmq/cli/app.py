"""Builds the command line from all groups of verbs."""

from __future__ import annotations

import os
from typing import Annotated

import typer
from typer._completion_classes import completion_init

import qmq
from qmq.cli import (
    acl,
    backup,
    bench,
    broker,
    browse,
    cluster,
    console,
    consume,
    contexts,
    delay,
    dev,
    dlq,
    doctor,
    gateway,
    group,
    lake,
    logs,
    message,
    meta,
    mirror_commands,
    outbox,
    produce,
    route,
    security,
    spark,
    subject,
    top,
)
from qmq.cli.added_options import add_options, complete_names, completion
from qmq.cli.output import CommandGroup, Section, fail
from qmq.cli.transfer import commands
from qmq.errors import QmqError
from qmq.security.contexts import environment_of

app = typer.Typer(
    name="qmq",
    no_args_is_help=True,
    add_completion=False,  # `qmq completion` prints the script
    cls=CommandGroup,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="QMQ: a distributed message broker.",
)
app.command("produce", rich_help_panel=Section.MESSAGES)(produce.produce)
app.command("consume", rich_help_panel=Section.MESSAGES)(consume.consume)
app.command("browse", rich_help_panel=Section.MESSAGES)(browse.browse)
app.command("tail", rich_help_panel=Section.MESSAGES)(browse.tail)
app.command("export", rich_help_panel=Section.MESSAGES)(commands.export)
app.command("import", rich_help_panel=Section.MESSAGES)(commands.load)
app.command("copy", rich_help_panel=Section.MESSAGES)(commands.copy)
app.command("why", rich_help_panel=Section.MESSAGES)(message.why)
app.add_typer(message.app, name="message", cls=CommandGroup, rich_help_panel=Section.MESSAGES)
app.add_typer(delay.app, name="delay", cls=CommandGroup, rich_help_panel=Section.MESSAGES)
app.add_typer(dlq.app, name="dlq", cls=CommandGroup, rich_help_panel=Section.MESSAGES)
app.add_typer(subject.app, name="subject", cls=CommandGroup, rich_help_panel=Section.SUBJECTS)
app.add_typer(group.app, name="group", cls=CommandGroup, rich_help_panel=Section.SUBJECTS)
app.add_typer(group.pausing, name="pause", cls=CommandGroup, rich_help_panel=Section.SUBJECTS)
app.add_typer(group.resuming, name="resume", cls=CommandGroup, rich_help_panel=Section.SUBJECTS)
app.add_typer(route.app, name="route", cls=CommandGroup, rich_help_panel=Section.SUBJECTS)
app.command("doctor", rich_help_panel=Section.CLUSTER)(doctor.doctor)
app.command("top", rich_help_panel=Section.CLUSTER)(top.top)
app.add_typer(cluster.app, name="cluster", cls=CommandGroup, rich_help_panel=Section.CLUSTER)
app.command("transfer", rich_help_panel=Section.CLUSTER)(cluster.transfer)
app.add_typer(cluster.replicas, name="replica", cls=CommandGroup, rich_help_panel=Section.CLUSTER)
app.add_typer(backup.app, name="backup", cls=CommandGroup, rich_help_panel=Section.CLUSTER)
app.add_typer(mirror_commands.app, name="mirror", cls=CommandGroup, rich_help_panel=Section.CLUSTER)
app.add_typer(doctor.health, name="health", cls=CommandGroup, rich_help_panel=Section.CLUSTER)
app.add_typer(bench.app, name="bench", cls=CommandGroup, rich_help_panel=Section.CLUSTER)
app.command("whoami", rich_help_panel=Section.ACCESS)(acl.whoami)
app.add_typer(acl.rules, name="acl", cls=CommandGroup, rich_help_panel=Section.ACCESS)
app.add_typer(acl.roles, name="role", cls=CommandGroup, rich_help_panel=Section.ACCESS)
app.add_typer(acl.users, name="user", cls=CommandGroup, rich_help_panel=Section.ACCESS)
app.add_typer(acl.quotas, name="quota", cls=CommandGroup, rich_help_panel=Section.ACCESS)
app.add_typer(security.app, name="cert", cls=CommandGroup, rich_help_panel=Section.ACCESS)
app.add_typer(security.etcd_users, name="etcd", cls=CommandGroup, rich_help_panel=Section.ACCESS)
app.command("dev", rich_help_panel=Section.SERVERS)(dev.dev)
app.command("meta", rich_help_panel=Section.SERVERS)(meta.meta)
app.add_typer(broker.app, name="broker", cls=CommandGroup, rich_help_panel=Section.SERVERS)
app.command("gateway", rich_help_panel=Section.SERVERS)(gateway.gateway)
app.command("console", rich_help_panel=Section.SERVERS)(console.console)
app.add_typer(outbox.app, name="outbox", cls=CommandGroup, rich_help_panel=Section.APPLICATIONS)
app.add_typer(outbox.dedup, name="dedup", cls=CommandGroup, rich_help_panel=Section.APPLICATIONS)
app.add_typer(lake.app, name="lake", cls=CommandGroup, rich_help_panel=Section.APPLICATIONS)
app.command("spark", context_settings=spark.CONTEXT, rich_help_panel=Section.APPLICATIONS)(
    spark.spark
)
app.add_typer(contexts.app, name="context", cls=CommandGroup, rich_help_panel=Section.HERE)
app.command("config", rich_help_panel=Section.HERE)(contexts.config)
app.add_typer(logs.app, name="log", cls=CommandGroup, rich_help_panel=Section.HERE)


@app.callback(invoke_without_command=True)
def root(
    invoked: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """QMQ: a distributed message broker."""
    invoked.meta[contexts.GIVEN] = dict(os.environ)
    try:
        os.environ.update(environment_of(uses_current=True))
    except (OSError, QmqError) as failure:
        if invoked.invoked_subcommand not in ("context", "config"):
            fail(failure)
    if version:
        typer.echo(qmq.__version__)
        raise typer.Exit


app.command("completion", rich_help_panel=Section.HERE)(completion)
complete_names(app)
completion_init()
add_options(app)
