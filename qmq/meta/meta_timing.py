"""How often a metaserver looks by itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class MetaTiming:
    """Handed in, so that a test waits for what the leader does, and not for its next look."""

    sweep_s: float = 2.0
    """What stands still: changes of routes, groups that nobody asks for, subjects that are being deleted."""
    reshard_s: float = 5.0
    """How busy the partitions of subjects are that have a policy."""


TIMING: Final = MetaTiming()
