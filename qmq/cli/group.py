"""`qmq group` shows, resets and deletes consumer groups, and says how a group retries messages that
failed (`set`, `settings`).

`qmq pause` and `qmq resume` stop and restart delivery to a group, to one of its consumers, or to a
client.

Paused consumers finish and acknowledge messages that were delivered before. A pause lasts until
`qmq resume`, even if consumers restart.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from qmq.cli.arguments import delays_text, parse_delays
from qmq.cli.names import ordered_subjects
from qmq.cli.output import (
    SERVER,
    Json,
    Server,
    administration,
    ask,
    fail,
    run,
    say,
    show,
    tell_silent,
    time_text,
)
from qmq.cli.route import emit, group_view
from qmq.client.metadata.cache import Partial
from qmq.errors import InvalidArgument, OrderMismatch, UnknownGroup
from qmq.limits import ATTEMPTS_MAX
from qmq.operations.routes import described
from qmq.operations.text import Duration, counted
from qmq.text import whole_number

if TYPE_CHECKING:
    from qmq.cli.administration import Administration
    from qmq.proto.v1 import control_pb2 as control
    from qmq.proto.v1 import meta_pb2 as pb

Subject = Annotated[
    str, typer.Argument(help="The subject; '*' (quoted) for the group on all subjects.")
]
Group = Annotated[str, typer.Argument(help="The consumer group.")]

_SETTING_COLUMNS: Final = ("setting", "value", "from")


def set_settings(
    subject: Subject,
    group: Group,
    attempts_max: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=ATTEMPTS_MAX,
            help="Attempts before a message goes to the dead-letter queue; 0: no limit.",
        ),
    ] = None,
    retry_delays: Annotated[
        str | None, typer.Option(help="Delay before each retry: 1s,5s,1m; the last one repeats.")
    ] = None,
    default: Annotated[
        bool, typer.Option("--default", help="Remove all settings made here.")
    ] = False,
    as_json: Json = False,
    server: Server = SERVER,
) -> None:
    """Set how a group retries messages, on one subject or on all. Settings that are not given stay
    unchanged. Prints the result.
    """

    async def _set() -> Any:
        delays = None if retry_delays is None else parse_delays(retry_delays)
        if default == (attempts_max is not None or delays is not None):
            raise InvalidArgument("give --attempts-max, --retry-delays or both; or only --default")
        async with administration(server) as mq:
            if default:
                return await mq.metadata.clear_group_settings(subject, group)
            return await mq.metadata.set_group_settings(
                subject, group, attempts_max=attempts_max, retry_delays_ms=delays
            )

    _show(subject, group, run(_set()), as_json)


def show_settings(
    subject: Subject, group: Group, as_json: Json = False, server: Server = SERVER
) -> None:
    """Show how a group retries messages, and where each setting comes from: the subject, all
    subjects ('*'), or the brokers' options.
    """

    _show(
        subject, group, ask(server, lambda mq: mq.metadata.group_settings(subject, group)), as_json
    )


def _show(subject: str, group: str, found: pb.DescribeGroupSettingsResponse, as_json: bool) -> None:
    where = "all subjects" if subject == "*" else subject
    delays: Any = list(found.retry_delays_ms) if as_json else delays_text(found.retry_delays_ms)
    rows = [
        ("attempts_max", found.attempts_max, found.attempts_from or "the brokers"),
        ("retry_delays_ms", delays, found.delays_from or "the brokers"),
    ]
    if as_json:
        names = ("attempts max", "retry delays ms", "attempts from", "delays from")
        values = (found.attempts_max, delays, found.attempts_from, found.delays_from)
        show("", names, [values], as_json=True)
        return
    show(
        f"group {group} on {where}",
        _SETTING_COLUMNS,
        [(name, str(value), source) for name, value, source in rows],
        as_json=False,
    )


app = typer.Typer(
    no_args_is_help=True, help="Consumer groups: list, show, reset, delete, set, settings."
)
app.command("set")(set_settings)
app.command("settings")(show_settings)

_COLUMNS = (
    "subject",
    "partition",
    "broker group",
    "group",
    "consumers",
    "lag",
    "lag ms",
    "version",
    "kind",
    "is paused",
)


@app.command("list")
def list_groups(
    subject: Annotated[str, typer.Argument(help="Only groups of this subject.")] = "",
    as_json: Json = False,
    server: Server = SERVER,
) -> None:
    """List groups and their lag; for an ordered subject, also the route version that each group
    reads. Readers without a group, such as streaming queries of Spark, are of the kind "reader".
    """
    found = run(_rows(server, subject))
    rows = [(*row, is_paused if as_json else _yes(is_paused)) for *row, is_paused in found]
    show("groups", _COLUMNS, rows, as_json=as_json, silent=found.silent)


async def _rows(server: str, subject: str) -> Partial[tuple[Any, ...]]:
    async with administration(server) as mq:
        ordered = await ordered_subjects(mq.metadata, subject)
        known = await mq.metadata.describe_groups(subject)
        rows = Partial([_row(each) for each in known if each.subject not in ordered], known.silent)
        for name in ordered:
            found = await described(mq.metadata, name)
            rows.silent = _silent(found) | rows.silent
            rows += [
                _ordered_row(name, group, each)
                for group in found["groups"]
                for each in group["partitions"]
            ]
        rows += [_reader_row(each) for each in known.readers]
        return rows


def _silent(found: dict[str, Any]) -> dict[str, str]:
    return dict.fromkeys(found["silent_groups"], "no answer")


def _row(each: Any) -> tuple[Any, ...]:
    lag = each.waiting + each.unacked + each.requeued
    return (
        each.subject,
        each.partition,
        each.broker_group,
        each.group,
        len(each.consumers),
        lag,
        Duration(each.lag_ms),
        "",
        "group",
        each.is_paused,
    )


def _reader_row(each: control.Reader) -> tuple[Any, ...]:
    return (
        each.subject,
        each.partition,
        each.broker_group,
        each.reader,
        0,
        each.waiting,
        Duration(each.lag_ms),
        "",
        "reader",
        False,
    )


def _ordered_row(subject: str, group: dict[str, Any], each: dict[str, Any]) -> tuple[Any, ...]:
    holders = len({holder["consumer"] for holder in each["holders"]})
    return (
        subject,
        each["partition"],
        each["broker_group"],
        group["group"],
        holders,
        each["left"],
        Duration(each["lag_ms"]),
        group["version"],
        "group",
        group["is_paused"],
    )


def _yes(is_so: bool) -> str:
    return "yes" if is_so else ""


@app.command("show")
@app.command("lag")
def lag(
    subject: Annotated[str, typer.Argument(help="The subject.")],
    group: Annotated[str, typer.Argument(help="The group.")],
    as_json: Json = False,
    server: Server = SERVER,
) -> None:
    """Show a group's lag and the unacknowledged messages of each consumer; for an ordered subject,
    also the group's frontier. "filtered" are the messages that the consumers' tags left out since
    the master began to serve; they count as done.

    GROUP may also be the name of a reader without a group, such as a streaming query of Spark: its
    lag, its rate of the last one to two minutes, when it last committed and reported, what was
    deleted before it read it, and how long the oldest message that it has not read is still kept.
    """
    found = run(_lag(server, subject, group))
    if isinstance(found, DescribedReaders):
        _show_reader(subject, group, found, as_json)
        return
    if isinstance(found, dict):
        tell_silent(_silent(found))
        from qmq.cli.tables import console

        emit(found, group_view(found, found["latest_version"], console.width), as_json=as_json)
        return
    columns = (
        "partition",
        "broker group",
        "next",
        "done before",
        "waiting",
        "unacked",
        "requeued",
        "dying",
        "expired",
        "filtered",
        "lag ms",
        "consumers",
        "is paused",
    )
    rows = [
        (
            each.partition,
            each.broker_group,
            each.next_sequence,
            each.settled_before,
            each.waiting,
            each.unacked,
            each.requeued,
            each.dying,
            each.expired,
            each.filtered if each.HasField("filtered") else None,
            Duration(each.lag_ms),
            _consumers(each, as_json),
            each.is_paused if as_json else _yes(each.is_paused),
        )
        for each in found
    ]
    show(f"group {group} on {subject}", columns, rows, as_json=as_json, silent=found.silent)


class DescribedReaders(Partial["control.Reader"]):
    """A reader without a group, on each queue of a subject."""


_READER_COLUMNS: Final = (
    "partition",
    "broker group",
    "done before",
    "lag",
    "lag ms",
    "messages per s",
    "committed ms ago",
    "seen ms ago",
    "is silent",
    "lost",
    "kept read",
    "loss in ms",
    "is near loss",
)


def _show_reader(subject: str, reader: str, found: DescribedReaders, as_json: bool) -> None:
    rows = [
        (
            each.partition,
            each.broker_group,
            each.done_before,
            each.waiting,
            Duration(each.lag_ms),
            round(each.messages_per_s, 1),
            Duration(each.committed_ms_ago),
            Duration(each.seen_ms_ago),
            each.is_silent if as_json else _yes(each.is_silent),
            each.lost,
            each.kept_read,
            Duration(each.loss_in_ms) if each.HasField("loss_in_ms") else None,
            each.is_near_loss if as_json else _yes(each.is_near_loss),
        )
        for each in found
    ]
    title = f"reader {reader} on {subject}"
    show(title, _READER_COLUMNS, rows, as_json=as_json, silent=found.silent)


async def _lag(
    server: str, subject: str, group: str
) -> Partial[control.Group] | DescribedReaders | dict[str, Any]:
    """A group's progress on each queue; for an ordered subject, of the group as a whole. Of a
    reader, if there is no such group.
    """
    async with administration(server) as mq:
        if await ordered_subjects(mq.metadata, subject):
            found = await described(mq.metadata, subject)
            for each in found["groups"]:
                if each["group"] == group:
                    return {
                        **each,
                        "subject": subject,
                        "latest_version": found["latest_version"],
                        "silent_groups": found["silent_groups"],
                    }
            unknown = UnknownGroup(
                f"group {group!r} has never consumed {subject!r}: `qmq group list {subject}` "
                "shows its groups"
            )
        else:
            try:
                return await mq.metadata.describe_groups(subject, group)
            except UnknownGroup as failure:
                unknown = failure
        known = await mq.metadata.describe_groups(subject)
    readers = [each for each in known.readers if each.reader == group]
    if not readers:
        raise unknown
    return DescribedReaders(readers, known.silent)


def _consumers(group: Any, as_json: bool) -> Any:
    if as_json:
        return [
            {
                "name": each.name,
                "unacked": each.unacked,
                "seen_ms_ago": each.seen_ms_ago,
                "client": each.client,
                "is_paused": each.is_paused,
            }
            for each in group.consumers
        ]
    return ", ".join(
        f"{each.name} ({each.unacked:,}{', paused' if each.is_paused else ''})"
        for each in group.consumers
    )


@app.command("reset")
def reset(
    subject: Annotated[str, typer.Argument(help="The subject.")],
    group: Annotated[str, typer.Argument(help="The group.")],
    to: Annotated[
        str,
        typer.Option(
            "--to", help="earliest, latest, a TIME (2026-11-21T09:30:00+01:00) or a SEQUENCE."
        ),
    ],
    broker_group: Annotated[
        str | None,
        typer.Option(
            help=(
                "Only on this broker group. A SEQUENCE belongs to one broker group, so it needs "
                "this option if there are several."
            )
        ),
    ] = None,
    as_json: Json = False,
    server: Server = SERVER,
) -> None:
    """Move a group to another position. Messages that its consumers hold become void; the consumers
    continue from the new position.
    """

    async def _reset() -> list[Any]:
        target = parse_target(to)
        async with administration(server) as mq:
            if broker_group is not None and await ordered_subjects(mq.metadata, subject):
                raise InvalidArgument(
                    f"{subject!r} is ordered: its groups can only be reset as a whole, so "
                    "leave out the broker group"
                )
            return await mq.metadata.reset_group(
                subject, group, **target, broker_group=broker_group
            )

    rows = [
        (each.partition, each.broker_group, each.from_sequence, each.to_sequence)
        for each in run(_reset())
    ]
    show(
        f"group {group} on {subject}",
        ("partition", "broker group", "from", "to"),
        rows,
        as_json=as_json,
    )


@app.command("delete")
def delete(
    subject: Annotated[str, typer.Argument(help="The subject.")],
    group: Annotated[str, typer.Argument(help="The group; it must have no consumers.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    as_json: Json = False,
    server: Server = SERVER,
) -> None:
    """Delete a group's progress and parked keys. Its dead letters stay. A later group of the same
    name starts as a new group.
    """
    if (
        not yes
        and typer.prompt(f"type {group} to delete it{_lost(server, subject, group)}", err=True)
        != group
    ):
        fail(InvalidArgument("that is not the group's name: nothing was deleted"))

    count = ask(server, lambda mq: mq.metadata.delete_group(subject, group))
    said = f"deleted group {group} of {subject}: {counted(count, 'queue')}"
    say(said, ("subject", "group", "queues"), (subject, group, count), as_json=as_json)


def _lost(server: str, subject: str, group: str) -> str:
    """The data that is deleted with a group, for the confirmation question."""

    async def _parked() -> set[bytes]:
        async with administration(server) as mq:
            try:
                return {each.key for each in await mq.metadata.parked(subject, group)}
            except OrderMismatch:
                return set()

    keys = run(_parked())
    return f" with its {len(keys)} parked keys" if keys else ""


def parse_target(to: str) -> dict[str, Any]:
    """Parse the value of `--to`. Raises InvalidArgument."""
    if to in ("earliest", "latest"):
        return {"to": to}
    sequence = whole_number(to)
    if sequence is not None:
        return {"sequence": sequence}
    try:
        time = datetime.fromisoformat(to)
    except ValueError:
        raise InvalidArgument(
            f"--to takes earliest, latest, a time or a sequence, not {to!r}"
        ) from None
    if time.tzinfo is None:
        raise InvalidArgument(f"the time {to!r} needs a time zone: write {to}Z or {to}+01:00")
    return {"time_ms": int(time.timestamp() * 1000)}


pausing = typer.Typer(
    no_args_is_help=True, help="Pause a group, a consumer or a client; list who is paused."
)
resuming = typer.Typer(no_args_is_help=True, help="Resume a paused group, consumer or client.")

Name = Annotated[str, typer.Argument(help="The consumer's name, as shown by `qmq group show`.")]
ClientName = Annotated[
    str,
    typer.Argument(
        help=(
            "The client's name: qmq.connect(..., name=...), by default HOST-PID; shown by `qmq "
            "group show`."
        )
    ),
]
Reason = Annotated[str, typer.Option("--reason", help="The reason, shown by `qmq pause list`.")]

_PAUSE_COLUMNS: Final = ("kind", "subject", "group", "name", "from", "to")
_STATES: Final = ("running", "paused")


@pausing.command("group")
def pause_group(
    subject: Subject,
    group: Group,
    reason: Reason = "",
    as_json: Json = False,
    server: Server = SERVER,
) -> None:
    """Stop delivery to all consumers of a group, on a subject or on all. Consumers that join later
    are paused, too.
    """
    _tell(
        ("group", subject, group, ""),
        True,
        lambda mq: mq.metadata.pause_group(subject, group, reason=reason),
        server,
        as_json,
    )


@pausing.command("consumer")
def pause_consumer(
    subject: Subject,
    group: Group,
    name: Name,
    reason: Reason = "",
    as_json: Json = False,
    server: Server = SERVER,
) -> None:
    """Stop delivery to one consumer of a group. The other consumers get its share."""
    whom = ("consumer", subject, group, name)
    _tell(
        whom,
        True,
        lambda mq: mq.metadata.pause_consumer(subject, group, name, reason=reason),
        server,
        as_json,
    )


@pausing.command("client")
def pause_client(
    name: ClientName, reason: Reason = "", as_json: Json = False, server: Server = SERVER
) -> None:
    """Stop delivery to all consumers of a client, on all subjects. The client can still send."""
    _tell(
        ("client", "", "", name),
        True,
        lambda mq: mq.metadata.pause_client(name, reason=reason),
        server,
        as_json,
    )


@pausing.command("list")
def list_pauses(as_json: Json = False, server: Server = SERVER) -> None:
    """List paused groups, consumers and clients, with time and reason."""

    async def _list() -> list[tuple[str, ...]]:
        async with administration(server) as mq:
            found = await mq.metadata.pauses()
        return [
            (each.kind, each.subject, each.group, each.name, time_text(each.since_ms), each.reason)
            for each in found
        ]

    show(
        "paused",
        ("kind", "subject", "group", "name", "since", "reason"),
        run(_list()),
        as_json=as_json,
    )


@resuming.command("group")
def resume_group(
    subject: Subject, group: Group, as_json: Json = False, server: Server = SERVER
) -> None:
    """Resume a group. Give the same subject as for the pause, or '*' for all."""
    _tell(
        ("group", subject, group, ""),
        False,
        lambda mq: mq.metadata.resume_group(subject, group),
        server,
        as_json,
    )


@resuming.command("consumer")
def resume_consumer(
    subject: Subject, group: Group, name: Name, as_json: Json = False, server: Server = SERVER
) -> None:
    """Resume one consumer."""
    _tell(
        ("consumer", subject, group, name),
        False,
        lambda mq: mq.metadata.resume_consumer(subject, group, name),
        server,
        as_json,
    )


@resuming.command("client")
def resume_client(name: ClientName, as_json: Json = False, server: Server = SERVER) -> None:
    """Resume a client."""
    _tell(
        ("client", "", "", name), False, lambda mq: mq.metadata.resume_client(name), server, as_json
    )


def _tell(
    whom: tuple[str, str, str, str],
    is_paused: bool,
    change: Callable[[Administration], Awaitable[bool]],
    server: str,
    as_json: bool,
) -> None:
    """Make the change, and print the state before and after."""

    was_paused = is_paused != ask(server, change)
    show(
        "paused" if is_paused else "resumed",
        _PAUSE_COLUMNS,
        [(*whom, _STATES[was_paused], _STATES[is_paused])],
        as_json=as_json,
    )
