"""What operators said about consumer groups, as the broker asks for it: how messages are tried again, and who is paused.

The coordination store has it (docs/DELIVERY.md); a broker sees it by its view, which may be a moment behind. Replicas
never need to agree on it: the master decides by it, and writes what it decided.
"""

from __future__ import annotations

from typing import Final, Protocol

from qmq.model import GroupSettings

DEFAULT: Final = GroupSettings()


class GroupRules(Protocol):
    def settings(self, subject: str, group: str) -> GroupSettings:
        """The nearest settings: of the group on this subject, of the group on all, the default."""
        ...

    def is_paused(self, subject: str, group: str, consumer: str, client: str) -> bool:
        """Whether the group, the consumer or the client is paused: it is handed nothing."""
        ...


class NoGroupRules:
    """Nobody said anything."""

    def settings(self, _subject: str, _group: str) -> GroupSettings:
        return DEFAULT

    def is_paused(self, _subject: str, _group: str, _consumer: str, _client: str) -> bool:
        return False
