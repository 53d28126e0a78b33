"""How long commands wait before they look again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import typer


@dataclass(frozen=True, slots=True)
class CliTiming:
    """All in seconds. Handed in as the `obj` of the command's context, so that a test need not wait as an operator does."""

    follow_s: float = 0.5
    """Between two looks at the consumer groups that are still to follow a change of a route."""
    conflict_s: float = 0.5
    """Between two tries while another change of the subject is under way."""


TIMING: Final = CliTiming()


def timing_of(context: typer.Context) -> CliTiming:
    return context.find_object(CliTiming) or TIMING
