"""`qmq pause` and `qmq resume` stop and restart delivery to a group, to one of its consumers, or to a client.

Paused consumers finish and acknowledge messages that were delivered before. A pause lasts until `qmq resume`, even if consumers restart.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Final

import typer

import qmq
from qmq.cli.output import SERVER, Json, Server, ask, run, show, time_text

pausing = typer.Typer(no_args_is_help=True, help="Pause a group, a consumer or a client; list who is paused.")
resuming = typer.Typer(no_args_is_help=True, help="Resume a paused group, consumer or client.")

Subject = Annotated[str, typer.Argument(help="The subject; '*' (quoted) for the group on all subjects.")]
Group = Annotated[str, typer.Argument(help="The consumer group.")]
Name = Annotated[str, typer.Argument(help="The consumer's name, as shown by `qmq group show`.")]
ClientName = Annotated[
    str, typer.Argument(help="The client's name: qmq.connect(..., name=...), by default HOST-PID; shown by `qmq group show`.")
]
Reason = Annotated[str, typer.Option("--reason", help="The reason, shown by `qmq pause list`.")]

_COLUMNS: Final = ("kind", "subject", "group", "name", "from", "to")
_STATES: Final = ("running", "paused")


@pausing.command("group")
def pause_group(subject: Subject, group: Group, reason: Reason = "", as_json: Json = False, server: Server = SERVER) -> None:
    """Stop delivery to all consumers of a group, on a subject or on all. Consumers that join later are paused, too."""
    _tell(("group", subject, group, ""), True, lambda mq: mq.metadata.pause_group(subject, group, reason=reason), server, as_json)


@pausing.command("consumer")
def pause_consumer(subject: Subject, group: Group, name: Name, reason: Reason = "", as_json: Json = False, server: Server = SERVER) -> None:
    """Stop delivery to one consumer of a group. The other consumers get its share."""
    whom = ("consumer", subject, group, name)
    _tell(whom, True, lambda mq: mq.metadata.pause_consumer(subject, group, name, reason=reason), server, as_json)


@pausing.command("client")
def pause_client(name: ClientName, reason: Reason = "", as_json: Json = False, server: Server = SERVER) -> None:
    """Stop delivery to all consumers of a client, on all subjects. The client can still send."""
    _tell(("client", "", "", name), True, lambda mq: mq.metadata.pause_client(name, reason=reason), server, as_json)


@pausing.command("list")
def list_pauses(as_json: Json = False, server: Server = SERVER) -> None:
    """List paused groups, consumers and clients, with time and reason."""

    async def _list() -> list[tuple[str, ...]]:
        async with qmq.connect(server) as mq:
            found = await mq.metadata.pauses()
        return [(each.kind, each.subject, each.group, each.name, time_text(each.since_ms), each.reason) for each in found]

    show("paused", ("kind", "subject", "group", "name", "since", "reason"), run(_list()), as_json=as_json)


@resuming.command("group")
def resume_group(subject: Subject, group: Group, as_json: Json = False, server: Server = SERVER) -> None:
    """Resume a group. Give the same subject as for the pause, or '*' for all."""
    _tell(("group", subject, group, ""), False, lambda mq: mq.metadata.resume_group(subject, group), server, as_json)


@resuming.command("consumer")
def resume_consumer(subject: Subject, group: Group, name: Name, as_json: Json = False, server: Server = SERVER) -> None:
    """Resume one consumer."""
    _tell(("consumer", subject, group, name), False, lambda mq: mq.metadata.resume_consumer(subject, group, name), server, as_json)


@resuming.command("client")
def resume_client(name: ClientName, as_json: Json = False, server: Server = SERVER) -> None:
    """Resume a client."""
    _tell(("client", "", "", name), False, lambda mq: mq.metadata.resume_client(name), server, as_json)


def _tell(
    whom: tuple[str, str, str, str], is_paused: bool, change: Callable[[qmq.Client], Awaitable[bool]], server: str, as_json: bool
) -> None:
    """Make the change, and print the state before and after."""

    was_paused = is_paused != ask(server, change)
    show("paused" if is_paused else "resumed", _COLUMNS, [(*whom, _STATES[was_paused], _STATES[is_paused])], as_json=as_json)
