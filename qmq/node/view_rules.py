"""What a broker knows of settings and pauses of consumer groups: its view of the coordination store, asked as the broker asks.

The view may be a moment behind; nothing here needs to be agreed on (qmq/broker/group_rules.py). While the store is away, what was last
known holds. Asked at every pull, so settings are looked up once for each group and kept until the view has other ones.
"""

from __future__ import annotations

from collections.abc import Callable

from qmq_coordination.view import ClusterView, ViewChange

from qmq.model import GroupSettings


class ViewRules:
    """See `qmq.broker.group_rules.GroupRules`. `own` are the broker's settings, where nobody set others; `changed` is called when there are
    news."""

    def __init__(self, view: ClusterView, own: GroupSettings, changed: Callable[[], None]) -> None:
        self._view = view
        self._own = own
        self._changed = changed
        self._found: dict[tuple[str, str], GroupSettings] = {}
        view.on_change(self._heard)

    def _heard(self, change: ViewChange) -> None:
        if change.delivery:
            self._found.clear()
            self._changed()

    def settings(self, subject: str, group: str) -> GroupSettings:
        """The nearest of each setting: of the group on this subject, of the group on all, the broker's own."""
        found = self._found.get((subject, group))
        if found is None:
            found = self._found[subject, group] = self._view.delivery.settings(subject, group, self._own)
        return found

    def is_paused(self, subject: str, group: str, consumer: str, client: str) -> bool:
        """Whether the group, the consumer or the client is paused: it is handed nothing."""
        return self._view.delivery.is_paused(subject, group, consumer, client)
