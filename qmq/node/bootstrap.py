"""The kind of a group: a broker group, or a delay group with its settings. The kind is fixed when the group is created.

    /qmq/groups/GROUP/members, delay       written in one transaction, so that a group is complete when it is visible
    DATA/delay.json                        the same settings beside a delay replica's data, for a start while the coordination store is away

A replica whose settings differ stops before it opens anything, because its schedule's files would differ from the others'.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Final

from qmq_coordination.broker_groups import BrokerGroupState, DelaySettings, group_key
from qmq_coordination.coordination_store import CoordinationStore
from qmq_replication.coordinator import SECRET, found_group, new_secret
from qmq_replication.replica_membership import ReplicaMembership

from qmq.delay.delay_config import BUCKET_MS
from qmq.errors import CoordinationError, InvalidArgument, LogDamaged
from qmq.limits import DELAY_MS_MAX
from qmq.log.disk import Disk

log = logging.getLogger("qmq.node")

FILE: Final = "delay.json"
RETRY_S: Final = 1.0
MINUTE_MS: Final = 60_000
DAY_MS: Final = 24 * 60 * MINUTE_MS
BUCKET_MS_MIN: Final = 5 * MINUTE_MS
YEARS_MAX: Final = 100
DEFAULT: Final = DelaySettings(BUCKET_MS, DELAY_MS_MAX)


def check_settings(settings: DelaySettings) -> DelaySettings:
    """Raise InvalidArgument for invalid settings of a delay group."""
    bucket, most = settings.bucket_ms, settings.delay_ms_max
    if not BUCKET_MS_MIN <= bucket <= DAY_MS or DAY_MS % bucket:
        raise InvalidArgument(f"a bucket must last 5 minutes to 24 hours and divide a day evenly, not {_minutes(bucket)} minutes")
    if not 0 < most <= YEARS_MAX * 366 * DAY_MS:
        raise InvalidArgument(f"the longest delay must be above 0 and at most {YEARS_MAX} years, not {_days(most)} days")
    return settings


def check_kind(group: str, found: DelaySettings | None, wanted: DelaySettings | None) -> None:
    """Raise InvalidArgument if the existing group is of another kind than this replica."""
    if found == wanted:
        return
    if found is None:
        raise InvalidArgument(f"{group} is a broker group: start its replicas with `qmq broker`, or choose another --group for `qmq delay`")
    if wanted is None:
        raise InvalidArgument(f"{group} is a delay group: start its replicas with `qmq delay`, or choose another --group for `qmq broker`")
    raise InvalidArgument(
        f"delay group {group} was created with {_named(found)}, but this replica was started with {_named(wanted)}: all replicas "
        "of a group need the same settings. Start it with the group's settings, or create another group"
    )


def _named(settings: DelaySettings) -> str:
    return f"--bucket {_minutes(settings.bucket_ms)}m --max {_days(settings.delay_ms_max)}d"


def _minutes(ms: int) -> str:
    return f"{ms / MINUTE_MS:g}"


def _days(ms: int) -> str:
    return f"{ms / DAY_MS:g}"


# --- in the coordination store -----------------------------------------------------------------------------------------


async def found(store: CoordinationStore, group: str, replicas: tuple[str, ...], wanted: DelaySettings | None) -> ReplicaMembership:
    """The group's membership. A new group is created. Waits until the store can be reached. Raises InvalidArgument if the group is of
    another kind.
    """
    also = {SECRET: new_secret(), **({} if wanted is None else {"delay": wanted.encode()})}
    while True:
        try:
            membership = await found_group(store, group, replicas, also)
            item = await store.get(group_key(group, "delay"))
        except CoordinationError as failure:
            log.warning("waiting for the coordination store: %s", failure)
            await asyncio.sleep(RETRY_S)
            continue
        check_kind(group, None if item is None else DelaySettings.decode(item.value), wanted)
        return membership


def check_group(state: BrokerGroupState, wanted: DelaySettings | None) -> None:
    """As `check_kind`, if the group exists."""
    if state.members is not None:
        check_kind(state.name, state.delay, wanted)


# --- in the replica's folder -------------------------------------------------------------------------------------------


def check_folder(data: Path, group: str, wanted: DelaySettings | None) -> None:
    """As `check_kind`, for a folder that belonged to the group. Raises LogDamaged, too."""
    path = data / FILE
    if not path.exists():
        check_kind(group, None, wanted)
        return
    try:
        settings = DelaySettings.decode(path.read_bytes())
    except (ValueError, TypeError, AttributeError) as cause:
        raise LogDamaged(
            f"{path.name} cannot be read ({cause}): this file holds the settings with which the delay group was created"
        ) from cause
    check_kind(group, settings, wanted)


def note_folder(disk: Disk, data: Path, settings: DelaySettings | None) -> None:
    """Record that the folder belongs to a group of this kind. Raises DiskFull, FlushFailed."""
    if settings is not None and not (data / FILE).exists():
        disk.replace(data / FILE, settings.encode())
