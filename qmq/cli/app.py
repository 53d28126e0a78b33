"""The commands of `qmq`, and the command line that has them.

`COMMANDS` is the table of all commands: what `qmq --help` says of each, and where it is. The module
of a command is imported here, by its name, when the command runs, is completed or shows its help.
So a command pays for no library that only others need.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Annotated, Any, Final

import typer
from typer._completion_classes import completion_init
from typer.core import TyperCommand, TyperGroup
from typer.main import get_group

import qmq
from qmq.cli import missing
from qmq.cli.added_options import add_options, complete_names
from qmq.cli.arguments import GIVEN
from qmq.cli.output import CommandGroup, Section, fail
from qmq.cli.plain_values import take_plain_values, take_plain_values_below
from qmq.errors import QmqError
from qmq.security.contexts import environment_of

WORDS_AS_GIVEN: Final[dict[str, Any]] = {
    "allow_extra_args": True,
    "allow_interspersed_args": False,
    "ignore_unknown_options": True,
    "help_option_names": list[str](),
}
"""Makes typer pass the words behind a command through, `--help` included."""


@dataclass(frozen=True, slots=True)
class CommandEntry:
    """A command, or a group of commands. `place` is "module:name", the name that of a function or
    of a `typer.Typer`. `about` is the first sentence of its help.
    """

    section: Section
    place: str
    about: str
    settings: dict[str, Any] | None = None


COMMANDS: Final[Mapping[str, CommandEntry]] = {
    "produce": CommandEntry(
        Section.MESSAGES,
        "qmq.cli.produce:produce",
        "Send each line as a message, from a file or standard input.",
    ),
    "consume": CommandEntry(
        Section.MESSAGES,
        "qmq.cli.consume:consume",
        "Print messages, one per line, and acknowledge them.",
    ),
    "browse": CommandEntry(
        Section.MESSAGES, "qmq.cli.browse:browse", "Show stored messages, oldest first."
    ),
    "tail": CommandEntry(
        Section.MESSAGES,
        "qmq.cli.browse:tail",
        "Show the newest messages, then new ones as they are stored, until Ctrl-C.",
    ),
    "export": CommandEntry(
        Section.MESSAGES,
        "qmq.cli.transfer.commands:export",
        "Write stored messages as JSON lines or Parquet, with ids, keys, tags, headers and times.",
    ),
    "import": CommandEntry(
        Section.MESSAGES,
        "qmq.cli.transfer.commands:load",
        "Send the records of a file, in the format of `qmq export`, to an existing subject.",
    ),
    "copy": CommandEntry(
        Section.MESSAGES,
        "qmq.cli.transfer.commands:copy",
        (
            "Copy stored messages, with ids, keys, tags, headers and create times; the order "
            "of each key is kept."
        ),
    ),
    "why": CommandEntry(
        Section.MESSAGES, "qmq.cli.message:why", "Explain where a message is and what it waits for."
    ),
    "message": CommandEntry(
        Section.MESSAGES, "qmq.cli.message:app", "Find, show or trace a message by its id."
    ),
    "delay": CommandEntry(
        Section.MESSAGES,
        "qmq.cli.delay:app",
        "Run a delay server; list, show, cancel or move delayed messages.",
    ),
    "dlq": CommandEntry(
        Section.MESSAGES,
        "qmq.cli.dlq:app",
        "Dead letters and parked keys: list, show, replay, purge, delete.",
    ),
    "subject": CommandEntry(
        Section.SUBJECTS,
        "qmq.cli.subject:app",
        "Subjects: list, create, show, alter, place, purge, delete; their schemas.",
    ),
    "group": CommandEntry(
        Section.SUBJECTS,
        "qmq.cli.group:app",
        "Consumer groups: list, show, reset, delete, set, settings.",
    ),
    "pause": CommandEntry(
        Section.SUBJECTS,
        "qmq.cli.group:pausing",
        "Pause a group, a consumer or a client; list who is paused.",
    ),
    "resume": CommandEntry(
        Section.SUBJECTS, "qmq.cli.group:resuming", "Resume a paused group, consumer or client."
    ),
    "route": CommandEntry(
        Section.SUBJECTS,
        "qmq.cli.route:app",
        "Routes of ordered subjects: show, split, merge, move, history, policy, export.",
    ),
    "doctor": CommandEntry(
        Section.CLUSTER,
        "qmq.cli.doctor:doctor",
        (
            "Examine the cluster and report what is unusual, why it matters, and which "
            "command to try next."
        ),
    ),
    "top": CommandEntry(
        Section.CLUSTER,
        "qmq.cli.top:top",
        (
            "Show rates in and out, lag in messages and in time, and broker groups, "
            "refreshed until q or Ctrl-C."
        ),
    ),
    "transfer": CommandEntry(
        Section.CLUSTER,
        "qmq.cli.cluster:transfer",
        "Transfer a group's mastership, for example before maintenance.",
    ),
    "cluster": CommandEntry(
        Section.CLUSTER, "qmq.cli.cluster:app", "The cluster: broker groups and replicas."
    ),
    "replica": CommandEntry(
        Section.CLUSTER, "qmq.cli.cluster:replicas", "Replicas of a broker group: add, remove."
    ),
    "backup": CommandEntry(
        Section.CLUSTER, "qmq.cli.backup:app", "Back up a whole cluster, and restore it."
    ),
    "mirror": CommandEntry(
        Section.CLUSTER, "qmq.cli.mirror_commands:app", "Mirror subjects in a second cluster."
    ),
    "health": CommandEntry(
        Section.CLUSTER,
        "qmq.cli.doctor:health",
        "Check whether a server is ready: exit status 0 if it is.",
    ),
    "bench": CommandEntry(
        Section.CLUSTER,
        "qmq.cli.bench:app",
        "Measure the cluster from this machine: pub, sub, latency.",
    ),
    "whoami": CommandEntry(
        Section.ACCESS,
        "qmq.cli.acl:whoami",
        "Show which principal the cluster sees, and how it was authenticated.",
    ),
    "acl": CommandEntry(
        Section.ACCESS,
        "qmq.cli.acl:rules",
        "Access rules: who may do what, and whether the rules are enforced.",
    ),
    "role": CommandEntry(
        Section.ACCESS, "qmq.cli.acl:roles", "Roles: sets of principals that a rule can name."
    ),
    "user": CommandEntry(Section.ACCESS, "qmq.cli.acl:users", "Tokens of applications and people."),
    "quota": CommandEntry(
        Section.ACCESS, "qmq.cli.acl:quotas", "Quotas: how much a principal may use."
    ),
    "cert": CommandEntry(Section.ACCESS, "qmq.cli.security:app", "Make certificates for TLS."),
    "etcd": CommandEntry(Section.ACCESS, "qmq.cli.security:etcd_users", "etcd's own users."),
    "dev": CommandEntry(
        Section.SERVERS,
        "qmq.cli.dev:dev",
        (
            "Run a whole node in this process: metaserver, broker, delay server and "
            "coordination store, on one data folder."
        ),
    ),
    "meta": CommandEntry(
        Section.SERVERS,
        "qmq.cli.meta:meta",
        "Run a metaserver, which locates subjects for clients and administers the cluster.",
    ),
    "gateway": CommandEntry(
        Section.SERVERS,
        "qmq.cli.gateway:gateway",
        (
            "Run a gateway for Apache RocketMQ 5 clients (gRPC): Java, Go, C++, C#, Node, "
            "Rust, Python."
        ),
    ),
    "console": CommandEntry(Section.SERVERS, "qmq.cli.console:console", "Serve the web console."),
    "broker": CommandEntry(
        Section.SERVERS,
        "qmq.cli.broker:app",
        "Run a broker, hand its mastership over; drain or resume a broker group.",
    ),
    "spark": CommandEntry(
        Section.APPLICATIONS, "qmq.cli.spark:spark", "Run a Spark job over the log.", WORDS_AS_GIVEN
    ),
    "outbox": CommandEntry(
        Section.APPLICATIONS,
        "qmq.cli.outbox:app",
        "The outbox: messages sent in an application's database transactions.",
    ),
    "dedup": CommandEntry(
        Section.APPLICATIONS,
        "qmq.cli.outbox:dedup",
        "The deduplication table in an application's own database.",
    ),
    "lake": CommandEntry(
        Section.APPLICATIONS, "qmq.cli.lake:app", "Subjects as Apache Iceberg tables."
    ),
    "config": CommandEntry(
        Section.HERE,
        "qmq.cli.contexts:config",
        (
            "Show the settings that commands use, and the origin of each: argument, "
            "environment, context or default."
        ),
    ),
    "completion": CommandEntry(
        Section.HERE,
        "qmq.cli.added_options:completion",
        (
            "Print a script that makes the shell complete qmq's commands, options, subjects "
            "and groups."
        ),
    ),
    "context": CommandEntry(
        Section.HERE, "qmq.cli.contexts:app", "Named clusters: addresses, certificates and tokens."
    ),
    "log": CommandEntry(Section.HERE, "qmq.cli.logs:app", "Log files: dump a segment."),
}
"""By name, in the order of `qmq --help`."""

Command = TyperCommand | TyperGroup


@cache
def loaded(name: str) -> Command:
    """A command, with the options and the completion that all commands have. Raises KeyError."""
    entry = COMMANDS[name]
    module, _, attribute = entry.place.partition(":")
    try:
        found = getattr(import_module(module), attribute)
    except ImportError as cause:
        sys.exit(missing(cause))
    alone = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
    if isinstance(found, typer.Typer):
        alone.add_typer(found, name=name, cls=CommandGroup, rich_help_panel=entry.section)
    else:
        alone.command(name, context_settings=entry.settings, rich_help_panel=entry.section)(found)
    complete_names(alone)
    add_options(alone)
    command = get_group(alone).commands[name]
    take_plain_values_below(command)
    assert isinstance(command, TyperCommand | TyperGroup)
    return command


class LoadedCommands(Mapping[str, Command]):
    """All commands by name. Each is loaded when it is looked up."""

    def __getitem__(self, name: str) -> Command:
        return loaded(name)

    def __contains__(self, name: object) -> bool:
        return name in COMMANDS

    def get(self, name: str, default: Any = None) -> Any:
        """Not by KeyError, which the import of a command's module may raise."""
        return loaded(name) if name in COMMANDS else default

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


class RootGroup(CommandGroup):
    """`qmq` itself."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**(given | {"commands": LoadedCommands()}))
        take_plain_values(self)

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        """Their names; typer would look up the commands, too."""
        return list(COMMANDS)

    def listed(self, ctx: typer.Context) -> Iterator[tuple[str, str, str]]:
        """See `CommandGroup.listed`: from the table."""
        for name, each in COMMANDS.items():
            yield each.section, name, each.about


app = typer.Typer(
    name="qmq",
    no_args_is_help=True,
    add_completion=False,  # `qmq completion` prints the script
    cls=RootGroup,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="QMQ: a distributed message broker.",
)


@app.callback(invoke_without_command=True)
def root(
    invoked: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """QMQ: a distributed message broker."""
    if version:
        typer.echo(qmq.__version__)
        raise typer.Exit
    invoked.meta[GIVEN] = dict(os.environ)
    try:
        os.environ.update(environment_of(uses_current=True))
    except (OSError, QmqError) as failure:
        if invoked.invoked_subcommand not in ("context", "config"):
            fail(failure)


completion_init()
