"""The answer to /readyz."""

from __future__ import annotations

from typing import NamedTuple


class Readiness(NamedTuple):
    """Whether a process is ready, and a line that says why or why not."""

    is_ready: bool
    says: str
