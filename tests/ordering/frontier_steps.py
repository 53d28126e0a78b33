"""All steps that a group's frontier can make."""

from __future__ import annotations

from collections.abc import Mapping

from qmq_ordering.lanes import Cuts, Finished, Frontier, Gate, advance
from qmq_ordering.routes import Route


def advance_fully(
    frontier: Frontier,
    gate: Gate,
    routes: Mapping[int, Route],
    latest: int,
    finished: Finished,
    cuts: Cuts | None = None,
) -> list[Frontier]:
    """The frontier after each step; empty if nothing moves."""
    steps = [frontier]
    while (following := advance(steps[-1], gate, routes, latest, finished, cuts)) != steps[-1]:
        steps.append(following)
    return steps[1:]
