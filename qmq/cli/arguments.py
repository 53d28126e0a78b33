"""Arguments and options that several commands have."""

from __future__ import annotations

from typing import Annotated, Any

import typer

Words = Annotated[
    list[str],
    typer.Argument(metavar="[SUBJECT] ID", help="The id of a message or of a delayed message. Give the subject to search faster."),
]


def subject_and_id(words: list[str]) -> tuple[str, str]:
    """The subject, if given, and the id. Raises BadParameter."""
    if len(words) == 1:
        return "", words[0]
    if len(words) == 2:
        return words[0], words[1]
    raise typer.BadParameter("give [SUBJECT] ID")


def port_option(text: str, envvar: str | None = None) -> Any:
    """An option for a port to listen on. 0 means any free port; the help says so after `text`."""
    return typer.Option(min=0, max=65535, envvar=envvar, help=f"{text}; 0: any free port.")
