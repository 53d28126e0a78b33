"""`qmq route` shows and changes how an ordered subject's keys are spread over partitions (docs/ORDERING.md)."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import RenderableType

import qmq
from qmq.cli import route_change, route_export
from qmq.cli.added_options import WatchPace
from qmq.cli.output import SERVER, DryRun, Json, Server, ask, console, fail, run, show, time_text
from qmq.cli.route_change import Subject
from qmq.cli.route_view import history_table, subject_view
from qmq.cli.table import LineTable
from qmq.errors import InvalidArgument
from qmq.operations.route_facts import change_facts
from qmq.operations.route_reading import described

if TYPE_CHECKING:
    from qmq.proto.v1 import meta_pb2 as pb

app = typer.Typer(no_args_is_help=True, help="Routes of ordered subjects: show, split, merge, move, history, policy, export.")
app.command("split")(route_change.split)
app.command("merge")(route_change.merge)
app.command("move")(route_change.move)
app.command("export")(route_export.export)

POLICY_FIELDS: Final = (
    "split_messages_per_s",
    "split_bytes_per_s",
    "split_backlog",
    "merge_messages_per_s",
    "merge_bytes_per_s",
    "merge_quiet_ms",
    "cool_down_ms",
    "partitions_min",
    "partitions_max",
)


def emit(found: Any, view: Iterable[RenderableType], *, as_json: bool) -> None:
    """Print the facts as JSON, or their view for people."""
    if as_json:
        sys.stdout.write(json.dumps(found) + "\n")
        return
    for each in view:
        console.print(each, soft_wrap=isinstance(each, LineTable))


# --- looking -----------------------------------------------------------------------------------------------------------


@app.command("show")
def show_route(
    subject: Subject,
    version: Annotated[int, typer.Option("--version", min=0, help="The version of the route; 0: the latest.")] = 0,
    as_json: Json = False,
    server: Server = SERVER,
) -> None:
    """Draw a subject's route, and show its partitions and the progress of each consumer group."""

    found = ask(server, lambda mq: described(mq, subject, version))
    emit(found, subject_view(found, console.width), as_json=as_json)


@app.command("history")
def history(subject: Subject, as_json: Json = False, server: Server = SERVER) -> None:
    """Show the changes of the route, oldest first, and how long writers were refused."""

    found = [change_facts(each) for each in ask(server, lambda mq: mq.metadata.route_history(subject))]
    emit(found, [history_table(found, time.time_ns() // 1_000_000)], as_json=as_json)


@app.command("explain")
def explain(subject: Subject, as_json: Json = False, server: Server = SERVER) -> None:
    """Show what automatic resharding would do now, and why, and what it did last."""

    told = ask(server, lambda mq: mq.metadata.explain_reshard(subject))
    found = {
        "policy": policy_facts(told.policy, subject),
        "operation": told.operation,
        "reasons": list(told.reasons),
        "last_operation": told.last_operation,
        "last_reasons": list(told.last_reasons),
        "last_ms": told.last_ms,
    }
    emit(found, _explanation(found), as_json=as_json)


def _explanation(found: dict[str, Any]) -> list[RenderableType]:
    policy = found["policy"]
    state = "on" if policy["is_enabled"] else f"off: `qmq route policy {policy['subject']} --enable` switches it on"
    would = "would be done" if policy["is_enabled"] else "would do if it were on"
    said: list[RenderableType] = [f"automatic resharding of {policy['subject']} is {state}"]
    said.append(f"{would} now: {found['operation'] or 'nothing'}")
    said += [f"  {reason}" for reason in found["reasons"]]
    if found["last_ms"]:
        said.append(f"last, at {time_text(found['last_ms'])}: {found['last_operation'] or 'nothing'}")
        said += [f"  {reason}" for reason in found["last_reasons"]]
    return said


# --- the policy --------------------------------------------------------------------------------------------------------


@app.command("policy")
def policy(
    subject: Subject,
    enable: Annotated[bool | None, typer.Option("--enable/--disable", help="Turn automatic resharding on or off.")] = None,
    split_messages: Annotated[float | None, typer.Option(min=0, help="Hot: a partition gets more messages per second than this.")] = None,
    split_bytes: Annotated[float | None, typer.Option(min=0, help="Hot: a partition gets more bytes per second than this.")] = None,
    split_backlog: Annotated[int | None, typer.Option(min=0, help="Hot: more messages than this wait for the slowest group.")] = None,
    merge_messages: Annotated[
        float | None, typer.Option(min=0, help="Cold: neighbours together get fewer messages per second than this.")
    ] = None,
    merge_bytes: Annotated[
        float | None, typer.Option(min=0, help="Cold: neighbours together get fewer bytes per second than this.")
    ] = None,
    merge_quiet_s: Annotated[float | None, typer.Option(min=0, help="Seconds that neighbours must be cold before a merge.")] = None,
    cool_down_s: Annotated[float | None, typer.Option(min=0, help="Seconds between two changes.")] = None,
    partitions_min: Annotated[int | None, typer.Option(min=1, help="The smallest number of partitions.")] = None,
    partitions_max: Annotated[int | None, typer.Option(min=1, help="The largest number of partitions.")] = None,
    dry_run: DryRun = False,
    as_json: Json = False,
    server: Server = SERVER,
) -> None:
    """Show the policy of automatic resharding; with options, change it. Options that are not given stay unchanged."""
    wanted = {
        "is_enabled": enable,
        "split_messages_per_s": split_messages,
        "split_bytes_per_s": split_bytes,
        "split_backlog": split_backlog,
        "merge_messages_per_s": merge_messages,
        "merge_bytes_per_s": merge_bytes,
        "merge_quiet_ms": _ms(merge_quiet_s),
        "cool_down_ms": _ms(cool_down_s),
        "partitions_min": partitions_min,
        "partitions_max": partitions_max,
    }
    given = {field: value for field, value in wanted.items() if value is not None}
    if given and WatchPace.is_watching:
        fail(InvalidArgument("--watch shows the policy: leave it out to change the policy"))

    async def _policy() -> pb.ReshardPolicy:
        from qmq.proto.v1 import meta_pb2 as pb

        async with qmq.connect(server) as mq:
            now = (await mq.metadata.explain_reshard(subject)).policy
            after = pb.ReshardPolicy()
            after.CopyFrom(now)
            after.MergeFrom(pb.ReshardPolicy(subject=subject))
            for field, value in given.items():
                setattr(after, field, value)
            if 0 < after.partitions_max < after.partitions_min:
                raise InvalidArgument(f"--partitions-min {after.partitions_min} is above --partitions-max {after.partitions_max}")
            return after if dry_run or not given else await mq.metadata.set_reshard_policy(after)

    found = policy_facts(run(_policy()), subject)
    title = "would be" if dry_run and given else f"policy of {subject}"
    show(title, list(found), [list(found.values())], as_json=as_json) if as_json else show(
        title, ("setting", "value"), [(name.replace("_", " "), str(value)) for name, value in found.items()], as_json=False
    )


def _ms(seconds: float | None) -> int | None:
    return None if seconds is None else int(seconds * 1000)


def policy_facts(found: pb.ReshardPolicy, subject: str) -> dict[str, Any]:
    """A policy as JSON values."""
    return {"subject": subject, "is_enabled": found.is_enabled} | {field: getattr(found, field) for field in POLICY_FIELDS}
