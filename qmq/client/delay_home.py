"""Which delay group gets the delayed messages of an ordered subject: one, the same for all who send, so that one schedule has them.

Two delay groups do not know of each other, so what is promised about a key (docs/DELAY.md, 5) holds among the messages of one group. Each
subject has an order of preference among the groups, by a hash of both names: subjects are spread over the groups, and senders agree
without asking. The *home* is the first of them that takes messages.

* A drained group is passed over at once; it is the home again when it is resumed.
* A group that is missing in an answer is without a master, mostly for seconds: the home stays for `MISSING_S`, and messages wait.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Final

MISSING_S: Final = 15.0
"""Longer than a failover takes, much shorter than the time in which a message must be stored."""


class DelayHome:
    def __init__(self, name: str) -> None:
        self._name = name
        self._seen_s: dict[str, float] = {}

    def choose(self, groups: Mapping[str, bool], now_s: float) -> dict[str, bool]:
        """What a metaserver said of the groups (whether each is writable), with the home alone writable."""
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
