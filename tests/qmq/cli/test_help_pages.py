"""Help in a terminal of 80 columns: whole words, whole option names, no boxes."""

from __future__ import annotations

from typing import Any

import pytest
from cli_support import commands
from typer.main import get_command

from qmq.cli.app import app
from qmq.cli.output import Section

COMMAND: Any = get_command(app)
WIDTH = 80


def help_of(command: Any, name: str) -> str:
    return str(
        command.get_help(command.context_class(command, info_name=name, terminal_width=WIDTH))
    )


@pytest.mark.parametrize("name", [name for name, _ in commands(COMMAND)])
def test_help_shows_every_option_whole_within_80_columns(name: str) -> None:
    command = dict(commands(COMMAND))[name]
    text = help_of(command, name)
    assert [line for line in text.splitlines() if len(line) > WIDTH] == []
    assert not set("│╭─") & set(text)
    shown = [parameter for parameter in command.params if not getattr(parameter, "hidden", False)]
    options = [each for parameter in shown for each in parameter.opts if each.startswith("--")]
    assert [each for each in options if each not in text] == []


def test_the_list_of_commands_has_sections_and_no_sentence_is_cut() -> None:
    text = help_of(COMMAND, "qmq")
    assert [section for section in Section if f"\n{section}:\n" not in text] == []
    assert "..." not in text.removeprefix("Usage: qmq [OPTIONS] COMMAND [ARGS]...")
    assert all(f"\n  {name}" in text for name in COMMAND.commands)
