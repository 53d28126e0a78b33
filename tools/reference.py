"""Generates the reference pages in docs/reference.

    python tools/reference.py            writes the pages of `PAGES` there
    python tools/reference.py FOLDER     writes them to another folder

tests/docs/test_reference.py compares the committed pages with what this writes. Tests write two
more: json.md and rocketmq_clients.md.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Final

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1] / "tests")
)  # before tools/, which has a sim.py, too

import ordersim.bugs
import sim.bugs
from damage.cells import ENDS, MEANINGS, cells
from qmq_coordination import access_records, broker_groups, ordered_records, subjects
from rocketmq_fields import FIELDS
from specs import ordering_traces, replication_traces
from specs.model_checker import ORDERING_MISTAKES, REPLICATION_MISTAKES, STEPS_MISTAKES
from typer.main import get_command

import qmq
from qmq.backup import manifest
from qmq.cli.app import app
from qmq.cli.broker import BrokerOptions
from qmq.cli.console import ConsoleOptions
from qmq.cli.delay import DelayOptions
from qmq.cli.dev import DevOptions
from qmq.cli.gateway import GatewayOptions
from qmq.cli.meta import MetaOptions
from qmq.cli.roles import parameters_of, variables_of
from qmq.client.dead_letters import DeadLetters
from qmq.client.producing.delayed import Delayed
from qmq.node.metrics.serving import figures_by_role
from qmq.operations.findings import KINDS
from qmq.sql import dedup_tables, outbox_tables

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "reference"
MADE = "<!-- Made by tools/run reference: change the code, and run that again. -->"
TYPES = {str: "text", int: "number", float: "number", bool: "", Path: "path"}
ABOUT_COMMANDS = (
    "Every command has `--help`. A variable of the environment stands beside the default of the "
    "option that it sets."
)
SENDING = {"send", "send_many", "full", "drain", "flush", "close"}
CONSUMING = {"pull", "batches", "held", "is_paused", "pause", "resume", "close"}
INTERNAL = {
    "lane_run",
    "settle_through",
    "settler",
    "slices",
    "counters",
    "lane",
    "unanswered_verdicts",
}
MEMBERS = {
    "Producer": SENDING,
    "OrderedProducer": SENDING,
    "DelayedProducer": {*SENDING, "send_recurring"},
    "Consumer": CONSUMING,
    "OrderedConsumer": {*CONSUMING, "run"},
}
"""The methods for applications, for classes that also have methods for the rest of the client."""
HIDDEN = ("help", "install_completion", "show_completion")
ROLES = {
    "qmq broker": BrokerOptions,
    "qmq delay": DelayOptions,
    "qmq meta": MetaOptions,
    "qmq gateway": GatewayOptions,
    "qmq dev": DevOptions,
    "qmq console": ConsoleOptions,
}
DATABASES = {"sqlite": "SQLite", "postgresql": "PostgreSQL", "mysql": "MySQL and MariaDB"}
MODULES_WITH_KEYS = (broker_groups, ordered_records, subjects, access_records, manifest)
KEY = re.compile(
    r"^ {4}(/qmq/\S+)\n((?: {8}.+\n)+?) {8}removed by ((?:.+\n)(?: {8}.+\n)*)", re.MULTILINE
)


def cell(text: object) -> str:
    """Text that fits into one cell of a table."""
    return " ".join(str(text).split()).replace("|", "\\|")


def table(head: tuple[str, ...], rows: Iterable[tuple[object, ...]]) -> list[str]:
    """A table in Markdown, and an empty line."""
    lines = ["| " + " | ".join(map(cell, row)) + " |" for row in rows]
    return ["| " + " | ".join(head) + " |", "|---" * len(head) + "|", *lines, ""] if lines else []


# --- commands -------------------------------------------------------------------------------------


def commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """The command and all below it that do something, with their full names."""
    below = getattr(command, "commands", {})
    if not below or (command.invoke_without_command and name != "qmq"):
        yield name, command
    for word in sorted(below):
        if not below[word].hidden:
            yield from commands(below[word], f"{name} {word}")


def type_of(parameter: Any) -> str:
    """The type of an option's value: text, number, path; empty for a switch."""
    annotation = parameter.type_descriptor.annotation
    inner = getattr(annotation, "__args__", (annotation,))[0]
    if isinstance(inner, type) and issubclass(inner, Enum):
        return " or ".join(str(each.value) for each in inner)
    return TYPES.get(inner, getattr(inner, "__name__", "text"))


def default_of(parameter: Any) -> str:
    """The default and the environment variable of an option, if any."""
    default = parameter.default
    if parameter.required:
        return "must be given"
    plain = (
        default is not None
        and default is not False
        and default != ""
        and not callable(default)
        and default != []
    )
    shown = [f"`{str(default).lower() if isinstance(default, bool) else default}`"] if plain else []
    variables = (
        [parameter.envvar] if isinstance(parameter.envvar, str) else list(parameter.envvar or ())
    )
    return ", ".join([*shown, *(f"`{each}`" for each in variables)])


def usage(name: str, arguments: list[Any]) -> str:
    """The command's usage line."""
    words = [(each.metavar or each.name).upper() for each in arguments]
    return " ".join(
        [
            name,
            *(
                word if each.required else f"[{word}]"
                for word, each in zip(words, arguments, strict=True)
            ),
            "[OPTIONS]",
        ]
    )


def cli_page() -> str:
    found = list(commands(get_command(app), "qmq"))
    lines = ["# Commands", "", MADE, "", ABOUT_COMMANDS, ""]
    for name, command in found:
        shown = [each for each in command.params if not each.hidden and each.name not in HIDDEN]
        arguments = [each for each in shown if each.param_type_name == "argument"]
        options = [each for each in shown if each.param_type_name == "option"]
        lines += [
            f"## {name}",
            "",
            f"`{usage(name, arguments)}`",
            "",
            inspect.cleandoc(command.help or ""),
            "",
        ]
        lines += table(
            ("argument", ""), [(each.name.upper(), each.help or "") for each in arguments]
        )
        rows = [
            (
                (" ".join(f"`{word}`" for word in [*each.opts, *each.secondary_opts])),
                type_of(each),
                default_of(each),
                each.help or "",
            )
            for each in options
        ]
        lines += table(("option", "value", "default, variable", ""), rows)
    return "\n".join(lines).rstrip() + "\n"


# --- configuration --------------------------------------------------------------------------------


def notes_of(kind: type[Any]) -> dict[str, str]:
    """The docstrings of a dataclass's fields, by name."""
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(body, ast.ClassDef)
    found = {}
    for before, behind in zip(body.body, body.body[1:], strict=False):
        is_text = (
            isinstance(behind, ast.Expr)
            and isinstance(behind.value, ast.Constant)
            and isinstance(behind.value.value, str)
        )
        if isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name) and is_text:
            found[before.target.id] = behind.value.value  # type: ignore[attr-defined]
    return found


def value_of(each: dataclasses.Field[Any]) -> str:
    if each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING:
        return "must be given"
    value = (
        each.default_factory() if each.default_factory is not dataclasses.MISSING else each.default
    )
    if dataclasses.is_dataclass(value):
        return f"see {type(value).__name__}"
    if isinstance(value, Enum):
        return f"`{value.value}`" if value.value else "none"
    return f"`{value:,}`" if type(value) is int and value >= 100_000 else f"`{value!r}`"


def configuration_page() -> str:
    """The variables of the environment that set options of servers, and those that set what is no
    option.
    """
    found: dict[str, tuple[str, dict[str, str]]] = {}
    for command, options in ROLES.items():
        for each in parameters_of(options):
            option = each.annotation.__metadata__[0]
            if option.envvar:
                name = next(iter(option.param_decls or ()), f"--{each.name.replace('_', '-')}")
                of_option = found.setdefault(option.envvar, (f"`{name}`", {}))
                of_option[1][command] = as_variable(each.default)
        fields = {each.name: each.default for each in dataclasses.fields(options)}
        for field, more in variables_of(options).items():
            of_variable = found.setdefault(more.name, (more.help, {}))
            of_variable[1][command] = as_variable(fields[field])
    rows = [
        (f"`{variable}`", name, defaults_of(defaults), ", ".join(f"`{each}`" for each in defaults))
        for variable, (name, defaults) in sorted(found.items())
    ]
    about = (
        "The settings of servers are variables of the environment. Many are [options](cli.md), "
        "too, and an option that is given counts more. [SubjectConfig](api.md#subjectconfig) has "
        "the settings of a subject; `qmq subject create`, `qmq subject alter` and `qmq group set` "
        "set those of subjects and groups."
    )
    head = ("variable", "option, or what it sets", "default", "of")
    return page("Configuration", about, "", *table(head, rows))


def as_variable(default: object) -> str:
    """A default as a variable would give it; empty if there is none."""
    value = int(default) if isinstance(default, bool) else default
    return "" if value is None or value == "" else f"`{value}`"


def defaults_of(found: Mapping[str, str]) -> str:
    """The default of all commands, or what each of them has."""
    if len(set(found.values())) == 1:
        return next(iter(found.values()))
    return ", ".join(f"{each} (`{command}`)" for command, each in found.items() if each)


# --- Python ---------------------------------------------------------------------------------------


def parameter_text(each: inspect.Parameter) -> str:
    """A parameter as it is written; annotations are text already."""
    star = {inspect.Parameter.VAR_KEYWORD: "**", inspect.Parameter.VAR_POSITIONAL: "*"}.get(
        each.kind, ""
    )
    typed = "" if each.annotation is inspect.Parameter.empty else f": {each.annotation}"
    default = (
        ""
        if each.default is inspect.Parameter.empty
        else f" = {'...' if callable(each.default) else repr(each.default)}"
    )
    return f"{star}{each.name}{typed}{default}"


def signature(name: str, function: Any) -> list[str]:
    """The signature, with one parameter on each line if there are many."""
    found = inspect.signature(function)
    given: list[str] = []
    for each in found.parameters.values():
        if each.kind is inspect.Parameter.KEYWORD_ONLY and "*" not in given:
            given.append("*")
        if each.name not in ("self", "cls"):
            given.append(parameter_text(each))
    before = f"{'async ' if inspect.iscoroutinefunction(function) else ''}{name}("
    after = (
        ")"
        if found.return_annotation is inspect.Signature.empty
        else f") -> {found.return_annotation}"
    )
    line = before + ", ".join(given) + after
    lines = [line] if len(line) <= 110 else [before, *(f"    {each}," for each in given), after]
    return ["```py", *lines, "```", ""]


def text_of(found: Any) -> list[str]:
    """The text of a docstring, which has no tables and no headings. Indented lines are code."""
    return [inspect.cleandoc(found.__doc__ or ""), ""]


def members_of(kind: type[Any]) -> Iterator[tuple[str, Any]]:
    """Public methods and properties for applications, also those that it inherits from us, in the
    order of their definition.
    """
    seen: set[str] = set()
    wanted = MEMBERS.get(kind.__name__)
    for each in kind.__mro__:
        if each.__module__.startswith("qmq"):
            for name, value in vars(each).items():
                is_member = inspect.isfunction(value) or isinstance(value, property)
                is_ours = (
                    name in wanted if wanted else not name.startswith("_") and name not in INTERNAL
                )
                if is_member and is_ours and name not in seen:
                    seen.add(name)
                    yield name, value


def class_lines(name: str, kind: type[Any]) -> list[str]:
    """A class: what it is for, its fields or values, properties, methods."""
    lines = [f"## {name}", "", *text_of(kind)]
    if issubclass(kind, Enum):
        return [
            *lines,
            *table(
                ("value", ""), [(f"`{name}.{each.name}`", f"`{each.value!r}`") for each in kind]
            ),
        ]
    if dataclasses.is_dataclass(kind):
        notes = notes_of(kind)
        rows = [
            (f"`{each.name}`", f"`{each.type}`", value_of(each), notes.get(each.name, ""))
            for each in dataclasses.fields(kind)
        ]
        lines += table(("field", "type", "default", ""), rows)
    members = list(members_of(kind))
    properties = [
        (f"`{each}`", inspect.getdoc(value) or "")
        for each, value in members
        if isinstance(value, property)
    ]
    lines += table(("property", ""), properties)
    for each, value in members:
        if inspect.isfunction(value) and value.__doc__:
            lines += [f"### {name}.{each}", "", *signature(each, value), *text_of(value)]
    return lines


def api_page() -> str:
    """The page of all public names of `qmq`."""
    lines = [
        "# Python",
        "",
        MADE,
        "",
        "What `import qmq` gives. `qmq.blocking` has the same names without asyncio.",
        "",
        "## connect",
        "",
        *signature("connect", qmq.connect),
        *text_of(qmq.connect),
        "## run",
        "",
        *signature("run", qmq.run),
        *text_of(qmq.run),
    ]
    public = {name: getattr(qmq, name) for name in qmq.__all__} | {
        "Delayed": Delayed,
        "DeadLetters": DeadLetters,
    }
    for name in sorted(public):
        if inspect.isclass(public[name]):
            lines += class_lines(name, public[name])
    lines += ["## errors", "", "```text", inspect.cleandoc(qmq.errors.__doc__ or ""), "```", ""]
    return "\n".join(lines).rstrip() + "\n"


# --- tables ---------------------------------------------------------------------------------------


def page(title: str, *lines: str) -> str:
    return "\n".join([f"# {title}", "", MADE, "", *lines]).rstrip() + "\n"


def metrics_page() -> str:
    roles = figures_by_role()
    figures = {each.name: each for all_of in roles.values() for each in all_of}
    rows = [
        (
            f"`{name}`",
            each.kind,
            ", ".join(each.labels),
            each.meaning,
            ", ".join(sorted(role for role in roles if each in roles[role])),
        )
        for name, each in sorted(figures.items())
    ]
    about = "[METRICS](../METRICS.md) says how to turn them on, and how to read them."
    return page(
        "All metrics", about, "", *table(("name", "type", "labels", "meaning", "who has it"), rows)
    )


def findings_page() -> str:
    about = (
        "What `qmq doctor`, `qmq top` and the console report as unusual. "
        "[OPERATIONS](../OPERATIONS.md#findings) explains the severities."
    )
    rows = [(f"`{each.code}`", each.severities, each.condition, each.why) for each in KINDS]
    return page(
        "Findings", about, "", *table(("code", "severity", "found when", "what it means"), rows)
    )


def sql_page() -> str:
    """The tables that applications create."""
    lines = ["`qmq outbox migration` and `qmq dedup migration` print these statements.", ""]
    for title, migration in (
        ("Outbox", outbox_tables.migration),
        ("Deduplication", dedup_tables.migration),
    ):
        lines += [f"## {title}", ""]
        for dialect, name in DATABASES.items():
            lines += [f"{name}:", "", "```sql", migration(dialect).rstrip("\n"), "```", ""]
    return page("SQL tables", *lines)


def keys_page() -> str:
    """The keys that docstrings of modules list."""
    about = (
        "[COORDINATION](../COORDINATION.md) says what the store is. Numbers in keys have ten "
        "digits, so that keys sort as numbers do."
    )
    texts = "\n".join(each.__doc__ or "" for each in MODULES_WITH_KEYS)
    rows = [(f"`{key}`", value, remover) for key, value, remover in sorted(KEY.findall(texts))]
    return page(
        "Keys of the coordination store", about, "", *table(("key", "value", "removed by"), rows)
    )


def rocketmq_fields_page() -> str:
    about = (
        (
            "Every field of `apache.rocketmq.v2`, and what the gateway does with it; "
            "[ROCKETMQ](../ROCKETMQ.md) explains the concepts."
        ),
        "*Ignored*: the gateway accepts the field, and it has no effect.",
    )
    rows = [
        (message, ", ".join(f"`{each}`" for each in fields.split()), meaning)
        for message, fields, meaning in FIELDS
    ]
    return page("Fields of RocketMQ's API", *about, "", *table(("in", "fields", "in QMQ"), rows))


def planted_page() -> str:
    """What the specifications find."""
    lines = [
        "[JUDGES](../JUDGES.md#specifications) says what is planted, and how it is found.",
        "",
        "## Mistakes in the specifications",
        "",
        (
            "The invariant that breaks, and the length of the shortest counterexample, with one "
            "thread."
        ),
        "",
    ]
    for title, mistakes in (
        ("in Replication", REPLICATION_MISTAKES),
        ("in Ordering", ORDERING_MISTAKES),
        ("in Steps", STEPS_MISTAKES),
    ):
        lines += table(
            (title, "breaks", "steps"),
            [(each.name, f"`{each.breaks}`", each.steps) for each in mistakes],
        )
    lines += [
        "## Bugs in the simulators",
        "",
        "The first seed whose trace is refused, or what the specification leaves out.",
        "",
    ]
    for title, bugs, refused, outside in (
        (
            "bug of replication",
            sim.bugs.BUGS,
            replication_traces.REFUSED_AT,
            replication_traces.OUTSIDE,
        ),
        (
            "bug of ordered messages",
            ordersim.bugs.BUGS,
            ordering_traces.REFUSED_AT,
            ordering_traces.OUTSIDE,
        ),
    ):
        lines += table((title, "refused at seed"), bug_rows(bugs, refused, outside))
    return page("Planted mistakes and bugs", *lines)


def bug_rows(
    bugs: Iterable[str], refused: Mapping[str, int], outside: Mapping[str, str]
) -> list[tuple[object, ...]]:
    return [(name, refused.get(name) or outside[name]) for name in bugs]


def damage_page() -> str:
    """What damage to the files of replicas leads to."""
    about = (
        "What damage to one, two or all three replicas of a group leads to: "
        f"{len(list(cells()))} cells, because the master is paused, killed or cut off beside each. "
        "[RELIABILITY](../RELIABILITY.md#damage) says how they are tested."
    )
    ends = [
        (kind.value, damage.value, *(each.value for each in found))
        for (kind, damage), found in ENDS.items()
    ]
    meanings = [(each.value, meaning) for each, meaning in MEANINGS.items()]
    head = ("file", "damage", "on one replica", "on two", "on all three")
    return page(
        "Damaged files", about, "", *table(head, ends), *table(("word", "meaning"), meanings)
    )


PAGES: Final[Mapping[str, Callable[[], str]]] = {
    "api.md": api_page,
    "cli.md": cli_page,
    "configuration.md": configuration_page,
    "damage.md": damage_page,
    "findings.md": findings_page,
    "keys.md": keys_page,
    "metrics.md": metrics_page,
    "planted.md": planted_page,
    "rocketmq_fields.md": rocketmq_fields_page,
    "sql.md": sql_page,
}


def write(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, made in PAGES.items():
        (folder / name).write_text(made())


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
