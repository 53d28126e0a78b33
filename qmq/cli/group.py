"""`qmq group`: what groups consumed, and moving them."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

import typer

import qmq
from qmq.cli.output import SERVER, Json, Server, run, show
from qmq.errors import InvalidArgument

app = typer.Typer(no_args_is_help=True, help="Consumer groups: list, lag, reset.")


@app.command("list")
def list_groups(
    subject: Annotated[str, typer.Argument(help="Only of this subject.")] = "", as_json: Json = False, server: Server = SERVER
) -> None:
    """List groups, with how far they are behind."""
    rows = [
        (
            each.subject, each.partition, each.broker_group, each.group, len(each.consumers),
            each.waiting + each.unacked + each.requeued, each.lag_ms,
        )
        for each in run(_groups(server, subject, ""))
    ]  # fmt: skip
    show("groups", ("subject", "partition", "broker group", "group", "consumers", "lag", "lag ms"), rows, as_json=as_json)


async def _groups(server: str, subject: str, group: str) -> list[Any]:
    async with qmq.connect(server) as mq:
        return await mq.metadata.describe_groups(subject, group)


@app.command("lag")
def lag(
    subject: Annotated[str, typer.Argument(help="The subject.")],
    group: Annotated[str, typer.Argument(help="The group.")],
    as_json: Json = False,
    server: Server = SERVER,
) -> None:
    """Show how far a group is behind, and what each of its consumers holds."""
    found = run(_groups(server, subject, group))
    columns = ("partition", "broker group", "next", "done before", "waiting", "unacked", "requeued", "expired", "lag ms", "consumers")
    rows = [
        (
            each.partition, each.broker_group, each.next_sequence, each.settled_before, each.waiting, each.unacked, each.requeued,
            each.expired, each.lag_ms, _consumers(each, as_json),
        )
        for each in found
    ]  # fmt: skip
    show(f"group {group} on {subject}", columns, rows, as_json=as_json)


def _consumers(group: Any, as_json: bool) -> Any:
    if as_json:
        return [
            {"name": each.name, "unacked": each.unacked, "seen_ms_ago": each.seen_ms_ago} for each in group.consumers
        ]
    return ", ".join(f"{each.name} ({each.unacked:,})" for each in group.consumers)


@app.command("reset")
def reset(
    subject: Annotated[str, typer.Argument(help="The subject.")],
    group: Annotated[str, typer.Argument(help="The group.")],
    to: Annotated[str, typer.Option("--to", help="earliest, latest, a TIME (2026-11-21T09:30:00+01:00) or a SEQUENCE.")],
    broker_group: Annotated[
        str | None, typer.Option(help="Only on this broker group; a SEQUENCE counts on one, so it needs this where there are several.")
    ] = None,
    as_json: Json = False,
    server: Server = SERVER,
) -> None:
    """Move a group. What its consumers hold is void; they go on from the new place."""

    async def _reset() -> list[Any]:
        target = parse_target(to)
        async with qmq.connect(server) as mq:
            return await mq.metadata.reset_group(subject, group, **target, broker_group=broker_group)

    rows = [(each.partition, each.broker_group, each.from_sequence, each.to_sequence) for each in run(_reset())]
    show(f"group {group} on {subject}", ("partition", "broker group", "from", "to"), rows, as_json=as_json)


def parse_target(to: str) -> dict[str, Any]:
    """What `--to` means. Raises InvalidArgument."""
    if to in ("earliest", "latest"):
        return {"to": to}
    if to.isdigit():
        return {"sequence": int(to)}
    try:
        time = datetime.fromisoformat(to)
    except ValueError:
        raise InvalidArgument(f"--to takes earliest, latest, a time or a sequence, not {to!r}") from None
    if time.tzinfo is None:
        raise InvalidArgument(f"the time {to!r} needs a time zone: write {to}Z or {to}+01:00")
    return {"time_ms": int(time.timestamp() * 1000)}
