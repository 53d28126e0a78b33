"""The events of one seed as readable lines: `tools/run sim_order --replay SEED`."""

from __future__ import annotations


class Story:
    """Lines of (milliseconds, who, what)."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, str, str]] = []

    def tell(self, now_ms: int, name: str, what: str) -> None:
        """One line."""
        self.lines.append((now_ms, name, what))
