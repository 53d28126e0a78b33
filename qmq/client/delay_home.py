"""The home of an ordered subject's delayed messages: the delay group to which all clients send them.

The guarantee about the order of a key (docs/DELAY.md, 5) holds within one delay group, because delay groups do not communicate with each
other. Each subject has an order of preference among the delay groups, by a hash of both names: subjects are spread over the groups, and
clients agree without communicating. The *home* is the first delay group that takes messages.

* A drained group is skipped immediately, and is the home again when it is resumed.
* A group that is missing in an answer has no master, usually for seconds: it stays the home for `MISSING_S`, and messages wait.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Final

MISSING_S: Final = 15.0
"""Longer than a failover takes, and much shorter than the time in which a message must be stored."""


class DelayHome:
    def __init__(self, name: str) -> None:
        self._name = name
        self._seen_s: dict[str, float] = {}

    def choose(self, groups: Mapping[str, bool], now_s: float) -> dict[str, bool]:
        """The answer of a metaserver (whether each group is writable), with only the home writable."""
        for group, is_writable in groups.items():
            if is_writable:
                self._seen_s[group] = now_s
            else:
                self._seen_s.pop(group, None)
        self._seen_s = {group: seen_s for group, seen_s in self._seen_s.items() if now_s - seen_s < MISSING_S}
        home = max(self._seen_s, key=self._rank, default=None)
        return {group: group == home for group in groups}

    def _rank(self, group: str) -> bytes:
        return hashlib.blake2b(f"{self._name}~{group}".encode(), digest_size=8).digest()
