"""Checks what a simulated cluster does with an ordered subject against Ordering.tla."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Final

from ordersim.plan import draw
from ordersim.run import SUBJECT, simulate
from ordersim.tracer import Observation, Tracer

from specs.ordering_trace import ordering_lines
from specs.trace_checker import TraceVerdict, check_trace

LEFT_OUT: Final = ("kill_producer", "new_group", "unpark")
"""Faults after which a trace would end at once."""


def traced(seed: int, observations_max: int, bug: Callable[[], AbstractContextManager[None]] | None = None) -> Tracer:
    """What is seen of a seed's run: of one producer and one group, without parked keys and messages that fail."""
    drawn = draw(random.Random(f"trace {seed}"))
    faults = tuple(each for each in drawn.faults if each not in LEFT_OUT) or ("kill_master",)
    plan = replace(
        drawn, rounds=1, producers=1, groups=("g",), on_failure="block", unknown="resend", delivery_s=600.0, hold_every_ms=0, faults=faults
    )
    tracer = Tracer(SUBJECT, "g", observations_max, lambda body: int(body.rpartition(b"/")[2]))
    result = simulate(seed, None if bug is None else bug(), plan=plan, tracer=tracer)
    if result.failure and bug is None:
        raise RuntimeError(f"seed {seed}: {result.failure}")
    return tracer


def check_observations(found: Sequence[Observation], folder: Path) -> TraceVerdict:
    """Whether what was seen is a behaviour of the specification."""
    lines = ordering_lines(found)
    return check_trace("Ordering", lines.constants, lines.lines, folder)


def check_ordering_seed(
    seed: int, observations_max: int, folder: Path, bug: Callable[[], AbstractContextManager[None]] | None = None
) -> TraceVerdict:
    """Whether the first observations of a seed's run are a behaviour of the specification."""
    return check_observations(traced(seed, observations_max, bug).found, folder)
