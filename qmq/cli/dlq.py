"""`qmq dlq` lists, shows, replays, purges and deletes messages that consumer groups gave up.

For an unordered subject these are messages in the group's dead-letter queue: the verbs take GROUP.
For an ordered subject these are parked keys, with all later messages of the key: the verbs take
SUBJECT GROUP KEY (`qmq/operations/letters.py`).
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, Final

import typer

import qmq
from qmq.cli.arguments import COUNT_MAX, RATE_MAX
from qmq.cli.names import require_group
from qmq.cli.output import (
    SERVER,
    DryRun,
    Json,
    Server,
    ask_client,
    counting,
    fail,
    run,
    say,
    show,
    time_text,
    warn,
)
from qmq.cli.roles import taking
from qmq.client.dead_letters import Choose, DeadLetter
from qmq.client.metadata.cache import Partial
from qmq.errors import InvalidArgument
from qmq.operations import letters
from qmq.operations.letters import LetterEdit, chosen_by
from qmq.operations.text import Duration, counted, key_text

app = typer.Typer(
    no_args_is_help=True, help="Dead letters and parked keys: list, show, replay, purge, delete."
)

Most = Annotated[
    int, typer.Option("--limit", min=0, max=COUNT_MAX, help="At most this many; 0: all.")
]

_QUEUES: Final = ("group", "broker group", "messages", "waiting", "newest", "oldest ago ms")
_LETTERS: Final = ("id", "subject", "attempts", "error", "died")
_WHOLE: Final = (
    "id",
    "group",
    "subject",
    "broker group",
    "sequence",
    "key",
    "tags",
    "attempts",
    "error",
    "died",
    "created",
    "headers",
    "body",
)


@app.command("list")
def list_letters(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[GROUP | SUBJECT GROUP]", help="A group, or a group of an ordered subject."
        ),
    ] = None,
    as_json: Json = False,
    server: Server = SERVER,
) -> None:
    """List dead-letter queues and their number of waiting messages, or the parked keys of a group
    on an ordered subject.
    """
    given = words or []
    if len(given) == 2:
        subject, group = given
        keys = ask_client(server, lambda mq: letters.listed(mq, subject, group))
        show(
            f"parked keys of group {group} on {subject}",
            letters.COLUMNS,
            keys,
            as_json=as_json,
            silent=keys.silent,
        )
        return
    if len(given) > 2:
        raise typer.BadParameter("give no argument, a GROUP, or SUBJECT GROUP")
    queues = run(_queues(server, given[0] if given else ""))
    show("dead-letter queues", _QUEUES, queues, as_json=as_json, silent=queues.silent)


async def _queues(server: str, group: str) -> Partial[tuple[Any, ...]]:
    async with qmq.connect(server) as mq:
        found = await mq.metadata.dead_letter_queues(group)
        if not found and not found.silent:
            await require_group(mq, group)
    rows = [
        (
            each.group,
            each.broker_group,
            each.messages,
            each.waiting,
            time_text(each.newest_ms),
            Duration(each.oldest_ago_ms),
        )
        for each in found
    ]
    return Partial(rows, found.silent)


@dataclass(frozen=True, kw_only=True)
class OutputFlags:
    as_json: Json = False
    server: Server = SERVER


@dataclass(frozen=True, kw_only=True)
class ChoiceFlags:
    """Which dead letters, or which parked key. A parked key is always taken as a whole."""

    words: Annotated[
        list[str],
        typer.Argument(
            metavar="GROUP | SUBJECT GROUP KEY",
            help="A group, or a parked key of an ordered subject.",
        ),
    ]
    subject: Annotated[
        str, typer.Option("--subject", help="Only messages sent to this subject.")
    ] = ""
    ids: Annotated[
        list[str] | None, typer.Option("--id", help="Only this message; repeatable.")
    ] = None
    error: Annotated[
        str, typer.Option("--error", help="Only messages whose last error contains this text.")
    ] = ""
    since: Annotated[
        datetime | None,
        typer.Option(
            "--since", help="Only messages that failed at or after this time (UTC without a zone)."
        ),
    ] = None
    most: Most = 0

    @property
    def is_filtered(self) -> bool:
        return any((self.subject, self.ids, self.error, self.since, self.most))

    def choose(self) -> Choose:
        """Raises InvalidArgument."""
        return chosen_by(self.subject, self.ids or [], self.error, self.since)


@dataclass(frozen=True, kw_only=True)
class ShowOptions(OutputFlags, ChoiceFlags):
    most: Most = 20


@dataclass(frozen=True, kw_only=True)
class EditFlags:
    rate: Annotated[
        float,
        typer.Option(
            "--rate", min=0, max=RATE_MAX, help="At most this many per second; 0: no limit."
        ),
    ] = 0
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", help="Set a field of the JSON body, FIELD=VALUE; repeatable."),
    ] = None
    unsets: Annotated[
        list[str] | None,
        typer.Option("--unset", help="Remove a field from the JSON body; repeatable."),
    ] = None
    body: Annotated[
        str | None, typer.Option("--body", help="The body to send instead; with one --id.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class DryRunFlag:
    dry_run: DryRun = False


@dataclass(frozen=True, kw_only=True)
class PurgeOptions(OutputFlags, DryRunFlag, ChoiceFlags):
    pass


@dataclass(frozen=True, kw_only=True)
class ReplayOptions(OutputFlags, DryRunFlag, EditFlags, ChoiceFlags):
    pass


@app.command("show")
@taking(ShowOptions)
def show_letters(_: typer.Context, options: ShowOptions) -> None:
    """Show a group's oldest dead letters and why they failed.
    --json and --id add headers and body.
    """
    words, server, as_json = options.words, options.server, options.as_json
    if _is_key(words):
        given, group, key = words
        rows = ask_client(server, lambda mq: letters.shown(mq, given, group, key))
        show(f"parked key of group {group} on {given}", letters.MORE_COLUMNS, rows, as_json=as_json)
        return
    choose = options.choose()

    async def _show() -> list[DeadLetter]:
        async with qmq.connect(server) as mq:
            letters = await mq.dead_letters(words[0]).show(options.most or 1_000_000, choose)
            if not letters:
                await require_group(mq, words[0])
            return letters

    found = run(_show())
    if as_json or options.ids:
        show(
            f"dead letters of group {words[0]}",
            _WHOLE,
            [whole_row(each) for each in found],
            as_json=as_json,
        )
        return
    show(
        f"dead letters of group {words[0]}",
        _LETTERS,
        [_row(each) for each in found],
        as_json=as_json,
    )


@app.command("replay")
@taking(ReplayOptions)
def replay(_: typer.Context, options: ReplayOptions) -> None:
    """Deliver dead letters to the group again, each once, with a new attempt count; or a parked
    key, in order, before newer messages.
    """
    _check_whole(
        options.words, options.is_filtered or any((options.sets, options.unsets, options.body))
    )
    if options.body is not None and len(options.ids or ()) != 1:
        raise typer.BadParameter("--body is for one message: name it with --id")
    try:
        edit = LetterEdit.parse(options.sets or (), options.unsets or (), options.body)
    except InvalidArgument as failure:
        fail(failure)
    _give_back(options, edit, options.rate)


@app.command("purge")
@app.command("skip")
@taking(PurgeOptions)
def purge(_: typer.Context, options: PurgeOptions) -> None:
    """Delete dead letters for good; or skip a parked key's messages, so that the key is delivered
    again from its next message on.
    """
    _check_whole(options.words, options.is_filtered)
    _give_back(options, None)


def _give_back(
    options: PurgeOptions | ReplayOptions, edit: LetterEdit | None, rate: float = 0
) -> None:
    """Replay, with an edit, or purge, without one."""
    words, choose = options.words, options.choose()
    is_replay, is_key = edit is not None, _is_key(words)
    done = "replayed" if is_replay else "skipped" if is_key else "purged"
    title = f"would be {done}" if options.dry_run else done
    if is_key:
        rows = ask_client(
            options.server,
            lambda mq: letters.unparked(mq, *words, is_replay=is_replay, dry_run=options.dry_run),
        )
        show(title, ("key", "partition", "messages"), rows, as_json=options.as_json)
        return
    count = ask_client(options.server, lambda mq: _done(mq, options, choose, edit, rate))
    show(title, ("group", "messages"), [(words[0], count)], as_json=options.as_json)


async def _done(
    mq: qmq.Client,
    options: PurgeOptions | ReplayOptions,
    choose: Choose,
    edit: LetterEdit | None,
    rate: float,
) -> int:
    group, most, is_quiet = options.words[0], options.most, options.as_json
    letters = mq.dead_letters(group)
    if options.dry_run:
        found = await letters.show(most or 1_000_000, choose)
        edited = [edit.of(each) for each in found] if edit is not None else found
        if edited != found and not is_quiet:
            warn(f"the first one would be sent as\n{_text(edited[0].body)}")
        return len(found)
    waiting = sum(each.waiting for each in await letters.describe())
    if not waiting:
        await require_group(mq, group)
    with counting(
        "purging" if edit is None else "replaying",
        min(most, waiting) if most else waiting,
        quiet=is_quiet,
    ) as completed:
        if edit is not None:
            return await letters.replay(
                choose, edit=edit.of, messages_max=most, progress=completed, per_second=rate
            )
        return await letters.purge(choose, messages_max=most, progress=completed)


def _check_whole(words: list[str], is_filtered: bool) -> None:
    if _is_key(words) and is_filtered:
        raise typer.BadParameter(
            "a parked key is replayed or purged as a whole: leave out --subject, --id, "
            "--error, --since and --limit"
        )


def _is_key(words: list[str]) -> bool:
    """Whether the words name a parked key rather than a group.
    Raises BadParameter if they name neither.
    """
    if len(words) not in (1, 3):
        raise typer.BadParameter(
            "give a GROUP for its dead letters, or SUBJECT GROUP KEY for a parked key of an "
            "ordered subject"
        )
    return len(words) == 3


def _row(each: DeadLetter) -> tuple[Any, ...]:
    return (str(each.id), each.subject, each.attempts, each.error, time_text(each.dead_ms))


def whole_row(each: DeadLetter) -> tuple[Any, ...]:
    """All fields of a letter, for --json."""
    key = key_text(each.key) if each.key else ""
    own = {name: _text(value) for name, value in each.headers.items()}
    return (
        str(each.id),
        each.group,
        each.subject,
        each.broker_group,
        each.sequence,
        key,
        ", ".join(each.tags),
        each.attempts,
        each.error,
        time_text(each.dead_ms),
        time_text(each.create_time_ms),
        own,
        _text(each.body),
    )


def _text(data: bytes) -> str:
    """A body as text if it is UTF-8, otherwise as base64."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "base64:" + base64.b64encode(data).decode()


@app.command("delete")
def delete(
    group: Annotated[str, typer.Argument(help="The group.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    as_json: Json = False,
    server: Server = SERVER,
) -> None:
    """Delete a group's dead-letter queue with all dead letters in it, waiting or replayed. Later
    dead letters are kept.
    """
    if not yes and typer.prompt(f"type {group} to delete its dead letters", err=True) != group:
        fail(InvalidArgument("that is not the group's name: nothing was deleted"))

    async def _delete() -> int:
        async with qmq.connect(server) as mq:
            count = await mq.metadata.delete_dead_letters(group)
            if not count:
                await require_group(mq, group)
            return count

    count = run(_delete())
    say(
        f"deleted the dead letters of group {group}: {counted(count, 'queue')}",
        ("group", "queues"),
        (group, count),
        as_json=as_json,
    )
