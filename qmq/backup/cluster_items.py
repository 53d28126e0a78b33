"""Which keys of the coordination store are in a backup, and with which keys a restored cluster begins. Pure. A backup leaves out the keys
of the old cluster's processes and machines (leased keys, addresses, memberships, assignments) and its secrets: a new cluster makes its own.

    /qmq/restored    the backup from which this cluster was made, and the progress of the restore; absent in others
        removed by nobody
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec
from qmq_coordination.access_records import SERVER_TOKEN
from qmq_coordination.broker_groups import GROUPS, PRESENCE, REPLICAS, DelaySettings, EpochClaim, group_key
from qmq_coordination.coordination_store import KeyValue
from qmq_replication.membership import ReplicaMembership

from qmq.backup.manifest import BackedUpGroup
from qmq.errors import BackupDamaged
from qmq.log.segment_index import UNREADABLE

ROOT: Final = "/qmq/"
RESTORED: Final = ROOT + "restored"
"""The backup from which this cluster was made, and the progress of the restore."""
_LEFT_OUT: Final = (REPLICAS, PRESENCE, ROOT + "members/", ROOT + "assignments/", ROOT + "meta/", RESTORED)
_GROUP_KEYS: Final = ("members", "epoch", "master", "secret")
_NOBODY: Final = "restore-under-way"
"""The only voter of a group whose data is not restored yet: no process has this name, so none can found the group without its data."""

Items = dict[str, bytes]


def kept(items: Iterable[KeyValue]) -> Items:
    """The keys that a backup contains."""
    return {each.key: each.value for each in items if not each.lease and _is_kept(each.key)}


def _is_kept(key: str) -> bool:
    if key.startswith(GROUPS):
        return key.rpartition("/")[2] not in _GROUP_KEYS
    return key != SERVER_TOKEN and not key.startswith(_LEFT_OUT)


def encode_items(items: Mapping[str, bytes]) -> bytes:
    return msgspec.msgpack.encode(sorted(items.items()))


def decode_items(data: bytes) -> Items:
    """Raises BackupDamaged, also for a key that no backup contains: a restore writes no other keys."""
    try:
        items = dict(msgspec.msgpack.decode(data, type=list[tuple[str, bytes]]))
    except UNREADABLE as cause:
        raise BackupDamaged(f"the coordination store's keys cannot be read ({cause})") from cause
    for key in items:
        if not key.startswith(ROOT) or not _is_kept(key):
            raise BackupDamaged(f"the backup has the key {key!r}, which no backup of QMQ contains: use another backup")
    return items


def delay_settings(items: Mapping[str, bytes], group: str) -> DelaySettings | None:
    """The settings of a delay group; None for a broker group."""
    found = items.get(group_key(group, "delay"))
    return None if found is None else DelaySettings.decode(found)


def group_items(group: BackedUpGroup, backup_id: str, secret: bytes) -> Items:
    """The keys of a group whose data is not restored yet. Its next epoch is above every epoch in its log."""
    return {
        group_key(group.name, "members"): ReplicaMembership(1, (_NOBODY,)).encode(),
        group_key(group.name, "epoch"): EpochClaim(group.epoch, _NOBODY, f"restored from {backup_id}").encode(),
        group_key(group.name, "secret"): secret,
    }


def awaits_data(members: bytes) -> bool:
    """Whether the group's data is not restored yet."""
    return ReplicaMembership.decode(members).voters == (_NOBODY,)
