"""What the coordination store says about access, as of some version. `qmq_coordination.access_records` keeps it up to date."""

from __future__ import annotations

from dataclasses import dataclass, field

from qmq.security.access_rules import AccessMode, AccessRule, RuleBook
from qmq.security.quotas import Quota
from qmq.security.tokens import TokenRecord


@dataclass(slots=True)
class AccessState:
    """`version` rises with each change."""

    version: int = 0
    mode: AccessMode = AccessMode.OFF
    rules: dict[str, AccessRule] = field(default_factory=dict)
    roles: dict[str, frozenset[str]] = field(default_factory=dict)
    """The members of each role, as principals."""
    tokens: dict[str, TokenRecord] = field(default_factory=dict)
    quotas: dict[str, Quota] = field(default_factory=dict)
    server_token: str = field(default="", repr=False)
    """What servers show each other. Who can read the coordination store is one of them."""
    unreadable: set[str] = field(default_factory=set)
    """Keys whose values nobody understands: they close the cluster."""

    @property
    def book(self) -> RuleBook:
        return RuleBook(self.rules, self.roles)
