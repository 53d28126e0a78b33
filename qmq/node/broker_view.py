"""A broker's data about ordered subjects and consumer groups, from its view of the coordination store.

The view may be a moment behind. A partition then is "not known" or "not open" a moment longer, and the caller tries again. The view never
contains changes that the store did not have. Routes only move forward. A frontier goes back when a group is reset or a parked key is
replayed, and the broker then reads the store first (`group_revision`). Replicas need not agree on settings and pauses. While the store
cannot be reached, the last known settings and pauses apply.
"""

from __future__ import annotations

from collections.abc import Callable

from qmq_coordination.ordered_records import change_key, group_record_key
from qmq_coordination.view import ClusterView, ViewChange
from qmq_ordering.route import Change, LpRange, PhysicalPartition

from qmq.model import GroupSettings


class ViewRouting:
    """See `qmq.broker.ordered_writes.Routing`. `group` is the broker's own group."""

    def __init__(self, view: ClusterView, group: str) -> None:
        self._view = view
        self._group = group

    def partition(self, subject: str, number: int) -> PhysicalPartition | None:
        """The partition; None if no version of the route has it on this broker group."""
        state = self._view.ordered(subject)
        if state is None:
            return None
        for version in sorted(state.routes, reverse=True):
            found = state.routes[version].partition(number)
            if found is not None:
                return found if found.group == self._group else None
        return None

    def is_open(self, subject: str, group: str, number: int, lps: LpRange, version: int) -> bool:
        """True if the group reads `version` in the range, and that version has the partition there."""
        state = self._view.ordered(subject)
        record = state.groups.get(group) if state is not None else None
        if state is None or record is None or not record.is_ready or not record.frontier.is_open(lps, version):
            return False
        route = state.routes.get(version)
        part = route.partition(number) if route is not None else None
        return part is not None and part.range.contains(lps)

    async def closes(self, subject: str, number: int, change_id: str, to_version: int) -> bool:
        """True if the store has the change, and the change closes the partition. Raises CoordinationError."""
        state = self._view.ordered(subject)
        change = None if state is None else state.changes.get(to_version)
        if change is None or change.id != change_id:
            item = await self._view.fetch(change_key(subject, to_version))
            change = None if item is None else Change.decode(item.value)
        return change is not None and change.id == change_id and number in change.sources

    async def group_revision(self, subject: str, group: str) -> int:
        """Read the current revision of the group's record from the store; 0 without a record. `is_open` uses no older record from now on.
        Raises CoordinationError.
        """
        item = await self._view.fetch(group_record_key(subject, group))
        return 0 if item is None else item.mod_revision


class ViewRules:
    """See `qmq.broker.group_rules.GroupRules`. `own` are the broker's defaults; `changed` is called after changes. Every pull needs the
    settings of a group and the pauses, so they are cached.
    """

    def __init__(self, view: ClusterView, own: GroupSettings, changed: Callable[[], None]) -> None:
        self._view = view
        self._own = own
        self._changed = changed
        self._found: dict[tuple[str, str], GroupSettings] = {}
        self._has_pauses = bool(view.delivery.pauses)
        view.on_change(self._heard)

    def _heard(self, change: ViewChange) -> None:
        if change.delivery:
            self._found.clear()
            self._has_pauses = bool(self._view.delivery.pauses)
            self._changed()

    def settings(self, subject: str, group: str) -> GroupSettings:
        """The settings, each from its most specific source: the group on this subject, the group on all subjects, the broker."""
        found = self._found.get((subject, group))
        if found is None:
            found = self._found[subject, group] = self._view.delivery.settings(subject, group, self._own)
        return found

    def is_paused(self, subject: str, group: str, consumer: str, client: str) -> bool:
        """True if the group, the consumer or the client is paused."""
        return self._has_pauses and self._view.delivery.is_paused(subject, group, consumer, client)
