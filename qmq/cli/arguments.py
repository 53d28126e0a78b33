"""Words that commands about one message share."""

from __future__ import annotations

from typing import Annotated

import typer

Words = Annotated[
    list[str],
    typer.Argument(metavar="[SUBJECT] ID", help="The message's id, or a delayed message's; naming its subject shortens the search."),
]


def subject_and_id(words: list[str]) -> tuple[str, str]:
    """What was given. Raises BadParameter."""
    if len(words) == 1:
        return "", words[0]
    if len(words) == 2:
        return words[0], words[1]
    raise typer.BadParameter("give [SUBJECT] ID")
