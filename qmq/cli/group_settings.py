"""`qmq group set` and `qmq group settings`: how a group retries messages that failed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

import qmq
from qmq.cli.output import SERVER, Json, Server, ask, run, show
from qmq.cli.times import delays_text, parse_delays
from qmq.errors import InvalidArgument

if TYPE_CHECKING:
    from qmq.proto.v1 import meta_pb2 as pb

Subject = Annotated[str, typer.Argument(help="The subject; '*' (quoted) for the group on all subjects.")]
Group = Annotated[str, typer.Argument(help="The consumer group.")]

_COLUMNS: Final = ("setting", "value", "from")


def set_settings(
    subject: Subject,
    group: Group,
    attempts_max: Annotated[int | None, typer.Option(help="Attempts before a message goes to the dead-letter queue; 0: no limit.")] = None,
    retry_delays: Annotated[str | None, typer.Option(help="Delay before each retry: 1s,5s,1m; the last one repeats.")] = None,
    default: Annotated[bool, typer.Option("--default", help="Remove all settings made here.")] = False,
    as_json: Json = False,
    server: Server = SERVER,
) -> None:
    """Set how a group retries messages, on one subject or on all. Settings that are not given stay unchanged. Prints the result."""

    async def _set() -> Any:
        delays = None if retry_delays is None else parse_delays(retry_delays)
        if default == (attempts_max is not None or delays is not None):
            raise InvalidArgument("give --attempts-max, --retry-delays or both; or only --default")
        async with qmq.connect(server) as mq:
            if default:
                return await mq.metadata.clear_group_settings(subject, group)
            return await mq.metadata.set_group_settings(subject, group, attempts_max=attempts_max, retry_delays_ms=delays)

    _show(subject, group, run(_set()), as_json)


def show_settings(subject: Subject, group: Group, as_json: Json = False, server: Server = SERVER) -> None:
    """Show how a group retries messages, and where each setting comes from: the subject, all subjects ('*'), or the brokers' options."""

    _show(subject, group, ask(server, lambda mq: mq.metadata.group_settings(subject, group)), as_json)


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
    show(f"group {group} on {where}", _COLUMNS, [(name, str(value), source) for name, value, source in rows], as_json=False)
