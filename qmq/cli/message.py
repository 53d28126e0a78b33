"""`qmq message` finds, shows or traces one message by its id. `qmq why` explains in words where a
message is and what it waits for.
"""

from __future__ import annotations

import json
import sys
import time
from textwrap import wrap
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

import qmq
from qmq.cli.arguments import View, Words, subject_and_id
from qmq.cli.delay import message_facts as delayed_facts
from qmq.cli.output import SERVER, Json, Server, ask, ask_client, run, show, time_text
from qmq.cli.tables import console
from qmq.operations.messages import (
    TIMELINE,
    event_line,
    inquire,
    message_facts,
    places_of,
    timeline,
)
from qmq.operations.messages import why as told
from qmq.text import parse_json

app = typer.Typer(no_args_is_help=True, help="Find, show or trace a message by its id.")

Body = Annotated[
    str,
    typer.Option(
        "--body",
        help="How to print the body: auto (JSON or text if possible, else hex), text, json, hex.",
    ),
]
OneGroup = Annotated[str, typer.Option("--group", help="Only events of this consumer group.")]


@app.command("find")
def find(
    subject: Annotated[str, typer.Argument(help="The subject.")],
    message_id: Annotated[str, typer.Argument(help="The id: 32 hexadecimal digits.")],
    as_json: Json = False,
    server: Server = SERVER,
) -> None:
    """Show a stored message in one line."""

    found = ask(server, lambda mq: mq.metadata.find_message(subject, message_id))
    columns = (
        "subject",
        "partition",
        "broker group",
        "sequence",
        "key",
        "tags",
        "created",
        "stored",
        "body",
    )
    row = (
        found.subject,
        found.partition,
        found.broker_group,
        found.sequence,
        found.key.decode(errors="replace"),
        " ".join(found.tags),
        time_text(found.create_time_ms),
        time_text(found.append_time_ms),
        found.body.decode(errors="replace"),
    )
    show(f"message {message_id}", columns, [row], as_json=as_json)


@app.command("show")
def show_message(
    words: Words, body: Body = "auto", as_json: Json = False, server: Server = SERVER
) -> None:
    """Show a message with headers and body, at every place where it is stored. Without a subject,
    all subjects are searched.
    """
    subject, message_id = subject_and_id(words)
    if body not in ("auto", "text", "json", "hex"):
        raise typer.BadParameter("--body must be auto, text, json or hex")

    async def _places() -> list[dict[str, Any]]:
        async with qmq.connect(server) as mq:
            _, places, delayed, _ = await places_of(mq, message_id, subject)
        facts = [message_facts(each) for each in places if not each.due_ms]
        return facts or [delayed_facts(each) for each in delayed]

    found = run(_places())
    if as_json:
        sys.stdout.write(json.dumps(found) + "\n")
        return
    for facts in found:
        _print(facts, body)


def _print(facts: dict[str, Any], body: str) -> None:
    lines = Table.grid(padding=(0, 2))
    for name, value in facts.items():
        if name not in ("body", "body_base64") and value not in (None, "", [], {}):
            lines.add_row(Text(name.replace("_", " "), "bold"), Text(_cell(value)))
    console.print(lines)
    console.print(_body_text(facts, body), markup=False, highlight=False, soft_wrap=True)


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return "\n".join(f"{name}: {each}" for name, each in value.items())
    return " ".join(value) if isinstance(value, list) else str(value)


def _body_text(facts: dict[str, Any], form: str) -> str:
    import base64

    data, text = base64.b64decode(facts["body_base64"]), facts["body"]
    if form == "hex" or (form == "auto" and text is None):
        return f"hex:{data.hex()}"
    if form in ("auto", "json"):
        try:
            return json.dumps(parse_json(data), indent=2, ensure_ascii=False)
        except ValueError:
            if form == "json":
                raise typer.BadParameter("the body is not JSON: use --body text or hex") from None
    return text if text is not None else data.decode(errors="replace")


@app.command("trace")
def trace(
    words: Words, group: OneGroup = "", as_json: Json = False, server: Server = SERVER
) -> None:
    """Show the history of a message with times: created, stored, delivered, failed,
    acknowledged, moved.
    """
    subject, message_id = subject_and_id(words)

    inquiry = ask_client(server, lambda mq: inquire(mq, message_id, subject, group))
    events = timeline(inquiry)
    if as_json or View.is_wide or not console.is_terminal:
        show(f"message {inquiry.message_id}", TIMELINE, events, as_json=as_json)
    else:
        for event in events:
            for line in wrap(
                event_line(*event), console.width, subsequent_indent=" " * (len(str(event[0])) + 2)
            ):
                console.print(line, markup=False, highlight=False)
    since_ms = max([each.known_since_ms for each in inquiry.followed], default=0)
    if since_ms and not as_json:
        console.print(f"Consumer events before {time_text(since_ms)} have been deleted.")


WhyGroup = Annotated[str, typer.Option("--group", help="Only for this consumer group.")]


def why(words: Words, group: WhyGroup = "", as_json: Json = False, server: Server = SERVER) -> None:
    """Explain where a message is and what it waits for.
    Give the subject before the id to search faster.
    """
    subject, message_id = subject_and_id(words)

    paragraphs = told(
        ask_client(server, lambda mq: inquire(mq, message_id, subject, group)),
        time.time_ns() // 1_000_000,
    )
    if as_json:
        sys.stdout.write(json.dumps(paragraphs) + "\n")
        return
    for each in paragraphs:
        console.print(
            each["text"], markup=False, highlight=False, soft_wrap=not console.is_terminal
        )
