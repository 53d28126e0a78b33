"""`qmq log` reads segment files without a broker."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from qmq.cli.arguments import COUNT_MAX
from qmq.cli.output import EXIT_FAILED, Json, fail, show, time_text
from qmq.errors import InvalidArgument

app = typer.Typer(no_args_is_help=True, help="Log files: dump a segment.")


@app.command("dump")
def dump(
    segment: Annotated[
        Path, typer.Argument(help="A segment file of a message log or an action log.")
    ],
    columns: Annotated[bool, typer.Option(help="Show each message of each batch.")] = False,
    limit: Annotated[
        int, typer.Option(min=0, max=COUNT_MAX, help="Stop after this many entries; 0: no limit.")
    ] = 0,
    as_json: Json = False,
) -> None:
    """Show a segment's entries: positions, sequences, checksums, columns. Exit status 1 if a
    checksum is wrong.
    """
    from qmq.log.segment_dump import Line, dump_segment

    if not segment.is_file():
        fail(
            InvalidArgument(
                f"{segment} is not a file: segments are in DATA/broker/message and "
                "DATA/broker/action"
            )
        )
    lines: list[Line] = []
    for line in dump_segment(segment, with_messages=columns):
        lines.append(line)
        if limit and len(lines) >= limit:
            break
    names = (
        "position",
        "kind",
        "bytes",
        "subject",
        "first",
        "count",
        "epoch",
        "index",
        "stored",
        "columns",
        "checksums",
    )
    rows: list[tuple[Any, ...]] = [
        (
            each.position,
            each.kind,
            each.total_bytes,
            each.subject,
            each.base_sequence,
            each.count,
            each.epoch,
            each.index,
            time_text(each.append_time_ms),
            " ".join(each.columns),
            each.verdict,
        )
        for each in lines
    ]
    show(str(segment), names, rows, as_json=as_json)
    if columns:
        _show_messages(lines, as_json)
    if any(each.verdict != "ok" for each in lines):
        raise typer.Exit(EXIT_FAILED)


def _show_messages(lines: list[Any], as_json: bool) -> None:
    rows = [row for line in lines for row in line.messages]
    if rows:
        show(
            "messages",
            ("sequence", "id", "created", "key", "tags", "body bytes", "body"),
            rows,
            as_json=as_json,
        )
