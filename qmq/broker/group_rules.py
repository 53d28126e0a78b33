"""The operators' settings for consumer groups: retries and pauses.

They are in the coordination store (docs/DELIVERY.md); a broker reads them from its view, which may lag a moment. Replicas need not agree on
them: the master decides by them, and writes its decision to the log.
"""

from __future__ import annotations

from typing import Final, Protocol

from qmq.model import GroupSettings

DEFAULT: Final = GroupSettings()


class GroupRules(Protocol):
    def settings(self, subject: str, group: str) -> GroupSettings:
        """The most specific settings: of the group on this subject, of the group on all subjects, or the default."""
        ...

    def is_paused(self, subject: str, group: str, consumer: str, client: str) -> bool:
        """Whether the group, the consumer or the client is paused."""
        ...


class NoGroupRules:
    """Default settings, and no pauses."""

    def settings(self, _subject: str, _group: str) -> GroupSettings:
        return DEFAULT

    def is_paused(self, _subject: str, _group: str, _consumer: str, _client: str) -> bool:
        return False
