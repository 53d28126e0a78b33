"""The access records of the coordination store, as of some version. `qmq_coordination.access_records` keeps them up to date."""

from __future__ import annotations

from dataclasses import dataclass, field

from qmq.security.access_rules import AccessMode, AccessRule, RuleBook
from qmq.security.quotas import Quota
from qmq.security.tokens import TokenRecord


@dataclass(slots=True)
class AccessState:
    """`version` increases with each change."""

    version: int = 0
    mode: AccessMode = AccessMode.OFF
    rules: dict[str, AccessRule] = field(default_factory=dict)
    roles: dict[str, frozenset[str]] = field(default_factory=dict)
    """The members of each role, as principals."""
    tokens: dict[str, TokenRecord] = field(default_factory=dict)
    quotas: dict[str, Quota] = field(default_factory=dict)
    server_token: str = field(default="", repr=False)
    """The token that servers show each other. Everybody who can read the coordination store can act as a server."""
    unreadable: set[str] = field(default_factory=set)
    """Keys with unreadable values: they close the cluster."""

    @property
    def book(self) -> RuleBook:
        return RuleBook(self.rules, self.roles)
