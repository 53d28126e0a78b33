"""Invariants that hold for all input from clients. A replica that finds one broken stops with an error, instead of continuing with a wrong
state.

A check here stays on under `python -O`, which removes each `assert`, so that replicas would differ. A check never tests a condition that a
client or the content of the log can cause: brokers refuse such input before they store it, or all replicas skip it (docs/REPLICATION.md).
"""

from __future__ import annotations


class InvariantBroken(AssertionError):
    """An invariant is broken: the process must stop before it does anything else."""


def check(condition: object, text: str) -> None:
    """Raise InvariantBroken, which ends the process, unless the condition holds."""
    if not condition:
        raise InvariantBroken(text)
