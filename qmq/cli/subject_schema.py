"""`qmq subject schema`: what the bodies of a subject look like (docs/SCHEMAS.md)."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

import qmq
from qmq.cli.output import SERVER, DryRun, Json, Server, ask, fail, run, say, show, time_text
from qmq.errors import InvalidArgument
from qmq.operations.finding import counted
from qmq.schemas.declared_schema import DeclaredSchema, SchemaFormat, compatibility_of

app = typer.Typer(no_args_is_help=True, help="The schema of a subject's bodies: set, show, list, delete.")

Subject = Annotated[str, typer.Argument(help="The subject.")]


@app.command("set")
def set_schema(
    subject: Subject,
    json_schema: Annotated[Path | None, typer.Option("--json-schema", help="A file with a JSON Schema.")] = None,
    avro: Annotated[Path | None, typer.Option("--avro", help="A file with an Avro schema.")] = None,
    kind: Annotated[
        str, typer.Option("--type", metavar="MODULE:NAME", help="A Python type of JSON bodies, such as a msgspec.Struct.")
    ] = "",
    compatibility: Annotated[
        str | None, typer.Option("--compatibility", help="backward, forward, full or none; default: as before, at first backward.")
    ] = None,
    dry_run: DryRun = False,
    as_json: Json = False,
    server: Server = SERVER,
) -> None:
    """Declare the next version of a subject's schema. It must be compatible with the version before."""

    async def _set() -> DeclaredSchema:
        form, text = _given(json_schema, avro, kind)
        chosen = None if compatibility is None else compatibility_of(compatibility)
        async with qmq.connect(server) as mq:
            return await mq.metadata.set_subject_schema(subject, form, text, chosen, dry_run=dry_run)

    done = run(_set())
    what = f"would be version {done.version}" if dry_run else f"is version {done.version}"
    row = (subject, done.version, done.format.value, done.compatibility.value)
    say(f"the schema {what} of {subject}", ("subject", "version", "format", "compatibility"), row, as_json=as_json)


def _given(json_schema: Path | None, avro: Path | None, kind: str) -> tuple[SchemaFormat, str]:
    """Raises InvalidArgument."""
    if sum(bool(each) for each in (json_schema, avro, kind)) != 1:
        raise InvalidArgument("give the schema once: --json-schema FILE, --avro FILE or --type MODULE:NAME")
    if kind:
        return SchemaFormat.JSON_SCHEMA, _schema_of(kind)
    path = json_schema or avro
    assert path is not None
    try:
        return SchemaFormat.JSON_SCHEMA if json_schema else SchemaFormat.AVRO, path.read_text()
    except (OSError, UnicodeDecodeError) as cause:
        raise InvalidArgument(f"the schema's file cannot be read: {cause}") from None


def _schema_of(name: str) -> str:
    """The JSON Schema of a Python type. Raises InvalidArgument."""
    module, _, attribute = name.partition(":")
    try:
        import msgspec
    except ImportError:
        raise InvalidArgument("--type needs msgspec: pip install 'qmq[typed]'") from None
    sys.path.insert(0, "")  # a module of the application, which is started from its folder
    try:
        found: Any = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as cause:
        raise InvalidArgument(f"--type is MODULE:NAME of a type that can be imported from here, and {name!r} cannot: {cause}") from None
    finally:
        sys.path.remove("")
    try:
        return json.dumps(msgspec.json.schema(found), indent=1)
    except (TypeError, NameError) as cause:
        raise InvalidArgument(f"{name} has no JSON Schema: {cause}") from None


@app.command("show")
def show_schema(
    subject: Subject,
    version: Annotated[int | None, typer.Option("--version", min=1, help="Of this version; default: the newest.")] = None,
    as_json: Json = False,
    server: Server = SERVER,
) -> None:
    """Print a subject's schema in the declared form."""
    versions = run(_versions(subject, server))
    found = versions[-1] if version is None else next((each for each in versions if each.version == version), None)
    if found is None:
        fail(InvalidArgument(f"the schema of {subject!r} has the versions 1 to {versions[-1].version}, not {version}"))
    if as_json:
        show("", ("version", "format", "compatibility", "text"), [(*_row(found)[:3], found.text)], as_json=True)
    else:
        sys.stdout.write(found.text.rstrip("\n") + "\n")


@app.command("list")
def list_schemas(subject: Subject, as_json: Json = False, server: Server = SERVER) -> None:
    """List the versions of a subject's schema."""
    columns = ("version", "format", "compatibility", "created", "fields")
    show(f"schemas of {subject}", columns, [_row(each) for each in run(_versions(subject, server))], as_json=as_json)


def _row(schema: DeclaredSchema) -> tuple[Any, ...]:
    fields = ",".join(each.name for each in schema.struct().fields)
    return schema.version, schema.format.value, schema.compatibility.value, time_text(schema.created_ms), fields


async def _versions(subject: str, server: str) -> list[DeclaredSchema]:
    async with qmq.connect(server) as mq:
        return await mq.metadata.subject_schemas(subject)


@app.command("delete")
def delete_schema(subject: Subject, as_json: Json = False, server: Server = SERVER) -> None:
    """Delete all versions of a subject's schema. Messages and tables stay as they are."""

    count = ask(server, lambda mq: mq.metadata.delete_subject_schemas(subject))
    say(f"deleted {counted(count, 'version')} of the schema of {subject}", ("subject", "versions"), (subject, count), as_json=as_json)
