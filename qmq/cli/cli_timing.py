"""How long commands wait before they poll again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import typer


@dataclass(frozen=True, slots=True)
class CliTiming:
    """All values are in seconds. Tests pass shorter ones as the `obj` of the command's context."""

    follow_s: float = 0.5
    """Between two polls of the consumer groups that have not yet followed a route change."""
    conflict_s: float = 0.5
    """Between two attempts while another change of the subject is in progress."""


TIMING: Final = CliTiming()


def timing_of(context: typer.Context) -> CliTiming:
    return context.find_object(CliTiming) or TIMING
