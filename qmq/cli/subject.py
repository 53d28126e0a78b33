"""`qmq subject` lists, creates, changes and deletes subjects, and says what their bodies look like
(`schema`, docs/SCHEMAS.md).
"""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, cast

import typer
from qmq_ordering.hashing import LOGICAL_PARTITIONS

import qmq
from qmq.cli.arguments import HOUR_MS, HOURS_MAX, MIB_MAX
from qmq.cli.output import (
    SERVER,
    CommandGroup,
    DryRun,
    Json,
    Server,
    administration,
    ask,
    fail,
    run,
    say,
    show,
    time_text,
)
from qmq.cli.roles import names_of, taking
from qmq.errors import InvalidArgument, Unavailable, UnknownSubject
from qmq.limits import BODY_BYTES_MAX, LOGICAL_PARTITIONS_MAX, LONG_BODY_BYTES_MAX, MIB
from qmq.model import DeclaredSchema, Fencing, Order, SchemaFormat, SubjectFlush, compatibility_of
from qmq.operations.text import counted
from qmq.process.description import shards_of
from qmq.schemas.declared_schema import struct_of
from qmq.text import INT64_MAX, number

if TYPE_CHECKING:
    from qmq.cli.administration import Administration

schemas = typer.Typer(
    no_args_is_help=True, help="The schema of a subject's bodies: set, show, list, delete."
)

Subject = Annotated[str, typer.Argument(help="The subject.")]


@schemas.command("set")
def set_schema(
    subject: Subject,
    json_schema: Annotated[
        Path | None, typer.Option("--json-schema", help="A file with a JSON Schema.")
    ] = None,
    avro: Annotated[Path | None, typer.Option("--avro", help="A file with an Avro schema.")] = None,
    kind: Annotated[
        str,
        typer.Option(
            "--type",
            metavar="MODULE:NAME",
            help="A Python type of JSON bodies, such as a msgspec.Struct.",
        ),
    ] = "",
    compatibility: Annotated[
        str | None,
        typer.Option(
            "--compatibility",
            help="backward, forward, full or none; default: as before, at first backward.",
        ),
    ] = None,
    dry_run: DryRun = False,
    as_json: Json = False,
    server: Server = SERVER,
) -> None:
    """Declare the next version of a subject's schema.
    It must be compatible with the version before.
    """

    async def _set() -> DeclaredSchema:
        form, text = _given(json_schema, avro, kind)
        chosen = None if compatibility is None else compatibility_of(compatibility)
        async with administration(server) as mq:
            return await mq.metadata.set_subject_schema(
                subject, form, text, chosen, dry_run=dry_run
            )

    done = run(_set())
    what = f"would be version {done.version}" if dry_run else f"is version {done.version}"
    row = (subject, done.version, done.format.value, done.compatibility.value)
    say(
        f"the schema {what} of {subject}",
        ("subject", "version", "format", "compatibility"),
        row,
        as_json=as_json,
    )


def _given(json_schema: Path | None, avro: Path | None, kind: str) -> tuple[SchemaFormat, str]:
    """Raises InvalidArgument."""
    if sum(bool(each) for each in (json_schema, avro, kind)) != 1:
        raise InvalidArgument(
            "give the schema once: --json-schema FILE, --avro FILE or --type MODULE:NAME"
        )
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
        raise InvalidArgument(
            f"--type is MODULE:NAME of a type that can be imported from here, and {name!r} "
            f"cannot: {cause}"
        ) from None
    finally:
        sys.path.remove("")
    try:
        return json.dumps(msgspec.json.schema(found), indent=1)
    except (TypeError, NameError) as cause:
        raise InvalidArgument(f"{name} has no JSON Schema: {cause}") from None


@schemas.command("show")
def show_schema(
    subject: Subject,
    version: Annotated[
        int | None,
        typer.Option(
            "--version", min=1, max=INT64_MAX, help="Of this version; default: the newest."
        ),
    ] = None,
    as_json: Json = False,
    server: Server = SERVER,
) -> None:
    """Print a subject's schema in the declared form."""
    versions = run(_versions(subject, server))
    found = (
        versions[-1]
        if version is None
        else next((each for each in versions if each.version == version), None)
    )
    if found is None:
        fail(
            InvalidArgument(
                f"the schema of {subject!r} has the versions 1 to {versions[-1].version}, "
                f"not {version}"
            )
        )
    if as_json:
        show(
            "",
            ("version", "format", "compatibility", "text"),
            [(*_row(found)[:3], found.text)],
            as_json=True,
        )
    else:
        sys.stdout.write(found.text.rstrip("\n") + "\n")


@schemas.command("list")
def list_schemas(subject: Subject, as_json: Json = False, server: Server = SERVER) -> None:
    """List the versions of a subject's schema."""
    columns = ("version", "format", "compatibility", "created", "fields")
    show(
        f"schemas of {subject}",
        columns,
        [_row(each) for each in run(_versions(subject, server))],
        as_json=as_json,
    )


def _row(schema: DeclaredSchema) -> tuple[Any, ...]:
    fields = ",".join(each.name for each in struct_of(schema).fields)
    return (
        schema.version,
        schema.format.value,
        schema.compatibility.value,
        time_text(schema.created_ms),
        fields,
    )


async def _versions(subject: str, server: str) -> list[DeclaredSchema]:
    async with administration(server) as mq:
        return await mq.metadata.subject_schemas(subject)


@schemas.command("delete")
def delete_schema(subject: Subject, as_json: Json = False, server: Server = SERVER) -> None:
    """Delete all versions of a subject's schema. Messages and tables stay as they are."""

    count = ask(server, lambda mq: mq.metadata.delete_subject_schemas(subject))
    say(
        f"deleted {counted(count, 'version')} of the schema of {subject}",
        ("subject", "versions"),
        (subject, count),
        as_json=as_json,
    )


app = typer.Typer(
    no_args_is_help=True,
    help="Subjects: list, create, show, alter, place, purge, delete; their schemas.",
)
app.add_typer(schemas, name="schema", cls=CommandGroup)

FlushOf = Annotated[
    str,
    typer.Option(
        "--flush",
        help=(
            "'sync': acknowledge a message when a majority has flushed it; 'default': the "
            "brokers' setting."
        ),
    ),
]
_ALTERED: Final = ("subject", "retention ms", "retention bytes", "body bytes max")
_COLUMNS = (
    "subject",
    "partition",
    "broker group",
    "first",
    "next",
    "messages",
    "bytes",
    "last stored",
    "order",
)


@app.command("list")
def list_subjects(
    prefix: Annotated[str, typer.Argument(help="Only subjects with this prefix.")] = "",
    as_json: Json = False,
    server: Server = SERVER,
) -> None:
    """List subjects with their stored messages."""
    found = ask(server, lambda mq: mq.metadata.list_subjects(prefix))
    show(
        "subjects",
        _COLUMNS,
        [row for each in found for row in _rows(each)],
        as_json=as_json,
        silent=found.silent,
    )


def _rows(subject: Any) -> list[tuple[Any, ...]]:
    rows = [
        (
            subject.settings.name,
            queue.partition,
            queue.broker_group,
            queue.start_sequence,
            queue.next_sequence,
            queue.next_sequence - queue.start_sequence,
            queue.stored_bytes,
            time_text(queue.last_append_ms),
            subject.settings.order,
        )
        for queue in subject.queues
    ]
    return rows or [
        (subject.settings.name, 0, "", 0, 0, 0, 0, time_text(0), subject.settings.order)
    ]


@dataclass(frozen=True, kw_only=True)
class NewSubjectOptions:
    name: Annotated[str, typer.Argument(help="The subject.")]
    retention_hours: Annotated[
        float | None,
        typer.Option(min=0, max=HOURS_MAX, help="How long messages are kept."),
    ] = None
    retention_mib: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MIB_MAX,
            help="The size of a queue beyond which its oldest messages are deleted.",
        ),
    ] = None
    body_bytes_max: Annotated[
        int, typer.Option(min=1, max=LONG_BODY_BYTES_MAX, help="The largest body.")
    ] = BODY_BYTES_MAX
    order: Annotated[
        str,
        typer.Option(
            help=(
                "'strict': messages of a key are always in order; 'best-effort': in order unless "
                "there are failures."
            )
        ),
    ] = ""
    logical_partitions: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=LOGICAL_PARTITIONS_MAX,
            help=(
                "Ordered: number of logical partitions for hashing keys; cannot be changed; "
                f"default: {LOGICAL_PARTITIONS:,}."
            ),
        ),
    ] = None
    partitions: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=LOGICAL_PARTITIONS_MAX,
            help="Ordered: the initial number of partitions; default: one per broker group.",
        ),
    ] = None
    fencing: Annotated[
        str | None,
        typer.Option(
            help=(
                "Ordered: 'lease': partitions can leave a lost broker group; 'majority': writes "
                "do not depend on the coordination store."
            )
        ),
    ] = None
    flush: FlushOf = SubjectFlush.DEFAULT.value
    as_json: Json = False
    server: Server = SERVER

    def config(self) -> qmq.SubjectConfig:
        """The subject's settings. Raises InvalidArgument."""
        hours, mib = self.retention_hours, self.retention_mib
        return qmq.SubjectConfig(
            self.name,
            None if hours is None else _in_units(hours, "--retention-hours"),
            None if mib is None else _in_units(mib, "--retention-mib"),
            self.body_bytes_max,
            flush=_flush(self.flush),
            **self._of_order(),
        )

    def _of_order(self) -> dict[str, Any]:
        order, fencing = self.order, self.fencing
        known = [each.value for each in Order if each.value]
        if not order:
            given = {
                "--logical-partitions": self.logical_partitions,
                "--partitions": self.partitions,
                "--fencing": fencing,
            }
            extra = [option for option, value in given.items() if value is not None]
            if extra:
                raise InvalidArgument(
                    f"{', '.join(extra)} needs an ordered subject: --order {' or '.join(known)}"
                )
            return {}
        if self.order not in known:
            raise InvalidArgument(f"--order must be {' or '.join(known)}, not {self.order!r}")
        fencings = [each.value for each in Fencing]
        if self.fencing is not None and self.fencing not in fencings:
            raise InvalidArgument(
                f"--fencing must be {' or '.join(fencings)}, not {self.fencing!r}"
            )
        return {
            "order": Order(self.order),
            "logical_partitions": self.logical_partitions or LOGICAL_PARTITIONS,
            "fencing": Fencing(self.fencing or Fencing.LEASE.value),
        }


@app.command("create")
@taking(NewSubjectOptions)
def create(_: typer.Context, options: NewSubjectOptions) -> None:
    """Create a subject. Succeeds if it exists with the same settings. A subject cannot change
    between ordered and unordered.
    """

    async def _create() -> None:
        config = options.config()
        async with administration(options.server) as mq:
            await mq.metadata.create_subject(config, partitions=options.partitions or 0)

    run(_create())
    name, order = options.name, options.order
    kind = f"with the order {order}" if order else "unordered"
    say(
        f"subject {name} is there, {kind}",
        ("subject", "order"),
        (name, order),
        as_json=options.as_json,
    )


def _flush(text: str) -> SubjectFlush:
    known = [each.value for each in SubjectFlush]
    if text not in known:
        raise InvalidArgument(f"--flush must be {' or '.join(known)}, not {text!r}")
    return SubjectFlush(text)


@app.command("show")
@app.command("describe", hidden=True)
def describe(
    name: Annotated[str, typer.Argument(help="The subject.")],
    as_json: Json = False,
    server: Server = SERVER,
) -> None:
    """Show a subject's settings and stored messages."""

    found, silent = ask(server, lambda mq: _find(mq, name))
    settings = found.settings
    rows = [
        (
            *row,
            _or_default(settings, "retention_ms"),
            _or_default(settings, "retention_bytes"),
            settings.body_bytes_max,
            ",".join(settings.broker_groups),
            settings.logical_partitions,
            settings.fencing if settings.order else "",
            settings.flush,
        )
        for row in _rows(found)
    ]
    columns = (
        *_COLUMNS,
        "retention ms",
        "retention bytes",
        "body bytes max",
        "lives on",
        "logical partitions",
        "fencing",
        "flush",
    )
    show(f"subject {name}", columns, rows, as_json=as_json, silent=silent)


async def _find(mq: Administration, name: str) -> tuple[Any, dict[str, str]]:
    """The subject, and its broker groups that did not answer, with the reason."""
    found = await mq.metadata.find_subject(name)
    if found is None:
        raise UnknownSubject(f"there is no subject {name!r}: `qmq subject list` shows all")
    return found.description, found.silent


@app.command("flush")
def set_flush(
    name: Annotated[str, typer.Argument(help="The subject.")],
    flush: FlushOf,
    as_json: Json = False,
    server: Server = SERVER,
) -> None:
    """Set when messages of a subject are acknowledged.
    Brokers apply the change within a second or two.
    """

    async def _set() -> str:
        async with administration(server) as mq:
            return (await mq.metadata.set_subject_flush(name, _flush(flush))).flush

    now = run(_set())
    say(f"the flush of subject {name} is {now}", ("subject", "flush"), (name, now), as_json=as_json)


@app.command("alter")
def alter(
    name: Annotated[str, typer.Argument(help="The subject.")],
    retention_hours: Annotated[
        str | None,
        typer.Option(
            help="How long messages are kept, or 'default': as the brokers' settings say."
        ),
    ] = None,
    retention_mib: Annotated[
        str | None,
        typer.Option(
            help=(
                "The size of a queue beyond which its oldest messages are deleted, or 'default': "
                "as the brokers' settings say."
            )
        ),
    ] = None,
    body_bytes_max: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=LONG_BODY_BYTES_MAX,
            help="The largest body. Longer ones that are stored stay.",
        ),
    ] = None,
    as_json: Json = False,
    server: Server = SERVER,
) -> None:
    """Change settings of a subject. What is not given stays. Brokers follow within a second or two;
    a shorter retention deletes.
    """

    async def _alter() -> Any:
        async with administration(server) as mq:
            return await mq.metadata.alter_subject(
                name,
                retention_ms=_limit(retention_hours, "--retention-hours"),
                retention_bytes=_limit(retention_mib, "--retention-mib"),
                body_bytes_max=body_bytes_max,
            )

    now = run(_alter())
    row = (
        name,
        _or_default(now, "retention_ms"),
        _or_default(now, "retention_bytes"),
        now.body_bytes_max,
    )
    kept = ", ".join(f"{what} {value}" for what, value in zip(_ALTERED[1:], row[1:], strict=True))
    say(f"subject {name}: {kept}", _ALTERED, row, as_json=as_json)


def _limit(text: str | None, option: str) -> int | Literal["default"] | None:
    if text is None or text == "default":
        return cast('Literal["default"] | None', text)
    found = number(text)
    if found is None or found * _UNITS[option] < 1:
        raise InvalidArgument(f"{option} is a positive number or 'default', not {text!r}")
    return _in_units(found, option)


_UNITS: Final = {"--retention-hours": HOUR_MS, "--retention-mib": MIB}
"""The milliseconds or bytes in one unit of an option."""


def _in_units(value: float, option: str) -> int:
    """The value in milliseconds or bytes. Raises InvalidArgument."""
    unit = _UNITS[option]
    if not abs(value * unit) <= INT64_MAX:  # neither is NaN
        raise InvalidArgument(f"{option} is at most {INT64_MAX // unit}, not {value}")
    return int(value * unit)


@app.command("place")
def place(
    name: Annotated[str, typer.Argument(help="The subject.")],
    groups: Annotated[
        str,
        typer.Option(
            "--groups",
            help="The new broker groups: g1,g2. A sharded broker's name stands for all its shards.",
        ),
    ],
    dry_run: DryRun = False,
    as_json: Json = False,
    server: Server = SERVER,
) -> None:
    """Place a subject on other broker groups. Stored messages stay on their groups and are consumed
    from there.
    """

    async def _place() -> tuple[str, str, str]:
        async with administration(server) as mq:
            before = await _groups_of(mq, name)
            known = [
                each.broker_group
                for each in (await mq.metadata.cluster()).groups
                if not each.is_delay
            ]
            wanted = tuple(
                group for each in names_of(groups, "--groups") for group in shards_of(each, known)
            )
            after = (
                wanted if dry_run else (await mq.metadata.place_subject(name, wanted)).broker_groups
            )
            return (name, before, ",".join(after))

    show(
        "would be" if dry_run else "placed",
        ("subject", "from", "to"),
        [run(_place())],
        as_json=as_json,
    )


async def _groups_of(mq: Administration, name: str) -> str:
    """The broker groups by name. They need no master: a subject is often moved because its group
    has lost it.
    """
    try:
        return ",".join((await mq.metadata.locate(name)).settings.broker_groups)
    except Unavailable:
        return "unreachable"


def _or_default(settings: Any, field: str) -> Any:
    return getattr(settings, field) if settings.HasField(field) else "default"


@app.command("purge")
def purge(
    name: Annotated[str, typer.Argument(help="The subject.")],
    yes: Annotated[
        bool, typer.Option("--yes", help="Do not ask for the subject's name again.")
    ] = False,
    as_json: Json = False,
    server: Server = SERVER,
) -> None:
    """Delete all messages of a subject that are stored now. The subject stays, and its groups
    continue with later messages.
    """

    async def _count() -> int:
        async with administration(server) as mq:
            found, _ = await _find(mq, name)
        return sum(queue.next_sequence - queue.start_sequence for queue in found.queues)

    if (
        not yes
        and typer.prompt(f"type {name} to delete its {run(_count()):,} messages", err=True) != name
    ):
        fail(InvalidArgument("that is not the subject's name: nothing was deleted"))
    show(
        "purged",
        ("subject", "messages"),
        [(name, ask(server, lambda mq: mq.metadata.purge_subject(name)))],
        as_json=as_json,
    )


@app.command("delete")
def delete(
    name: Annotated[str, typer.Argument(help="The subject.")],
    yes: Annotated[
        bool, typer.Option("--yes", help="Do not ask for the subject's name again.")
    ] = False,
    as_json: Json = False,
    server: Server = SERVER,
) -> None:
    """Delete a subject with its messages, groups, routes, settings and pauses. A later subject of
    the same name starts empty.
    """
    if not yes and typer.prompt(f"type {name} to delete it", err=True) != name:
        fail(InvalidArgument("that is not the subject's name: nothing was deleted"))

    count = ask(server, lambda mq: mq.metadata.delete_subject(name))
    say(
        f"deleted subject {name}: {counted(count, 'queue')}",
        ("subject", "queues"),
        (name, count),
        as_json=as_json,
    )
