"""`qmq route export` writes all routes of ordered subjects to a file, for readers of log files without a metaserver (docs/FORMAT.md)."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import qmq
from qmq.cli.output import SERVER, Server, fail, run
from qmq.errors import InvalidArgument
from qmq.model import Order

if TYPE_CHECKING:
    from qmq.proto.v1 import meta_pb2 as pb

Subjects = Annotated[list[str], typer.Argument(help="Ordered subjects.")]
Out = Annotated[Path | None, typer.Option("--out", "-o", help="The file to write, replaced atomically; default: standard output.")]


def export(subjects: Subjects, out: Out = None, server: Server = SERVER) -> None:
    """Write all partitions of all route versions, their successors, and where they were sealed, as JSON.

    Spark needs this file to read ordered subjects from log files: option qmq.routes. After a route change, export again.
    """

    from pyspark_qmq.files.file_routes import to_json

    async def _export() -> list[dict[str, Any]]:
        async with qmq.connect(server) as mq:
            found = []
            for subject in dict.fromkeys(subjects):
                first = await mq.metadata.describe_route(subject, 1)
                history = await mq.metadata.route_history(subject)
                found.append(routes_of(subject, first.route, history, first.settings.order))
            return found

    text = json.dumps(to_json(run(_export()), time.time_ns() // 1_000_000), indent=1) + "\n"
    if out is None:
        sys.stdout.write(text)
        return
    try:
        _replace(out, text)
    except OSError as cause:
        fail(InvalidArgument(f"{out} cannot be written: {cause.strerror}"))


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_text(text)
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise


def routes_of(
    subject: str, first: pb.OrderedRoute, changes: Sequence[pb.RouteChangeInfo], order: str = Order.STRICT.value
) -> dict[str, Any]:
    """A subject's part of the file, made from its first route and its changes, oldest first. Pure."""
    from pyspark_qmq.files.file_routes import subject_json
    from pyspark_qmq.servers.server_routes import routes_of as followed

    return subject_json(subject, followed(first, changes, order))
