"""Checks traces of the replication simulator against Replication.tla."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from sim.node import Node
from sim.traces import trace

from specs.trace_checker import TraceVerdict, check_trace

UNLIMITED: Final = 1_000_000
LIMITS: Final = ("MaxEpoch", "MaxLength", "MaxMessages", "MaxChanges", "MaxKills", "MaxCuts")


def check_seed(seed: int, lines_max: int, folder: Path, bug: type[Node] | None = None) -> TraceVerdict:
    """Whether the first lines of a seed's trace are a behaviour of the specification."""
    found = trace(seed, lines_max, bug)
    constants = {"Replicas": set(found.replicas), "FirstVoters": set(found.voters), **dict.fromkeys(LIMITS, UNLIMITED)}
    return check_trace("Replication", constants, found.lines, folder)
