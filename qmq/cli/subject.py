"""`qmq subject`: which subjects there are."""

from __future__ import annotations

from typing import Annotated, Any

import typer

import qmq
from qmq.cli.output import SERVER, Json, Server, run, show, time_text
from qmq.errors import UnknownSubject
from qmq.limits import BODY_BYTES_MAX

app = typer.Typer(no_args_is_help=True, help="Subjects: list, create, describe.")

_COLUMNS = ("subject", "partition", "broker group", "first", "next", "messages", "bytes", "last stored")


@app.command("list")
def list_subjects(
    prefix: Annotated[str, typer.Argument(help="Only subjects that begin so.")] = "",
    as_json: Json = False,
    server: Server = SERVER,
) -> None:
    """List subjects, with what is stored of them."""
    rows = [row for each in run(_list(server, prefix)) for row in _rows(each)]
    show("subjects", _COLUMNS, rows, as_json=as_json)


async def _list(server: str, prefix: str) -> list[Any]:
    async with qmq.connect(server) as mq:
        return await mq.metadata.list_subjects(prefix)


def _rows(subject: Any) -> list[tuple[Any, ...]]:
    rows = [
        (
            subject.settings.name, queue.partition, queue.broker_group, queue.start_sequence, queue.next_sequence,
            queue.next_sequence - queue.start_sequence, queue.stored_bytes, time_text(queue.last_append_ms),
        )
        for queue in subject.queues
    ]  # fmt: skip
    return rows or [(subject.settings.name, 0, "", 0, 0, 0, 0, "")]


@app.command("create")
def create(
    name: Annotated[str, typer.Argument(help="The subject.")],
    retention_hours: Annotated[float | None, typer.Option(help="Messages older than this may be deleted.")] = None,
    retention_mib: Annotated[int | None, typer.Option(help="Of a queue, the oldest messages beyond this may be deleted.")] = None,
    body_bytes_max: Annotated[int, typer.Option(help="The largest body.")] = BODY_BYTES_MAX,
    as_json: Json = False,
    server: Server = SERVER,
) -> None:
    """Create a subject. One that is there with the same settings is fine."""

    async def _create() -> None:
        config = qmq.SubjectConfig(
            name,
            None if retention_hours is None else int(retention_hours * 3_600_000),
            None if retention_mib is None else retention_mib << 20,
            body_bytes_max,
        )
        async with qmq.connect(server) as mq:
            await mq.metadata.create_subject(config)

    run(_create())
    show("created", ("subject",), [(name,)], as_json=as_json)


@app.command("describe")
def describe(
    name: Annotated[str, typer.Argument(help="The subject.")], as_json: Json = False, server: Server = SERVER
) -> None:
    """Show a subject's settings and what is stored of it."""

    async def _describe() -> Any:
        async with qmq.connect(server) as mq:
            found = [each for each in await mq.metadata.list_subjects(name) if each.settings.name == name]
            if not found:
                raise UnknownSubject(f"there is no subject {name!r}: `qmq subject list` shows which there are")
            return found[0]

    found = run(_describe())
    settings = found.settings
    rows = [
        (*row, _or_default(settings, "retention_ms"), _or_default(settings, "retention_bytes"), settings.body_bytes_max)
        for row in _rows(found)
    ]
    columns = (*_COLUMNS, "retention ms", "retention bytes", "body bytes max")
    show(f"subject {name}", columns, rows, as_json=as_json)


def _or_default(settings: Any, field: str) -> Any:
    return getattr(settings, field) if settings.HasField(field) else "default"
