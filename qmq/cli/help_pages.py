"""The `--help` page of a group of commands: its commands in sections, each with the whole first sentence of its help."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import typer
from typer.core import TyperGroup

SENTENCE_CHARS_MAX: Final = 200


class Section(StrEnum):
    """The sections of `qmq --help`, in their order."""

    MESSAGES = "Messages"
    SUBJECTS = "Subjects and groups"
    CLUSTER = "The cluster"
    ACCESS = "Access"
    SERVERS = "Servers"
    APPLICATIONS = "Applications and lakes"
    HERE = "This machine"


class CommandGroup(TyperGroup):
    """A group whose help fits any terminal: sentences are wrapped, never cut."""

    def format_commands(self, ctx: typer.Context, formatter: object) -> None:  # type: ignore[override]
        """Write a list for each section; commands without one come first."""
        sections: dict[str, list[tuple[str, str]]] = {section: [] for section in ("", *Section)}
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            if command is not None and not command.hidden:
                section = getattr(command, "rich_help_panel", None)
                rows = sections[section if isinstance(section, str) else ""]
                rows.append((name, command.get_short_help_str(SENTENCE_CHARS_MAX)))
        for section, rows in sections.items():
            if rows:
                with formatter.section(section or "Commands"):  # type: ignore[attr-defined]
                    formatter.write_dl(rows)  # type: ignore[attr-defined]
