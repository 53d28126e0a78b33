"""Arguments shared by the commands that look at one message."""

from __future__ import annotations

from typing import Annotated

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
