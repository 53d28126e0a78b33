"""Sets, removes and shows group settings and pauses at a metaserver (docs/DELIVERY.md).

Each change is a compare-and-swap of one key, so changes of two operators are not mixed, and after a
lost answer the key is read again. After a change the key is read back into the view, so that the
next request to this metaserver sees it. Brokers see it in their own views.

A consumer can be paused before it exists, and resumed after it has left.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Final

from qmq_coordination.coordination_store import (
    CoordinationStore,
    Delete,
    KeyValue,
    Put,
    absent,
    unchanged,
)
from qmq_coordination.subjects import (
    EVERY,
    PauseKind,
    PauseRecord,
    SettingsRecord,
    Whom,
    pause_key,
    settings_key,
)
from qmq_coordination.subjects import REASON_CHARS_MAX as REASON_MAX
from qmq_coordination.view import ClusterView

from qmq.errors import CoordinationUnknown, InvalidArgument, OrderMismatch, QmqError
from qmq.meta.calls import Brokers
from qmq.meta.catalog import ClusterCatalog
from qmq.model import GroupSettings, Order, SubjectConfig, check_name, is_dead_letters
from qmq.process.event_loop import Clock
from qmq.proto.v1 import control_pb2 as control
from qmq.proto.v1 import meta_pb2 as pb

_UNREADABLE: Final = (ValueError, TypeError, KeyError, AttributeError, QmqError)


class DeliveryService:
    def __init__(
        self,
        store: CoordinationStore,
        view: ClusterView,
        cluster: ClusterCatalog,
        brokers: Brokers,
        clock: Clock,
    ) -> None:
        self._store = store
        self._view = view
        self._cluster = cluster
        self._brokers = brokers
        self._clock = clock

    # --- settings ---------------------------------------------------------------------------------

    async def set_settings(
        self, request: pb.SetGroupSettingsRequest
    ) -> pb.DescribeGroupSettingsResponse:
        """Set some settings, or clear all. Returns the resulting settings.

        Raises InvalidName, InvalidArgument, UnknownSubject, OrderMismatch, CoordinationError.
        """
        change = _change_of(request).check()
        if request.clears == (change != SettingsRecord()):
            raise InvalidArgument(
                "give a setting: attempts_max, retry_delays_ms, or both; or clear them "
                "without setting any"
            )
        if change.attempts_max is not None and is_dead_letters(request.subject):
            raise InvalidArgument(
                f"{request.subject!r} is a dead-letter queue: its messages have no attempts_max"
            )
        key = settings_key(request.subject, request.group)
        if not request.clears:
            await self._require_unordered(request.subject)

        def changed(item: KeyValue | None) -> bytes | None:
            return (
                None
                if request.clears
                else (_record_of(item) or SettingsRecord()).changed(change).encode()
            )

        await self._swap(key, changed)
        return await self._describe(request.subject, request.group)

    async def describe(self, subject: str, group: str) -> pb.DescribeGroupSettingsResponse:
        """The settings that apply, and the source of each. Raises as `set_settings`."""
        check_name("group", group)
        await self._require_unordered(subject)
        return await self._describe(subject, group)

    async def _describe(self, subject: str, group: str) -> pb.DescribeGroupSettingsResponse:
        delivery = self._view.delivery
        near = list(delivery.near(subject, group))
        attempts = next((where for where, record in near if record.attempts_max is not None), "")
        delays = next((where for where, record in near if record.retry_delays_ms is not None), "")
        own = GroupSettings() if attempts and delays else await self._own(subject)
        found = delivery.settings(subject, group, own)
        if is_dead_letters(subject):
            found, attempts = replace(found, attempts_max=0), subject
        return pb.DescribeGroupSettingsResponse(
            attempts_max=found.attempts_max,
            retry_delays_ms=found.retry_delays_ms,
            attempts_from=attempts,
            delays_from=delays,
        )

    async def _own(self, subject: str) -> GroupSettings:
        """The brokers' default settings."""
        config = self._view.subject(subject)
        hosts = self._cluster.group_names() if config is None else self._cluster.hosts(config)
        for name in hosts:
            with suppress(QmqError):
                status: control.ReplicaStatus = await self._brokers.ask_master(
                    name, "DescribeReplica", control.DescribeReplicaRequest()
                )
                if status.retry_delays_ms:  # an older release sends no settings
                    return GroupSettings(status.attempts_max, tuple(status.retry_delays_ms))
        return GroupSettings()

    async def _require_unordered(self, subject: str) -> None:
        config = await self._find(subject)
        if config is not None and config.order is not Order.NONE:
            raise OrderMismatch(
                f"subject {subject!r} is ordered: each consumer sets its own retries "
                "(mq.ordered_consumer: attempts_max, retry_delays_s)"
            )

    async def _find(self, subject: str) -> SubjectConfig | None:
        """Find an existing subject; None for all subjects.
        Raises UnknownSubject, InvalidName, CoordinationError.
        """
        return None if subject == EVERY else await self._cluster.subject(subject)

    # --- pauses -----------------------------------------------------------------------------------

    async def set_pause(self, request: pb.SetPauseRequest) -> pb.SetPauseResponse:
        """Pause or resume. Raises InvalidName, InvalidArgument,
        UnknownSubject, CoordinationError.
        """
        whom, reason = _whom_of(request.pause), request.pause.reason
        if len(reason) > REASON_MAX:
            raise InvalidArgument(
                f"a reason has at most {REASON_MAX} characters, not {len(reason)}"
            )
        if request.is_paused and whom.kind is not PauseKind.CLIENT:
            await self._find(whom.subject)
        key, now_ms = pause_key(whom), self._clock.time_ms()

        def changed(item: KeyValue | None) -> bytes | None:
            if not request.is_paused:
                return None
            known = _pause_of(item)
            since_ms, why = (now_ms, "") if known is None else (known.since_ms, known.reason)
            return PauseRecord(since_ms, reason or why).encode()

        before, value = await self._swap(key, changed)
        pause = None if value is None else _message(whom, PauseRecord.decode(value))
        return pb.SetPauseResponse(was_paused=_pause_of(before) is not None, pause=pause)

    def pauses(self) -> list[pb.Pause]:
        """All pauses, groups first."""
        kinds = list(PauseKind)
        found = sorted(
            self._view.delivery.pauses.items(),
            key=lambda each: (kinds.index(each[0].kind), each[0][1:]),
        )
        return [_message(whom, record) for whom, record in found]

    # --- the store --------------------------------------------------------------------------------

    async def _swap(
        self, key: str, change: Callable[[KeyValue | None], bytes | None]
    ) -> tuple[KeyValue | None, bytes | None]:
        """Replace a value by the result of `change` (None: delete the key). Returns (the value
        first read, the new value). Raises CoordinationError.
        """
        first = item = await self._store.get(key)
        while True:
            value = change(item)
            if value == (None if item is None else item.value):
                break
            condition = absent(key) if item is None else unchanged(item)
            with suppress(CoordinationUnknown):  # if the change was made, nothing is left to do
                if (
                    await self._store.txn(
                        [condition], [Delete(key) if value is None else Put(key, value)]
                    )
                ).succeeded:
                    break
            item = await self._store.get(key)
        await self._view.read_back(*([key] if value is not None else []))
        return first, value


def _change_of(request: pb.SetGroupSettingsRequest) -> SettingsRecord:
    return SettingsRecord(
        request.attempts_max if request.HasField("attempts_max") else None,
        tuple(request.retry_delays_ms) or None,
    )


def _record_of(item: KeyValue | None) -> SettingsRecord | None:
    """Decode a record. An unreadable record counts as absent."""
    try:
        return None if item is None else SettingsRecord.decode(item.value)
    except _UNREADABLE:
        return None


def _pause_of(item: KeyValue | None) -> PauseRecord | None:
    try:
        return None if item is None else PauseRecord.decode(item.value)
    except _UNREADABLE:
        return None


def _whom_of(pause: pb.Pause) -> Whom:
    """Raises InvalidName, InvalidArgument."""
    try:
        kind = PauseKind(pause.kind)
    except ValueError:
        known = ", ".join(each.value for each in PauseKind)
        raise InvalidArgument(
            f"the kind of a pause is one of {known}, not {pause.kind!r}"
        ) from None
    return Whom(kind, pause.subject, pause.group, pause.name).check()


def _message(whom: Whom, record: PauseRecord) -> pb.Pause:
    return pb.Pause(
        kind=whom.kind.value,
        subject=whom.subject,
        group=whom.group,
        name=whom.name,
        since_ms=record.since_ms,
        reason=record.reason,
    )
