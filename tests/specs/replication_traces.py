"""Checks what simulated and real groups do against Replication.tla."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from sim.node import Node
from sim.replica_tracer import Trace
from sim.traces import trace

from specs.model_checker import TraceVerdict, check_trace

UNLIMITED: Final = 1_000_000
OUTSIDE: Final = {
    "acknowledge before the flush": "flush=sync",
    "count a flush that began before a cut": "flush=sync",
    "count written as stored": "flush=sync",
    "cut entries, but still count them as stored, and cut committed ones": "flush=sync",
    "count a new disk at once": "new disks",
    "forget with a new disk what was promised": "new disks",
    "leave a replica in step behind when its next entry is gone": "LogReset",
    "start over at a Reset that came twice": "LogReset",
    "say nothing to a silent peer whose next entry is gone": "LogReset",
    "answer everything that waits at any commit": "answers to clients",
    "acknowledge when the master has it": "answers to clients",
    "accept a hello without its proof": "proofs of links",
    "remove a voter though too few of those that stay are there": "who answers",
    "promise although the disk has no room for the promise": "full disks",
}
"""Planted bugs of the simulator in what the specification leaves out."""
LIMITS: Final = ("MaxEpoch", "MaxLength", "MaxMessages", "MaxChanges", "MaxKills", "MaxCuts")


def check_replicas(found: Trace, folder: Path) -> TraceVerdict:
    """Whether a trace is a behaviour of the specification."""
    constants = {"Replicas": set(found.replicas), "FirstVoters": set(found.voters), **dict.fromkeys(LIMITS, UNLIMITED)}
    return check_trace("Replication", constants, found.lines, folder)


def check_seed(seed: int, lines_max: int, folder: Path, bug: type[Node] | None = None) -> TraceVerdict:
    """Whether the first lines of a seed's trace are a behaviour of the specification."""
    return check_replicas(trace(seed, lines_max, bug), folder)
