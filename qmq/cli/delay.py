"""`qmq delay` lists, shows, cancels and moves delayed messages, and shows delivery statistics. Without a verb it runs a delay server."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

import qmq
from qmq.cli import delay_role
from qmq.cli.delay_view import list_table, message_facts, message_view, moment, row_facts, stats_facts, stats_view
from qmq.cli.known_names import require_subject
from qmq.cli.output import SERVER, DryRun, Json, Server, ask, console, errors, run, show, tell_silent
from qmq.cli.route_commands import emit
from qmq.cli.times import parse_duration, parse_when, shifted
from qmq.client.due_times import due_ms
from qmq.client.partial import Partial
from qmq.errors import InvalidArgument, TooLate

if TYPE_CHECKING:
    from qmq.client.delayed_message import DelayedMessage

app = typer.Typer(help="Run a delay server; list, show, cancel or move delayed messages.")
delay_role.attach(app)

Id = Annotated[str, typer.Argument(metavar="ID", help="The delayed message's id: a receipt's `delayed_id`, or an id shown by `list`.")]

_CANCEL_COLUMNS: Final = ("id", "due", "state", "cron", "subject")
_MOVE_COLUMNS: Final = ("id", "to", "from", "subject")


@app.command("list")
def list_delayed(
    subject: Annotated[str, typer.Argument(help="Only messages of this subject.")] = "",
    start: Annotated[
        str | None, typer.Option("--from", help="Only messages due at or after this time: 2026-11-21T09:30:00+01:00, or +2h.")
    ] = None,
    end: Annotated[str | None, typer.Option("--to", help="Only messages due before this time.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Show at most this many.")] = 100,
    as_json: Json = False,
    server: Server = SERVER,
) -> None:
    """List pending messages in the order of their due times."""
    found = run(_list(server, subject, start, end, limit))
    tell_silent(found.silent)
    rows = [row_facts(each) for each in found[:limit]]
    emit(rows, [list_table(rows, time.time_ns() // 1_000_000)], as_json=as_json)
    if len(found) > limit:
        more = f"only the first {limit:,} are shown: for more, use --limit, or --from {rows[-1]['due']}"
        errors.print(more, highlight=False, soft_wrap=True)


async def _list(server: str, subject: str, start: str | None, end: str | None, limit: int) -> Partial[DelayedMessage]:
    """Up to `limit` + 1 messages: the extra one tells that there are more."""
    now = datetime.now(UTC)
    first, last = (None if text is None else parse_moment(text, now) for text in (start, end))
    async with qmq.connect(server) as mq:
        silent: dict[str, str] = {}
        found = [each async for each in mq.delayed.list(subject, first, last, limit + 1, silent=silent)]
        if not found:
            await require_subject(mq, subject)
        return Partial(found, silent)


@app.command("show")
def show_delayed(delayed_id: Id, as_json: Json = False, server: Server = SERVER) -> None:
    """Show a delayed message and its state."""
    facts = message_facts(ask(server, lambda mq: mq.delayed.show(delayed_id)))
    emit(facts, message_view(facts), as_json=as_json)


@app.command("cancel")
def cancel(delayed_id: Id, dry_run: DryRun = False, as_json: Json = False, server: Server = SERVER) -> None:
    """Cancel a delayed message. A recurring message has no further runs."""

    async def _cancel() -> DelayedMessage:
        async with qmq.connect(server) as mq:
            if not dry_run:
                return await mq.delayed.cancel(delayed_id)
            found = await mq.delayed.show(delayed_id)
            if found.state != "cancelled":
                _require_pending(found)
            return found

    found = run(_cancel())
    row = (found.id, moment(found.due), found.state, found.cron, found.subject)
    show("would be cancelled" if dry_run else "cancelled", _CANCEL_COLUMNS, [row], as_json=as_json)


@app.command("move")
def move(
    delayed_id: Id,
    to: Annotated[str | None, typer.Option("--to", help="The new due time: 2026-11-21T09:30:00+01:00, or +2h from now.")] = None,
    by: Annotated[str | None, typer.Option("--by", help="Shift the due time: 30m or 1d later; -30m earlier.")] = None,
    dry_run: DryRun = False,
    as_json: Json = False,
    server: Server = SERVER,
) -> None:
    """Change the due time of a message; a time in the past means now. For a recurring message, only the next run moves."""
    row = run(_move(server, delayed_id, to, by, dry_run))
    show("would be moved" if dry_run else "moved", _MOVE_COLUMNS, [row], as_json=as_json)


async def _move(server: str, delayed_id: str, to: str | None, by: str | None, dry_run: bool) -> tuple[str, str, str, str]:
    if (to is None) == (by is None):
        raise InvalidArgument("give either --to 2026-11-21T09:30:00Z (the new due time) or --by 30m (how much later)")
    wanted = parse_moment(to, datetime.now(UTC)) if to is not None else parse_shift(by or "")
    async with qmq.connect(server) as mq:
        before = await mq.delayed.show(delayed_id)
        target = shifted(before.due, wanted) if isinstance(wanted, timedelta) else wanted
        if dry_run:
            _require_pending(before)
            due_ms(target, time.time_ns())
        after = target if dry_run else (await mq.delayed.move(delayed_id, target)).due
        return (before.id, moment(after), moment(before.due), before.subject)


def _require_pending(found: DelayedMessage) -> None:
    """The check of the delay group, repeated here for --dry-run. Raises TooLate."""
    if found.state != "pending":
        raise TooLate(f"{found.id} is {found.state}: only a pending message can be cancelled or moved")


@app.command("stats")
def stats(as_json: Json = False, server: Server = SERVER) -> None:
    """Show pending messages by due time, delivery lateness, and messages that cannot be delivered."""

    async def _stats() -> dict[str, Any]:
        async with qmq.connect(server) as mq:
            found = await mq.delayed.stats()
            return stats_facts(found, max([group.time for group in found.groups], default=datetime.now(UTC)))

    facts = run(_stats())
    emit(facts, stats_view(facts, console.width), as_json=as_json)


# --- times --------------------------------------------------------------------------------------------------------------


def parse_moment(text: str, now: datetime) -> datetime:
    """Parse a time with a time zone, or one relative to now: +2h, -1d. Raises InvalidArgument."""
    if text.startswith(("+", "-")):
        return shifted(now, parse_shift(text))
    return parse_when(text)


def parse_shift(text: str) -> timedelta:
    """Parse a duration with an optional sign. Raises InvalidArgument."""
    found = parse_duration(text.removeprefix("-").removeprefix("+"))
    return -found if text.startswith("-") else found
