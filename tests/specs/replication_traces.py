"""Checks what simulated and real groups do against Replication.tla."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from sim.node import Node
from sim.replica_tracer import Trace
from sim.traces import trace

from specs.trace_checker import TraceVerdict, check_trace

UNLIMITED: Final = 1_000_000
LIMITS: Final = ("MaxEpoch", "MaxLength", "MaxMessages", "MaxChanges", "MaxKills", "MaxCuts")


def check_replicas(found: Trace, folder: Path) -> TraceVerdict:
    """Whether a trace is a behaviour of the specification."""
    constants = {"Replicas": set(found.replicas), "FirstVoters": set(found.voters), **dict.fromkeys(LIMITS, UNLIMITED)}
    return check_trace("Replication", constants, found.lines, folder)


def check_seed(seed: int, lines_max: int, folder: Path, bug: type[Node] | None = None) -> TraceVerdict:
    """Whether the first lines of a seed's trace are a behaviour of the specification."""
    return check_replicas(trace(seed, lines_max, bug), folder)


def is_met(seed: int, lines_max: int, bug: type[Node]) -> bool:
    """Whether a planted bug changes what a group does within the first lines of a seed's trace."""
    return trace(seed, lines_max, bug).lines != trace(seed, lines_max).lines
