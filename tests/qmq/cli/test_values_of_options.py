"""Values that no option can take: every option of every command refuses them in words."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import is_dataclass
from math import inf
from typing import Any, get_args, get_origin, get_type_hints

import pytest
import typer
from typer.testing import CliRunner, Result

from qmq.cli.app import COMMANDS, app, loaded
from qmq.cli.roles import Variable, given_by_variables, variables_of

NUMBERS = (int, float)
NO_NUMBERS = ("nan", "inf", "-inf", "-1", "1e300", str(10**30))
NO_TEXT = os.fsdecode(b"a\xff")
"""What Python makes of an argument that is not UTF-8."""
SHOWN = "a\\udcff is not valid UTF-8"


def commands() -> Iterator[tuple[list[str], Any]]:
    """Every command that is no group, with its words."""

    def below(words: list[str], command: Any) -> Iterator[tuple[list[str], Any]]:
        children = getattr(command, "commands", {})
        if not children:
            yield words, command
        for name, child in children.items():
            yield from below([*words, name], child)

    for name in COMMANDS:
        yield from below([name], loaded(name))


def kind_of(parameter: Any) -> Any:
    """The type of the parameter's value, or of each value of a list."""
    kind = parameter.type_descriptor.annotation
    return get_args(kind)[0] if get_origin(kind) is list else kind


def line(words: list[str], command: Any, parameter: Any, value: str) -> list[str]:
    """The command with this value of the parameter, and some value of all that must be given."""
    named, others = [], []
    for each in command.params:
        if each is parameter or each.required:
            text = value if each is parameter else "1"
            if each.param_type_name == "argument":
                others.append(text)
            else:
                named += [each.opts[0], text]
    return [*words, *named, "--", *others]


def run(words: list[str]) -> Result:
    return CliRunner().invoke(app, words)


def answers(kind: type, values: Sequence[str]) -> Iterator[tuple[str, Any, Result]]:
    """What commands answer to these values of each of their parameters of this type."""
    for words, command in commands():
        for each in command.params:
            if kind_of(each) is kind:
                for value in values:
                    name = f"{' '.join(words)}: {each.opts[0]} {value!r}"
                    yield name, each, run(line(words, command, each, value))


def test_numbers_have_a_least_and_a_greatest_value() -> None:
    found = [
        (words, each)
        for words, command in commands()
        for each in command.params
        if kind_of(each) in NUMBERS
    ]
    assert found
    assert [words for words, each in found if each.min is None or each.max is None] == []
    assert [
        each.name
        for kind in NUMBERS
        for _, each in variables(kind)
        if each.at_least is None or each.at_most == inf
    ] == []


def test_options_refuse_numbers_beyond_reason() -> None:
    found = [each for kind in NUMBERS for each in answers(kind, NO_NUMBERS)]
    assert found
    wrong = [
        name
        for name, option, result in found
        if result.exit_code != 2
        or option.opts[0] not in result.stderr
        or "Input should be" not in result.stderr
    ]
    assert wrong == []


def test_parameters_refuse_bytes_that_are_no_text() -> None:
    found = list(answers(str, [NO_TEXT]))
    assert found
    assert [
        n for n, _, result in found if result.exit_code != 2 or SHOWN not in result.stderr
    ] == []


def variables(kind: type) -> Iterator[tuple[type, Variable]]:
    """The settings of this type that only variables give, of all commands."""
    for _ in commands():  # loads all modules
        pass
    for name in [each for each in sys.modules if each.startswith("qmq.cli.")]:
        for options in vars(sys.modules[name]).values():
            if isinstance(options, type) and is_dataclass(options):
                hints = get_type_hints(options)
                for field, variable in variables_of(options).items():
                    if kind in (hints[field], *get_args(hints[field])):
                        yield options, variable


@pytest.mark.parametrize(
    ("kind", "values"), [(int, NO_NUMBERS), (float, NO_NUMBERS), (str, [NO_TEXT])]
)
def test_variables_refuse_the_same(kind: type, values: Sequence[str]) -> None:
    found = list(variables(kind))
    assert found
    for options, variable in found:
        for value in values:
            with pytest.raises(typer.BadParameter, match=variable.name):
                given_by_variables(options, {variable.name: value})
