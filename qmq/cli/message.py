"""`qmq message`: finding one message."""

from __future__ import annotations

from typing import Annotated, Any

import typer

import qmq
from qmq.cli.output import SERVER, Json, Server, run, show, time_text

app = typer.Typer(no_args_is_help=True, help="Messages: find one by its id.")


@app.command("find")
def find(
    subject: Annotated[str, typer.Argument(help="The subject.")],
    message_id: Annotated[str, typer.Argument(help="The id: 32 hexadecimal digits.")],
    as_json: Json = False,
    server: Server = SERVER,
) -> None:
    """Show a stored message."""

    async def _find() -> Any:
        async with qmq.connect(server) as mq:
            return await mq.metadata.find_message(subject, message_id)

    found = run(_find())
    columns = ("subject", "partition", "broker group", "sequence", "key", "tags", "created", "stored", "body")
    row = (
        found.subject, found.partition, found.broker_group, found.sequence, found.key.decode(errors="replace"), " ".join(found.tags),
        time_text(found.create_time_ms), time_text(found.append_time_ms), found.body.decode(errors="replace"),
    )  # fmt: skip
    show(f"message {message_id}", columns, [row], as_json=as_json)
