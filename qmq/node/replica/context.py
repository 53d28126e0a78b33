"""The parts that the modules of one replica share: its configuration, of a broker group or a delay
group; its environment; its view of the cluster; and what opens its store, at the start, with repair
of damage from the other replicas, and again while the replica runs.

A repair copies bytes of another replica, since positions are the same on all replicas. Both sides
verify checksums. But valid bytes may belong to another history than ours. So entries are copied
only if the log proves that they are the original ones:

* *A whole entry of ours follows the hole, and the other replica has the same entry there*: the same
  epoch and index in the same place. Two logs that agree on one entry agree on everything before it
  (Raft, section 5.3), so they agree on the hole.
* *Our history has each entry's epoch at its index*, and the hole ends where a whole entry of ours
  begins or our log ends. One epoch writes one entry at an index, so it is the same entry.

The hole may be longer than one entry. Its end is not known here (a damaged envelope does not tell
its length), so the repair walks the other replica's entries until one of them is ours. From the
entry before the hole to the entry after it, indexes must rise and epochs must not fall. Nothing
else is ever written. Damage on every replica stays LogDamaged, and an operator must act.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Final

import grpc
from qmq_coordination.view import ClusterView
from qmq_replication.identity import ReplicaIdentity

from qmq.broker.broker import Broker
from qmq.broker.config import BrokerConfig
from qmq.broker.timekeeper import SteadyClock
from qmq.errors import CorruptBatch, DiskFull, InvalidArgument, LogDamaged, QmqError
from qmq.limits import BATCH_BYTES_MAX, MIB
from qmq.log import checkpoint, follower
from qmq.log.disk import Disk
from qmq.log.envelopes import entry_at, epoch_of, walk
from qmq.log.follower import entries_of, split_entries
from qmq.log.log_config import LogConfig
from qmq.log.reading import StoredBytes
from qmq.log.recent_writes import ACTIONS, MESSAGES, Place, WriteRun
from qmq.log.recovery import CannotTake, open_store, take_segments
from qmq.log.segment_index import SegmentIndex
from qmq.log.segments import Segments
from qmq.log.store import PendingEntry, Store
from qmq.meta.access import server_network
from qmq.node.metrics.replica import CountedStore
from qmq.node.process import Environment, EtcdOptions
from qmq.process.address import host_of
from qmq.process.event_loop import Clock
from qmq.proto.v1 import control_pb2 as pb
from qmq.proto.v1 import control_pb2_grpc
from qmq.rpc.channel import typed_error
from qmq.rpc.network import NETWORK, Network
from qmq.rpc.server_name import ServerName, always
from qmq.security.access import AccessConfig
from qmq.tiering.stored_reads import StoredBeginnings
from qmq.wire.batch import MAGIC, Envelope, parse_envelope

if TYPE_CHECKING:
    from qmq_coordination.coordination_store import CoordinationStore

    from qmq.log.store import Projection


ASK_S: Final = 5.0
AGAIN_S: Final = 5.0
"""The pause after a repair that no replica could help with. Readers get the error meanwhile."""
ABSENT_S: Final = 1.0
"""The pause after a repair during which a replica was absent that might help.
Readers wait meanwhile.
"""
ASK_BYTES: Final = MIB
"""The bytes of one answer. A larger hole takes several answers."""
HOLE_BYTES_MAX: Final = 4 * BATCH_BYTES_MAX
"""A larger hole is not repaired entry by entry:
copying the whole log from another replica is quicker.
"""
NAMES: Final = ("message", "action")
_MAGIC_BYTES: Final = MAGIC.to_bytes(4, "little")

Knows = Callable[[int], int]
"""The epoch of our entry at an index; -1 if it is not known."""


def _knows_nothing(_: int) -> int:
    return -1


# --- answering ------------------------------------------------------------------------------------


def read_log(store: Store, number: int, position: int, bytes_max: int) -> bytes:
    """Read whole entries from a position on, up to the first damaged one. Raises LogDamaged if the
    first is damaged, InvalidArgument.
    """
    if number not in (0, 1):
        raise InvalidArgument(f"there is no log {number}: 0 is the message log, 1 the action log")
    segments = store.logs[number]
    most = min(bytes_max, ASK_BYTES)
    found: list[bytes] = []
    size = 0
    try:
        for entry in walk(segments, position):
            found += (entry.head, entry.region)
            size += entry.envelope.total_bytes
            if size >= most:
                break
    except CorruptBatch as cause:
        if not found:
            raise LogDamaged(
                f"this replica is damaged there as well: {cause.message}",
                log=number,
                position=position,
            ) from cause
    return b"".join(found)


# --- asking ---------------------------------------------------------------------------------------


class Donor:
    """Another replica, and its entries from a damaged place on."""

    def __init__(self, stub: control_pb2_grpc.BrokerControlAsyncStub, damage: LogDamaged) -> None:
        self._stub = stub
        self._damage = damage
        self.data = b""

    async def more(self) -> bool:
        """Get more entries; False if there are none, or they are invalid. Raises grpc.RpcError."""
        damage, position = self._damage, self._damage.position + len(self.data)
        answer: pb.ReadLogResponse = await self._stub.ReadLog(
            pb.ReadLogRequest(log=damage.log, position=position, bytes_max=ASK_BYTES), timeout=ASK_S
        )
        if not answer.entries or parse(damage.log, position, answer.entries) is None:
            return False
        self.data += answer.entries
        return True


async def ask(
    addresses: Mapping[ServerName, str],
    damage: LogDamaged,
    fits: Callable[[bytes], bool] = bool,
    network: Network = NETWORK,
) -> bytes | None:
    """Get entries that `fits` accepts, from the damage on, from the first replica (by control
    address) that has them.
    """
    for name, address in addresses.items():
        async with network.channel(address, always(name)) as channel:
            donor = Donor(control_pb2_grpc.BrokerControlStub(channel), damage)
            try:
                while len(donor.data) < HOLE_BYTES_MAX and await donor.more():
                    if fits(donor.data):
                        return donor.data
            except grpc.RpcError as cause:
                log.warning(
                    "replica %s cannot repair the damage at %d: %s",
                    name.replica,
                    damage.position,
                    typed_error(cause, address),
                )
            else:
                log.warning(
                    (
                        "the entries of replica %s at %d of the %s log belong to another history "
                        "and cannot repair this log"
                    ),
                    name.replica,
                    damage.position,
                    NAMES[damage.log],
                )
    return None


async def ask_entry(
    addresses: Mapping[ServerName, str], position: int, network: Network = NETWORK
) -> PendingEntry | None:
    """Get the entry at a position of the message log from the first replica (by control address)
    that has it.
    """
    place = LogDamaged("", log=MESSAGES, position=position)
    for name, address in addresses.items():
        async with network.channel(address, always(name)) as channel:
            donor = Donor(control_pb2_grpc.BrokerControlStub(channel), place)
            try:
                found = parse(MESSAGES, position, donor.data) if await donor.more() else None
                if found:
                    return found[0]
            except grpc.RpcError as cause:
                log.warning(
                    "replica %s does not give its entry at %d: %s",
                    name.replica,
                    position,
                    typed_error(cause, address),
                )
    return None


async def answering_replicas(
    addresses: Mapping[ServerName, str], damage: LogDamaged, network: Network = NETWORK
) -> int:
    """The number of these replicas that answer for the damaged place, even if they are damaged
    there, too.
    """
    count = 0
    for name, address in addresses.items():
        async with network.channel(address, always(name)) as channel:
            try:
                await Donor(control_pb2_grpc.BrokerControlStub(channel), damage).more()
            except grpc.RpcError as cause:
                count += isinstance(typed_error(cause, address), LogDamaged)
            else:
                count += 1
    return count


def parse(number: int, position: int, data: bytes) -> list[PendingEntry] | None:
    """Parse the entries. Returns them only if they are valid and in order."""
    try:
        found = entries_of(WriteRun(number, 0, position, len(data), split_entries(data)))
    except CorruptBatch:
        return None
    return found if all(_follows(a.envelope, b.envelope) for a, b in pairwise(found)) else None


def _follows(before: Envelope, after: Envelope) -> bool:
    return before.index < after.index and before.epoch <= after.epoch


# --- the hole -------------------------------------------------------------------------------------


def find_hole(
    segments: Segments, damage: LogDamaged, data: bytes, knows: Knows = _knows_nothing
) -> list[PendingEntry] | None:
    """The entries in `data` that belong into the hole; None if that cannot be proved, or nothing is
    damaged there.
    """
    entries = parse(damage.log, damage.position, data)
    if not entries or not _fits_behind(segments, entries[0]):
        return None
    are_known = True
    for count, entry in enumerate(entries):
        if _is_ours(segments, entry):
            return entries[:count] or None
        end = entry.position + entry.envelope.total_bytes
        if end > segments.segment_end(segments.base_of(entry.position)):
            return None
        are_known = are_known and knows(entry.envelope.index) == entry.envelope.epoch
        if are_known and (end == segments.end or _whole_at(segments, end) is not None):
            return entries[: count + 1]
    return None


def _whole_at(segments: Segments, position: int) -> Envelope | None:
    try:
        return entry_at(segments, position).envelope
    except (CorruptBatch, LogDamaged):
        return None


def _is_ours(segments: Segments, entry: PendingEntry) -> bool:
    """True if we have the same valid entry there."""
    return _whole_at(segments, entry.position) == entry.envelope


def _fits_behind(segments: Segments, entry: PendingEntry) -> bool:
    """True if the entry may follow the entry before it, or if that one is unreadable."""
    before: Envelope | None = None
    for before in _envelopes_before(segments, entry.position):
        if _follows(before, entry.envelope):
            return True
    return before is None


def _envelopes_before(segments: Segments, position: int) -> Iterator[Envelope]:
    """Valid envelopes of entries that end at `position`: one; none if it is damaged; more if a
    message contains the copy of an entry.
    """
    if position == segments.start:
        return
    base = segments.base_of(position - 1)
    start = max(base, position - BATCH_BYTES_MAX)
    data = segments.read(start, position - start)
    at = data.rfind(_MAGIC_BYTES)
    while at >= 0:
        with suppress(CorruptBatch):
            envelope = parse_envelope(data, at)
            if start + at + envelope.total_bytes == position:
                yield envelope
        at = data.rfind(_MAGIC_BYTES, 0, at)


# --- mending --------------------------------------------------------------------------------------


def mend(
    segments: Segments, damage: LogDamaged, data: bytes, knows: Knows = _knows_nothing
) -> bool:
    """Fill the hole. Returns False, and writes nothing, if these are not the original entries.
    Raises FlushFailed, DiskFull.
    """
    hole = find_hole(segments, damage, data, knows)
    if hole is None:
        return False
    size = sum(entry.envelope.total_bytes for entry in hole)
    try:
        for _, part in groupby(hole, lambda entry: segments.base_of(entry.position)):
            begin = (entries := list(part))[0].position - damage.position
            segments.mend(
                entries[0].position,
                data[begin : begin + sum(each.envelope.total_bytes for each in entries)],
            )
    except (
        OSError
    ) as cause:  # no acknowledgement depends on the repair: the broker continues, and tries again
        log.error(
            "writing the repaired %d bytes of the %s log at %d failed: %s",
            size,
            NAMES[damage.log],
            damage.position,
            cause,
        )
        return False
    log.warning(
        "repaired %d bytes of the %s log at %d from another replica",
        size,
        NAMES[damage.log],
        damage.position,
    )
    return True


async def repair(
    addresses: Mapping[ServerName, str],
    store: Store,
    damage: LogDamaged,
    network: Network = NETWORK,
) -> bool:
    """Repair damage of an open store from the replicas at these control addresses. Raises
    FlushFailed, DiskFull.
    """
    segments = store.logs[damage.log]
    cuts = segments.cuts

    def knows(index: int) -> int:
        return store.epoch_at(index) if index <= store.index else -1

    data = await ask(
        addresses,
        damage,
        lambda found: find_hole(segments, damage, found, knows) is not None,
        network,
    )
    return data is not None and segments.cuts == cuts and mend(segments, damage, data, knows)


async def repair_folder(
    addresses: Mapping[ServerName, str],
    folder: Path,
    segment_bytes: int,
    damage: LogDamaged,
    network: Network = NETWORK,
    disk: Disk | None = None,
) -> bool:
    """Repair a store that cannot be opened; its folder must not be in use."""
    disk = disk or Disk()
    segments = Segments(disk, folder / NAMES[damage.log], segment_bytes)
    knows = _history(folder, disk)
    try:
        data = await ask(
            addresses,
            damage,
            lambda found: find_hole(segments, damage, found, knows) is not None,
            network,
        )
        return data is not None and mend(segments, damage, data, knows)
    finally:
        segments.close()


def _history(folder: Path, disk: Disk) -> Knows:
    """The history in the newest valid checkpoint."""
    found = checkpoint.load(folder / "checkpoint", disk)
    if found is None:
        return _knows_nothing
    epochs, last = found.epochs, found.index
    return lambda index: epoch_of(epochs, index) if index <= last else -1


class BackgroundRepair:
    """Repairs damage that is found while the replica runs, one at a time. `fatal` is called if a
    repair fails for good.
    """

    def __init__(
        self,
        broker: Broker,
        donors: Callable[[], Mapping[ServerName, str]],
        is_opening: Callable[[], bool],
        network: Network,
        fatal: Callable[[BaseException], None],
        others: Callable[[], int],
    ) -> None:
        """`donors` returns the control addresses of the other replicas, `others` their number.
        `is_opening` is True while the store is being reopened.
        """
        self._broker = broker
        self._others = others
        self._donors = donors
        self._is_opening = is_opening
        self._network = network
        self._fatal = fatal
        self._mending: asyncio.Task[None] | None = None
        self._given_up: dict[tuple[int, int], float] = {}
        """Damage (log, position) that no replica could repair, with the time until which no repair
        is tried again.
        """

    def report_damage(self, damage: LogDamaged) -> bool:
        """Begin a repair, unless one runs. False if this damage cannot be repaired, or could not a
        moment ago.
        """
        if damage.position < 0 or self._is_opening():
            return False
        if (
            self._given_up.get((damage.log, damage.position), 0.0)
            > asyncio.get_running_loop().time()
        ):
            return False
        if self._mending is None or self._mending.done():
            log.warning("%s", damage)
            self._mending = asyncio.ensure_future(self._mend(damage))
        return True

    async def _mend(self, damage: LogDamaged) -> None:
        store = self._broker.store
        try:
            is_mended = await repair(self._donors(), store, damage, self._network)
        except QmqError as failure:
            self._fatal(failure)
            return
        if not is_mended and store is self._broker.store:
            log.error(
                "no other replica could repair this damage, or it was already repaired: %s", damage
            )
            if await answering_replicas(self._donors(), damage, self._network) >= self._others():
                self._give_up(damage)
            else:
                await asyncio.sleep(ABSENT_S)
        self._broker.resume()

    def _give_up(self, damage: LogDamaged) -> None:
        """Give readers the error for a while, instead of letting them wait."""
        now_s = asyncio.get_running_loop().time()
        self._given_up = {
            place: until_s for place, until_s in self._given_up.items() if until_s > now_s
        }
        self._given_up[damage.log, damage.position] = now_s + AGAIN_S

    async def stop(self) -> None:
        """Cancel the running repair, if there is one."""
        if self._mending is not None:
            self._mending.cancel()
            await asyncio.wait([self._mending])


@dataclass(frozen=True, slots=True)
class ReplicaConfig:
    """One replica. `replicas` are used to create the group. Port 0 takes a free one."""

    group: str
    replica: str
    replicas: tuple[str, ...]
    data: Path
    etcd: EtcdOptions
    host: str = "127.0.0.1"
    data_port: int = 20881
    control_port: int = 20882
    advertise: str = ""
    log: LogConfig = field(default_factory=LogConfig)
    broker: BrokerConfig = field(default_factory=BrokerConfig)
    metrics_port: int | None = None
    """The port of /metrics; None: no metrics are served."""
    metrics_host: str = ""
    """The address on which /metrics listens; empty means loopback only."""
    access: AccessConfig = field(default_factory=AccessConfig)


@dataclass(frozen=True, slots=True)
class ReplicaContext:
    config: ReplicaConfig
    coordination: CountedStore
    view: ClusterView
    environment: Environment
    clock: Clock

    @property
    def folder(self) -> Path:
        """The folder of the replica's store."""
        return self.config.data / "broker"

    @property
    def broker_config(self) -> BrokerConfig:
        """The broker's configuration, with the replica's name."""
        return replace(self.config.broker, name=self.config.replica)

    def server_name(self, replica: str) -> ServerName:
        """The name of a replica of this group."""
        return ServerName(self.view.cluster, self.config.group, replica)

    def donors(self) -> dict[ServerName, str]:
        """Control addresses of the other replicas."""
        records = self.view.replicas(self.config.group)
        return {
            self.server_name(name): each.control_address
            for name, each in records.items()
            if name != self.config.replica
        }

    def witnesses(self) -> Iterator[str]:
        """Control addresses on other machines: of the group's other replicas, then of one server on
        each further machine.
        """
        donors = self.donors()
        yield from donors.values()
        hosts = {host_of(each) for each in donors.values()} | {
            (self.config.advertise or self.config.host).strip("[]")
        }
        for state in self.view.groups():
            for each in self.view.present(state.name).values():
                if state.name != self.config.group and host_of(each.control_address) not in hosts:
                    hosts.add(host_of(each.control_address))
                    yield each.control_address

    def save(self, identity: ReplicaIdentity) -> None:
        """Write and sync the replica's promises and identity."""
        identity.save(self.environment.disk, self.config.data)


def open_context(
    config: ReplicaConfig, coordination: CoordinationStore | None, environment: Environment
) -> ReplicaContext:
    """Open the context. Without `coordination` the coordination store is the
    configured etcd cluster.
    """
    store = CountedStore(coordination or config.etcd.open())
    view = ClusterView(store)
    environment = replace(environment, network=server_network(environment.network, view))
    return ReplicaContext(config, store, view, environment, environment.clock or SteadyClock())


log = logging.getLogger("qmq.node")

MEND_TRIES: Final = 1_000


class StoreOpener:
    def __init__(
        self,
        context: ReplicaContext,
        make_projection: Callable[[], Projection | None],
        discard: Callable[[], None],
        stored: StoredBytes | None = None,
        beginnings: StoredBeginnings | None = None,
    ) -> None:
        """`make_projection` and `discard` are the methods of the replica's kind. `stored` reads the
        segments that are in the object store only. A log that starts over begins with `beginnings`.
        """
        self._context = context
        self._stored = stored
        self._beginnings = beginnings
        self._make_projection = make_projection
        self._discard = discard

    @property
    def _folder(self) -> Path:
        return self._context.folder

    async def open(self, *, is_resetting: bool) -> Store:
        """Open the store. Repair a damaged store from the others first. `is_resetting`: the log
        starts over. Raises LogDamaged.
        """
        if is_resetting:
            self._discard()
            follower.start_over(self._folder, (0, 0))
        for _ in range(MEND_TRIES):
            try:
                return self.open_at()
            except LogDamaged as damage:
                if damage.position < 0 or not await self._mend(damage):
                    raise
        raise LogDamaged(
            f"{self._folder} has more than {MEND_TRIES} damaged entries: "
            "move the folder away and start again; the replica copies the data from the others"
        )

    async def _mend(self, damage: LogDamaged) -> bool:
        context = self._context
        where = context.donors(), self._folder, context.config.log.segment_bytes, damage
        return await repair_folder(*where, context.environment.network, context.environment.disk)

    @property
    def begins_in_store(self) -> bool:
        """True if a log that starts over begins with the segments in the object store."""
        return self._beginnings is not None

    def stop(self) -> None:
        """Stop reading the object store, because the process ends."""
        if self._beginnings is not None:
            self._beginnings.stop()

    async def reopen(self, until: int | None, place: Place | None) -> Store:
        """As `open_at`, in a thread. A log that starts over begins with the segments that the
        object store has from that place on. Raises LogDamaged.
        """
        store = await self._begun_in_store(place) if place is not None else None
        return await asyncio.to_thread(self.open_at, until, place) if store is None else store

    async def _begun_in_store(self, place: Place) -> Store | None:
        """Open a store that begins with the segments in the object store. None if there are none,
        or the object store cannot be read now: all entries then come from the master.
        """
        if self._beginnings is None:
            return None
        try:
            segments = await asyncio.to_thread(self._beginnings.find, place[MESSAGES])
            if not segments:
                return None
            end = segments[-1].end
            opening = await ask_entry(
                self._context.donors(), end, self._context.environment.network
            )
            if opening is None:
                raise CannotTake(f"no other replica says how the log continues at {end}")
            store = await asyncio.to_thread(
                self._open_with, self._beginnings, segments, (end, place[ACTIONS]), opening
            )
        except (CannotTake, DiskFull) as failure:
            log.warning(
                (
                    "the log does not begin with the object store's segments, the master sends "
                    "everything: %s"
                ),
                failure,
            )
            return None
        log.info(
            (
                "the log begins with the object store's segments from %d to %d, the master sends "
                "what follows"
            ),
            place[MESSAGES],
            end,
        )
        return store

    def _open_with(
        self,
        beginnings: StoredBeginnings,
        segments: list[SegmentIndex],
        place: Place,
        opening: PendingEntry,
    ) -> Store:
        """Begin with these segments, which end at `place`. Raises CannotTake, DiskFull."""
        store = self.open_at(None, place)
        try:
            take_segments(store, segments, beginnings.entries, opening)
        except BaseException:
            store.close()
            raise
        return store

    def open_at(self, until: int | None = None, place: Place | None = None) -> Store:
        """Open the store, with everything after index `until` cut, or with a log that starts over
        at a place. Raises LogDamaged.
        """
        if place is not None:
            follower.start_over(self._folder, place)
        return open_store(
            self._folder,
            self._context.config.log,
            self._context.clock,
            disk=self._context.environment.disk,
            is_replicated=True,
            until=until,
            projection=self._make_projection(),
            stored=self._stored,
        )
