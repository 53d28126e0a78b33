"""Broker groups in the coordination store: their members, their masters, the addresses of their
replicas.

    /qmq/groups/GROUP/members
        Membership, JSON: version, voters, learners; only the group's master changes it
        removed by nobody: broker groups are never deleted
    /qmq/groups/GROUP/epoch
        Claim, JSON: the highest epoch, its winner, and the attempt in which it was won
        removed by nobody
    /qmq/groups/GROUP/master
        Master, JSON: the master's address, under its lease: clients connect there
        removed by its lease
    /qmq/groups/GROUP/mode
        `read-write`, or `read-only` while the group is drained
        removed by nobody
    /qmq/groups/GROUP/delay
        DelaySettings, JSON: the settings of a delay group; written once
        removed by nobody
    /qmq/groups/GROUP/secret
        the secret that the group's replicas prove to each other; written once. Who can read it can
        act as a replica
        removed by nobody
    /qmq/replicas/GROUP/REPLICA
        ReplicaRecord, JSON: a replica's address and the generation of its folder; stays when it
        goes away
        removed by the leading metaserver, when the replica is no member and its process is gone
    /qmq/presence/GROUP/REPLICA
        the replica's address, under a lease: the key exists while the replica's process runs
        removed by its lease

Every change of members and every new epoch is a transaction that compares the epoch's Claim, so a
superseded master changes nothing.

`Registration` registers a replica. Its record stays, so that a group's slaves know the address of a
replica that will come back. The other keys, and those of the caller, are kept alive under one
lease: a node of one process is always the master, so it adds the group's master key. While the
store cannot be reached, the keys stay until their lease ends. The registration writes them again
when the store is back, and after this process was suspended for longer than its lease.

The cluster has an identity, which the first server writes and which never changes. A restored
cluster has its own, because backups leave out `/qmq/meta/`. Each replica keeps it in its folder: it
does not register in another cluster's store, and `qmq backup rebuild` gives a new store the
identity that clients know.

    /qmq/meta/cluster
        the identity of the cluster, a random number; written once by the first server, and in no
        backup
        removed by nobody
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from hashlib import blake2b
from typing import Any, Final, TypeVar

from qmq.errors import CoordinationError, DiskFull, LeaseNotFound
from qmq_coordination.coordination_store import (
    NO_LEASE,
    CoordinationStore,
    KeyListing,
    KeyValue,
    Put,
    absent,
)

GROUPS: Final = "/qmq/groups/"
REPLICAS: Final = "/qmq/replicas/"
PRESENCE: Final = "/qmq/presence/"

_T = TypeVar("_T", bound="_Json")


class _Json:
    """A value stored as a JSON object;
    unknown fields are ignored, so that a newer release may add some.
    """

    def encode(self) -> bytes:
        return json.dumps(asdict(self), sort_keys=True).encode()  # type: ignore[call-overload]

    @classmethod
    def decode(cls: type[_T], data: bytes) -> _T:
        found: dict[str, Any] = json.loads(data)
        known = cls.__dataclass_fields__  # type: ignore[attr-defined]
        return cls(**{name: value for name, value in found.items() if name in known})


@dataclass(frozen=True, slots=True)
class EpochClaim(_Json):
    """An epoch and its winner; `attempt` is unique, so that a lost answer can be verified by
    reading back.
    """

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
    """The addresses of a replica. `folder` identifies its data folder: a replica of the same name
    with another folder has lost its history. `generation` grows while the replica uses the folder:
    a lower one in the folder shows an older copy of it. 0: release 0.2.0.
    """

    replica: str
    group: str
    data_address: str
    control_address: str
    folder: str = ""
    generation: int = 0


@dataclass(frozen=True, slots=True)
class DelaySettings(_Json):
    """The settings that all replicas of a delay group share,
    because their schedules are identical.
    """

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
        """Tells the group from others of its name: a restored group has another secret. Empty if
        the secret is not known.
        """
        item = self._item("secret")
        return "" if item is None else blake2b(item.value, digest_size=16).hexdigest()

    @property
    def voters(self) -> tuple[str, ...]:
        """The voters; see qmq_replication.membership."""
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


log = logging.getLogger("qmq.coordination")

LEASE_S: Final = 10.0
RETRY_S: Final = 1.0


class Registration:
    """Keeps a replica's keys alive, and registers again if the lease was lost."""

    def __init__(
        self,
        store: CoordinationStore,
        record: ReplicaRecord,
        *,
        also: Mapping[str, bytes] | None = None,
        lease_s: float = LEASE_S,
    ) -> None:
        self._store = store
        self._record = record
        self._also = dict(also or {})
        self._lease_s = lease_s
        self._lease = NO_LEASE
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Register, then renew the lease in the background. Raises CoordinationError, DiskFull;
        nothing is registered then.
        """
        await self._register()
        self._task = asyncio.create_task(self._keep_alive())

    async def _register(self) -> None:
        """Register once. Each try has a separate lease, so that the lease of a try with a lost
        answer expires. Putting the same keys again is harmless.
        """
        lease = await self._store.grant(self._lease_s)
        self._lease = lease
        name, group = self._record.replica, self._record.group
        leased = {presence_key(group, name): self._record.encode(), **self._also}
        puts = [Put(key, value, lease) for key, value in leased.items()]
        await self._store.txn([], [Put(replica_key(group, name), self._record.encode()), *puts])

    async def update(self, record: ReplicaRecord) -> None:
        """Replace the record under the present lease. Raises CoordinationError; the next
        registration then has the new record.
        """
        self._record = record
        presence = Put(presence_key(record.group, record.replica), record.encode(), self._lease)
        await self._store.txn(
            [], [Put(replica_key(record.group, record.replica), record.encode()), presence]
        )

    async def _keep_alive(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s / 3)
            try:
                await self._store.keep_alive(self._lease)
                if not await self._is_there():
                    raise LeaseNotFound("the keys are deleted, or belong to an earlier lease")
            except LeaseNotFound as failure:
                log.warning(
                    "%s: its registration was lost, registering again: %s",
                    self._record.replica,
                    failure,
                )
                await self._register_surely()
            except (CoordinationError, DiskFull) as failure:
                log.warning(
                    "%s: keeping the registration alive failed: %s", self._record.replica, failure
                )

    async def _is_there(self) -> bool:
        """True if the keys exist under our lease. A late try with a lost answer may have put them
        under another lease, which is not renewed.
        """
        found = await self._store.get(presence_key(self._record.group, self._record.replica))
        return found is not None and found.lease == self._lease

    async def _register_surely(self) -> None:
        while True:
            try:
                await self._register()
                return
            except (CoordinationError, DiskFull) as failure:
                log.warning(
                    "%s: registering failed, trying again: %s", self._record.replica, failure
                )
                await asyncio.sleep(RETRY_S * random.uniform(0.5, 1.5))  # noqa: S311 - jitter

    async def stop(self) -> None:
        """Delete the keys under the lease."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._lease == NO_LEASE:
            return
        with contextlib.suppress(CoordinationError, DiskFull):
            await self._store.revoke(self._lease)


CLUSTER: Final = "/qmq/meta/cluster"


async def ensure_cluster(store: CoordinationStore, known: str = "") -> str:
    """Write the identity, `known` or a new one, if there is none. Returns it.
    Raises CoordinationError.
    """
    await store.txn([absent(CLUSTER)], [Put(CLUSTER, (known or secrets.token_hex(8)).encode())])
    found = await store.get(CLUSTER)
    return "" if found is None else found.value.decode()
