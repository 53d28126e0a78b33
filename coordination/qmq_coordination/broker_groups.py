"""Broker groups in the coordination store: their members, their masters, the addresses of their replicas.

    /qmq/groups/GROUP/members            Membership, JSON: version, voters, learners. Only the group's master changes it
    /qmq/groups/GROUP/epoch              Claim, JSON: the highest epoch and the attempt that won it. Never deleted
    /qmq/groups/GROUP/master             Master, JSON, under the master's lease: its address, for clients
    /qmq/groups/GROUP/mode               "read-write", or "read-only" while an operator drains the group
    /qmq/groups/GROUP/delay              DelaySettings, JSON: a delay group (docs/DELAY.md). Put when it is founded, never changed
    /qmq/groups/GROUP/secret             the secret that its replicas prove to each other (qmq_replication/peer_proof.py); put once
    /qmq/replicas/GROUP/REPLICA          ReplicaRecord, JSON: its addresses; stays when the replica stops
    /qmq/presence/GROUP/REPLICA          the same under a lease, while the replica's process is alive

Every change of members and every new epoch is a transaction that compares the epoch's Claim, so a superseded master changes nothing.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from enum import Enum
from hashlib import blake2b
from typing import Any, Final, TypeVar

from qmq_coordination.coordination_store import CoordinationStore, KeyListing, KeyValue

GROUPS: Final = "/qmq/groups/"
REPLICAS: Final = "/qmq/replicas/"
PRESENCE: Final = "/qmq/presence/"

_T = TypeVar("_T", bound="_Json")


class _Json:
    """A value stored as a JSON object; unknown fields are ignored, so that a newer release may add some."""

    def encode(self) -> bytes:
        return json.dumps(asdict(self), sort_keys=True).encode()  # type: ignore[call-overload]

    @classmethod
    def decode(cls: type[_T], data: bytes) -> _T:
        found: dict[str, Any] = json.loads(data)
        known = cls.__dataclass_fields__  # type: ignore[attr-defined]
        return cls(**{name: value for name, value in found.items() if name in known})


@dataclass(frozen=True, slots=True)
class EpochClaim(_Json):
    """An epoch and its winner; `attempt` is unique, so that a lost answer can be verified by reading back."""

    epoch: int
    replica: str
    attempt: str


@dataclass(frozen=True, slots=True)
class MasterRecord(_Json):
    """The group's master, for clients and metaservers."""

    replica: str
    epoch: int
    attempt: str = ""
    data_address: str = ""
    control_address: str = ""


@dataclass(frozen=True, slots=True)
class ReplicaRecord(_Json):
    """The addresses of a replica. `folder` identifies its data folder: a replica of the same name with another folder has lost its
    history. `generation` grows while the replica uses the folder: a lower one in the folder shows an older copy of it. 0: release 0.2.0.
    """

    replica: str
    group: str
    data_address: str
    control_address: str
    folder: str = ""
    generation: int = 0


@dataclass(frozen=True, slots=True)
class DelaySettings(_Json):
    """The settings that all replicas of a delay group share, because their schedules are identical."""

    bucket_ms: int
    """The time that a file of the schedule covers."""
    delay_ms_max: int
    """The longest delay that the group accepts."""


class Mode(Enum):
    """The operator's mode of a group."""

    READ_WRITE = "read-write"
    READ_ONLY = "read-only"


class Health(Enum):
    """A group's current abilities."""

    READ_WRITE = "read-write"
    READ_ONLY = "read-only"
    """Consumers are served; producers use other groups."""
    OFFLINE = "offline"
    """No master."""


@dataclass(frozen=True, slots=True)
class BrokerGroupState:
    """All keys of one group at one revision."""

    name: str
    items: dict[str, KeyValue] = field(default_factory=dict)

    def _item(self, what: str) -> KeyValue | None:
        return self.items.get(what)

    @property
    def master(self) -> MasterRecord | None:
        """The master, if there is one."""
        item = self._item("master")
        return None if item is None else MasterRecord.decode(item.value)

    @property
    def claim(self) -> EpochClaim:
        """The highest epoch and its winner; epoch 0 before the first."""
        item = self._item("epoch")
        return EpochClaim(0, "", "") if item is None else EpochClaim.decode(item.value)

    @property
    def members(self) -> bytes | None:
        """The membership as stored."""
        item = self._item("members")
        return None if item is None else item.value

    @property
    def lineage(self) -> str:
        """Tells the group from others of its name: a restored group has another secret. Empty if the secret is not known."""
        item = self._item("secret")
        return "" if item is None else blake2b(item.value, digest_size=16).hexdigest()

    @property
    def voters(self) -> tuple[str, ...]:
        """The voters; see qmq_replication.replica_membership."""
        return self._replicas("voters")

    @property
    def learners(self) -> tuple[str, ...]:
        """The replicas that catch up and do not vote yet."""
        return self._replicas("learners")

    def _replicas(self, kind: str) -> tuple[str, ...]:
        return tuple(json.loads(self.members)[kind]) if self.members else ()

    @property
    def delay(self) -> DelaySettings | None:
        """The settings of a delay group; None for a broker group."""
        item = self._item("delay")
        return None if item is None else DelaySettings.decode(item.value)

    @property
    def mode(self) -> Mode:
        """The operator's mode."""
        item = self._item("mode")
        return Mode.READ_WRITE if item is None else Mode(item.value.decode())

    @property
    def health(self) -> Health:
        """The group's health."""
        if self.master is None:
            return Health.OFFLINE
        return Health.READ_ONLY if self.mode is Mode.READ_ONLY else Health.READ_WRITE


def group_key(group: str, what: str) -> str:
    return f"{GROUPS}{group}/{what}"


def replica_key(group: str, replica: str) -> str:
    """The key of a replica's addresses, which stays when its process ends."""
    return f"{REPLICAS}{group}/{replica}"


def presence_key(group: str, replica: str) -> str:
    """The key that exists while the replica's process is alive."""
    return f"{PRESENCE}{group}/{replica}"


def group_states(listing: KeyListing) -> dict[str, BrokerGroupState]:
    """Decode all groups from a listing of GROUPS, or of one group's keys."""
    found: dict[str, BrokerGroupState] = {}
    for item in listing.items:
        group, _, what = item.key[len(GROUPS) :].rpartition("/")
        found.setdefault(group, BrokerGroupState(group)).items[what] = item
    return found


async def read_group(store: CoordinationStore, group: str) -> BrokerGroupState:
    """Read one group from the store. Raises CoordinationError."""
    listing = await store.list(group_key(group, ""))
    return group_states(listing).get(group, BrokerGroupState(group))
