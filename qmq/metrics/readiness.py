"""What /readyz is answered with."""

from __future__ import annotations

from typing import NamedTuple


class Readiness(NamedTuple):
    """Whether a process does what it is there for, and how it stands: a line."""

    is_ready: bool
    says: str
