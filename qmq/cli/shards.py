"""Derives the options of each shard from those of `qmq broker --shards N`. Pure; docs/SHARDS.md."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar, get_type_hints

import typer

from qmq.cli.arguments import port_of
from qmq.cli.roles import ReplicaOptions
from qmq.shard_names import shard_name

if TYPE_CHECKING:
    from qmq.node.shard_supervisor import ShardCommand

SHARDS_MAX: Final = 256
PORT_STEP: Final = 10
_SHOWN: Final = ("group", "replica", "data", "data_port", "control_port", "metrics_port")
"""Options passed on a shard's command line, where `ps` shows them. All others are passed as variables, because some are secret."""


@dataclass(frozen=True)
class ShardedOptions(ReplicaOptions):
    """Options of a server that can run as several processes."""

    shards: Annotated[
        int,
        typer.Option(
            envvar="QMQ_SHARDS", min=1, max=SHARDS_MAX, help="Number of processes, each its own broker group: GROUP.1, GROUP.2 ..."
        ),
    ] = 1

    def processes(self) -> Sequence[ReplicaOptions]:
        return [self] if self.shards == 1 else [shard_options(self, shard) for shard in range(1, self.shards + 1)]


_S = TypeVar("_S", bound=ShardedOptions)


def shard_options(options: _S, shard: int) -> _S:
    """The options of one shard; shards count from 1. Raises InvalidArgument if a port would be out of range."""

    def port(given: int) -> int:
        return port_of("shards", shard - 1, given, PORT_STEP)

    audit = options.audit_log
    return replace(
        options,
        shards=1,
        group=shard_name(options.group, shard),
        data=options.data / f"shard-{shard}",
        data_port=port(options.data_port),
        control_port=port(options.control_port),
        metrics_port=None if options.metrics_port is None else port(options.metrics_port),
        audit_log=None if audit is None else audit.with_name(f"{audit.stem}.{shard}{audit.suffix}"),
    )


def shard_command(options: ShardedOptions, environment: Mapping[str, str]) -> ShardCommand:
    """The command and environment of a shard's process. The given options override `environment`, which is the supervisor's."""
    return process_command("broker", options, _SHOWN, environment, verbose=options.verbose)


def process_command(verb: str, options: Any, shown: Sequence[str], environment: Mapping[str, str], *, verbose: bool) -> ShardCommand:
    """How to run `qmq VERB` with these options: those of `shown` on the command line, and all as variables."""
    from qmq.node.shard_supervisor import ShardCommand

    variables = _variables(type(options))
    given = {variable: _text(getattr(options, name)) for name, variable in variables.items()}
    kept = {name: value for name, value in environment.items() if name not in given}
    arguments = [sys.executable, "-m", "qmq.cli", verb]
    for name in shown:
        value = _text(getattr(options, name))
        if value is not None:
            arguments += [f"--{name.replace('_', '-')}", value]
    if verbose:
        arguments.append("--verbose")
    return ShardCommand(tuple(arguments), {**kept, **{name: value for name, value in given.items() if value is not None}})


def _variables(options: type) -> dict[str, str]:
    """The variable of each option."""
    hints = get_type_hints(options, include_extras=True)
    found: dict[str, Any] = {each.name: hints[each.name].__metadata__[0].envvar for each in fields(options)}
    return {name: variable for name, variable in found.items() if variable is not None}


def _text(value: object) -> str | None:
    if value is None or value == "":
        return None
    if isinstance(value, bool):
        return "1" if value else "0"
    return str(value) if not isinstance(value, Path) else str(value.absolute())
