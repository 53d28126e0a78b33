"""The intervals of a metaserver's background work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class MetaTiming:
    """Passed in, so that tests can use shorter intervals."""

    sweep_s: float = 2.0
    """For interrupted route changes, groups without polling consumers, and deletions."""
    reshard_s: float = 5.0
    """For the load of partitions of subjects that have a reshard policy."""


TIMING: Final = MetaTiming()
