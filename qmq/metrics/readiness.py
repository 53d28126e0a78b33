"""The answer to /readyz."""

from __future__ import annotations

from typing import NamedTuple


class Readiness(NamedTuple):
    """The readiness of a process, and a line with the reason."""

    is_ready: bool
    says: str
