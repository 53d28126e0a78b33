"""`qmq mirror`: the subjects of a cluster in a second one,
with the progress of groups (docs/BACKUP.md).
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import typer

import qmq
from qmq.cli.arguments import SECONDS_MAX
from qmq.cli.output import SERVER, Json, Server, fail, run, show, time_text
from qmq.cli.roles import ProcessFlags, set_up_logging, taking
from qmq.cli.transfer.commands import connected, target_of
from qmq.client.consuming.ack_spool import user_state_folder
from qmq.errors import InvalidArgument, QmqError

app = typer.Typer(help="Mirror subjects in a second cluster.", no_args_is_help=True)
log = logging.getLogger("qmq.mirror")

COLUMNS: Final = ("subject", "lag", "copied to", "groups moved")

SourceName = Annotated[
    str, typer.Option("--source-name", help="The source cluster's name, the same in all mirrors.")
]
TargetName = Annotated[
    str, typer.Option("--target-name", help="The target cluster's name, the same in all mirrors.")
]
State = Annotated[
    Path | None,
    typer.Option(
        "--state",
        envvar="QMQ_MIRROR_STATE",
        help="Folder that records the progress; default: in the user's state folder.",
    ),
]


@dataclass(frozen=True)
class MirrorOptions(ProcessFlags):
    """Options of `qmq mirror run`."""

    source_name: SourceName = ""
    target_name: TargetName = ""
    subject: Annotated[
        list[str] | None,
        typer.Option(
            "--subject",
            help="Regular expression for whole names of subjects; repeatable; default: all.",
        ),
    ] = None
    to_context: Annotated[
        str,
        typer.Option("--to-context", help="The target cluster's context: see `qmq context list`."),
    ] = ""
    to_server: Annotated[
        str,
        typer.Option(
            "--to-server",
            help="The target cluster's metaservers; TLS and token are the same as for the source.",
        ),
    ] = ""
    groups: Annotated[
        bool,
        typer.Option(
            "--groups/--no-groups",
            help=(
                "Move groups of the target that have no consumers to the progress of the source's."
            ),
        ),
    ] = True
    state: State = None
    interval_s: Annotated[
        float,
        typer.Option("--interval", min=0.1, max=SECONDS_MAX, help="Seconds between two passes."),
    ] = 1.0
    once: Annotated[
        bool, typer.Option("--once", help="Exit when everything that is there is copied.")
    ] = False
    server: Server = SERVER


@app.callback()
def mirror() -> None:
    """Mirror subjects in a second cluster."""


@app.command("run")
@taking(MirrorOptions)
def run_mirror(_: typer.Context, options: MirrorOptions) -> None:
    """Copy messages to another cluster, with their ids, and move its groups to the same progress.
    Runs until a signal stops it.

    A mirror that was stopped or killed continues where it was. Messages that came from the target
    are not copied back, so that a mirror may run each way.
    """
    try:
        set_up_logging(options.verbose)
        folder = options.state or default_folder(options.source_name, options.target_name)
        there = target_of(options.server, options.to_context, options.to_server)
        if there.server == options.server:
            raise InvalidArgument(
                "source and target are the same cluster: give --to-context or --to-server"
            )
    except (OSError, QmqError) as failure:
        fail(failure)
    run(_run(options, there, folder))


async def _run(options: MirrorOptions, there: Any, folder: Path) -> None:
    from qmq.cli.mirroring.cluster_mirror import ClusterMirror
    from qmq.metrics.figures import Readiness
    from qmq.node.metrics import serving
    from qmq.node.metrics.copies import MirrorMetrics
    from qmq.node.process import until_signal
    from qmq.rpc.network import NETWORK

    async with (
        qmq.connect(options.server, create_subjects=False, state_dir=False) as source,
        connected(there) as target,
    ):
        names = (options.source_name, options.target_name)
        found = ClusterMirror(
            source, target, *names, options.subject or [".*"], folder, moves_groups=options.groups
        )
        try:
            if options.once:
                while (left := await found.pass_once()) and not found.failed:
                    log.info("%d messages are left", left)
                    await asyncio.sleep(options.interval_s)
                if found.failed:
                    raise QmqError(
                        "not everything is copied: "
                        + "; ".join(f"{name}: {why}" for name, why in found.failed.items())
                    )
                return
            metrics = None
            passing: asyncio.Task[None] | None = None

            async def start() -> str:
                nonlocal metrics, passing
                host = serving.metrics_host("127.0.0.1", options.metrics_host)
                sources = [MirrorMetrics(found.states)]
                metrics = await serving.serve(
                    host, options.metrics_port, sources, lambda: Readiness(True, "ok"), NETWORK
                )
                passing = asyncio.create_task(_pass_for_ever(found, options.interval_s))
                shown = "" if metrics is None else f" (metrics at {metrics.address})"
                return f"qmq mirror is ready: {options.source_name} to {options.target_name}{shown}"

            try:
                await until_signal(start)
            finally:
                if passing is not None:
                    passing.cancel()
                    await asyncio.gather(passing, return_exceptions=True)
                if metrics is not None:
                    await metrics.stop()
        finally:
            found.close()


async def _pass_for_ever(found: Any, interval_s: float) -> None:
    while True:
        try:
            await found.pass_once()
        except QmqError as failure:
            log.warning("the mirror's pass failed, it is tried again: %s", failure)
        await asyncio.sleep(interval_s)


@app.command("status")
def status(
    source_name: SourceName = "",
    target_name: TargetName = "",
    state: State = None,
    as_json: Json = False,
    server: Server = SERVER,
) -> None:
    """Show how far a mirror is with each subject: the messages of the source that it has not read
    yet. Reads the mirror's state folder.
    """
    folder = state or default_folder(source_name, target_name)
    show("mirror", COLUMNS, run(_status(server, folder)), as_json=as_json)


async def _status(server: str, folder: Path) -> list[tuple[Any, ...]]:
    from qmq.cli.mirroring.cluster_mirror import places_in, read_record, record_path

    rows: list[tuple[Any, ...]] = []
    async with qmq.connect(server, create_subjects=False) as source:
        for each in await source.metadata.list_subjects():
            name = each.settings.name
            if record_path(folder, name).exists():
                record = read_record(folder, name)
                newest = record.notes[-1].time_ms if record.notes else 0
                rows.append(
                    (name, record.lag(*places_in(each)), time_text(newest), len(record.moved))
                )
    return rows


def default_folder(source: str, target: str, environment: Mapping[str, str] = os.environ) -> Path:
    """The state folder of this mirror. Raises InvalidArgument."""
    if not source or not target:
        raise InvalidArgument("name the two clusters: --source-name and --target-name")
    return user_state_folder(environment) / "mirrors" / f"{source}-to-{target}"
