"""`qmq why` explains in words where a message is and what it waits for."""

from __future__ import annotations

import json
import sys
import time
from typing import Annotated

import typer

from qmq.cli.arguments import Words, subject_and_id
from qmq.cli.output import SERVER, Json, Server, ask, console
from qmq.operations.inquiry import inquire
from qmq.operations.message_view import why as told

Group = Annotated[str, typer.Option("--group", help="Only for this consumer group.")]


def why(words: Words, group: Group = "", as_json: Json = False, server: Server = SERVER) -> None:
    """Explain where a message is and what it waits for. Give the subject before the id to search faster."""
    subject, message_id = subject_and_id(words)

    paragraphs = told(ask(server, lambda mq: inquire(mq, message_id, subject, group)), time.time_ns() // 1_000_000)
    if as_json:
        sys.stdout.write(json.dumps(paragraphs) + "\n")
        return
    for each in paragraphs:
        console.print(each["text"], markup=False, highlight=False, soft_wrap=not console.is_terminal)
