"""What every role's process has: it runs until a signal comes, in an environment; it finds etcd,
refuses to be exposed, describes itself to operators, and checks the kind of its group.

The environment is clock, disk, network and timing. The default is the machine's own; tests pass
others (qmq/testing). There are two clocks, because a test that moves the time must not cause
elections. Times that applications see (due times, retention, leases of consumers and in the
coordination store) use `clock`. Heartbeats and elections of replicas use `steady`, which no test
moves.

Without mutual TLS a server listens on its own machine only, unless the operator insists
(`require_guarded`; docs/SECURITY.md):

    loopback, unix:/path       allowed
    any other address          allowed with TLS that requires certificates of clients; otherwise
                               refused without --insecure (QMQ_INSECURE=1): any client that reaches
                               a port may read, change and delete everything
    the metrics port           the same: metrics contain names of subjects and groups
    etcd's password over http  the same, because any machine on the network path can read it

`process_status` tells the version, who can reach the server, and when its certificate expires.
Brokers and metaservers put it into the answers to DescribeReplica and DescribeCluster. `qmq doctor`
reads it there: an operator's machine reaches the metaserver's port only, and not the metrics port
of every process.

A group is a broker group, or a delay group with its settings. This is fixed when the group is
created (`check_kind`):

    /qmq/groups/GROUP/members, delay       written in one transaction, so that a group is complete
                                           when it is visible
    DATA/delay.json                        the same settings beside a delay replica's data, for a
                                           start while the coordination store is away

A replica whose settings differ stops before it opens anything, because its schedule's files would
differ from the others'.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from qmq_coordination.broker_groups import BrokerGroupState, DelaySettings, group_key
from qmq_coordination.coordination_store import CoordinationStore
from qmq_replication.coordinator import SECRET, found_group, new_secret
from qmq_replication.membership import ReplicaMembership
from qmq_replication.ready import Timing

import qmq
from qmq.broker.maintenance import stop_process
from qmq.delay.config import BUCKET_MS
from qmq.errors import CoordinationError, InvalidArgument, LogDamaged
from qmq.limits import DELAY_MS_MAX
from qmq.log.disk import Disk
from qmq.process.address import host_of, is_local
from qmq.process.event_loop import Clock, SystemClock
from qmq.proto.v1 import control_pb2 as pb
from qmq.rpc.network import NETWORK, Network
from qmq.rpc.tls_network import ServerNetwork, TlsNetwork
from qmq.security.tls import Credentials, ExpiryWarning, Tls, left_s, now

if TYPE_CHECKING:
    from qmq_coordination.etcd.store import EtcdStore
    from qmq_replication.driver import Driver


async def until_signal(start: Callable[[], Awaitable[str]]) -> bool:
    """Start, print the returned line, wait for SIGINT or SIGTERM. A signal also cancels a start
    under way. Returns False then.
    """
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    starting = asyncio.ensure_future(start())
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
    is_started = starting.done()
    if is_started:
        sys.stdout.write(starting.result() + "\n")
        sys.stdout.flush()
        await stopping
    stopping.cancel()
    starting.cancel()
    await asyncio.gather(starting, stopping, return_exceptions=True)
    return is_started


@dataclass(frozen=True, slots=True)
class NodeTiming:
    """In seconds. Part of `Environment`, so that tests can pass shorter ones."""

    known_wait_s: float = 3.0
    """The time that a replica that knows its group waits for the coordination store, before it
    starts without the store.
    """
    generation_s: float = 60.0
    """How often a replica that works registers its next generation."""
    stale_routes_s: float = 5.0
    """How often a master compares its seals with the routes in the coordination store."""
    schedule_retry_s: float = 1.0
    """Pause before the other replicas are asked for their schedule again."""
    schedule_give_s: float = 0.2
    """How often a master without a schedule looks for a replica to hand over to."""


TIMING: Final = NodeTiming()


def replica_driver(*positional: Any, **named: Any) -> Driver:
    """A `Driver`, which is imported when a replica is made: `qmq dev` has none."""
    from qmq_replication.driver import Driver

    return Driver(*positional, **named)


@dataclass(frozen=True, slots=True)
class Environment:
    clock: Clock | None = None
    """Is trusted. None means a clock that does not follow every jump of the
    machine's (qmq/broker/replica_time.py).
    """
    steady: Clock = field(default_factory=SystemClock)
    """The clock whose monotonic time is for heartbeats and elections."""
    disk: Disk = field(default_factory=Disk)
    network: Network = NETWORK
    timing: Timing = field(default_factory=Timing)
    """The intervals of heartbeats and elections."""
    fatal: Callable[[BaseException], None] = stop_process
    """Ends a process that must not continue."""
    node_timing: NodeTiming = TIMING
    make_driver: Callable[..., Driver] = replica_driver
    """Makes the driver of a replica, with the arguments of `Driver`. Tests pass a driver that also
    records its actions.
    """


MACHINE: Final = Environment()


def environment_with(tls: Tls | None) -> Environment:
    """Make the machine's environment, with TLS if there are certificates. Raises InvalidArgument
    for unusable files.
    """
    if tls is None:
        return Environment(network=ServerNetwork())
    credentials = Credentials(tls)
    return Environment(network=TlsNetwork(credentials, ExpiryWarning(credentials).look))


@dataclass(frozen=True, slots=True)
class EtcdOptions:
    """Endpoints are HOST:PORT or URLs; `ca`, `cert` and `key` are PEM files."""

    endpoints: tuple[str, ...]
    user: str | None = None
    password: str | None = None
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None

    def open(self, *, total_s: float | None = None) -> EtcdStore:
        """Open a store on this etcd. The store connects at its first use. A call fails after
        `total_s`, by default that of the store. Raises InvalidArgument.
        """
        from qmq_coordination.etcd.calls import TOTAL_S  # `qmq dev` has no etcd
        from qmq_coordination.etcd.channel import EtcdTls
        from qmq_coordination.etcd.store import EtcdStore

        return EtcdStore(
            self.endpoints,
            user=self.user,
            password=self.password,
            tls=EtcdTls(self.ca, self.cert, self.key),
            total_s=TOTAL_S if total_s is None else total_s,
        )


log = logging.getLogger("qmq.node")

EVERYWHERE: Final = ("0.0.0.0", "::")  # noqa: S104 - addresses to listen on, not to connect to


class Weakness(NamedTuple):
    """A way in which unauthenticated clients can reach a port or a password, and the protection
    against it.
    """

    what: str
    remedy: str


def _is_guarded(host: str, tls: Tls | None) -> bool:
    """True if only this machine, or only clients with a certificate,
    can reach a port on this host.
    """
    return is_local(host) or (tls is not None and tls.requires_clients)


def require_reachable(host: str, advertise: str) -> None:
    """Raise InvalidArgument if clients of a server that listens on `host` are told an address to
    which nobody can connect.
    """
    if not advertise and host in EVERYWHERE:
        raise InvalidArgument(
            f"clients cannot connect to {host}, on which this server listens: "
            "--advertise HOST (QMQ_ADVERTISE) is the name or address by which they reach it, for "
            "example the container's name for other containers, or localhost with published ports"
        )


def weaknesses(
    host: str, etcd: EtcdOptions | None = None, tls: Tls | None = None
) -> list[Weakness]:
    """The weaknesses of a server that listens on `host` and gives its password to `etcd`. Raises
    InvalidArgument for a malformed endpoint.
    """
    found = []
    if not _is_guarded(host, tls):
        what = (
            f"there is no access control: everybody who reaches {host} may read, change and "
            "delete everything"
        )
        remedy = (
            "--tls-ca, --tls-cert and --tls-key let in only who has a certificate; --host "
            "127.0.0.1 or --host unix:/path"
        )
        found.append(Weakness(what, f"{remedy} serves this machine only"))
    if etcd is not None and etcd.password is not None:
        from qmq_coordination.etcd.channel import parse_endpoint

        has_tls_files = any((etcd.ca, etcd.cert, etcd.key))
        endpoints = [parse_endpoint(text, has_tls_files=has_tls_files) for text in etcd.endpoints]
        plain = [
            each.address
            for each in endpoints
            if not each.is_tls and not is_local(host_of(each.address))
        ]
        if plain:
            what = f"etcd's password would go to {', '.join(plain)} in clear text"
            found.append(Weakness(what, "https:// endpoints, or --etcd-ca, keep it secret"))
    return found


def require_guarded(
    host: str,
    is_insecure: bool,
    etcd: EtcdOptions | None = None,
    tls: Tls | None = None,
    *,
    metrics_host: str = "",
) -> None:
    """Raise InvalidArgument if there are weaknesses.
    With `is_insecure` they are only logged as warnings.
    """
    found = weaknesses(host, etcd, tls)
    if metrics_host and not _is_guarded(metrics_host, tls):
        what = (
            f"everybody who reaches {metrics_host} may read the metrics, which have the names of "
            "subjects and groups"
        )
        remedy = (
            "Certificates that are required of clients (--tls-ca, --tls-cert, --tls-key) close "
            "the metrics to all others"
        )
        found.append(
            Weakness(what, f"{remedy}; without QMQ_METRICS_HOST this machine alone may read them")
        )
    for what, remedy in found:
        if not is_insecure:
            raise InvalidArgument(
                f"{what}. {remedy}; --insecure (QMQ_INSECURE=1) allows it on a private "
                "network (docs/SECURITY.md)"
            )
        log.warning(
            "insecure: %s; allow only a private network to reach this process (docs/SECURITY.md)",
            what,
        )


def process_status(
    host: str, etcd: EtcdOptions | None = None, credentials: Credentials | None = None
) -> Callable[[], pb.ProcessStatus]:
    """Make a function that returns the process's current status. Certificates may be renewed while
    the process runs.
    """
    version, is_insecure = (
        qmq.__version__,
        bool(weaknesses(host, etcd, None if credentials is None else credentials.files)),
    )

    def describe() -> pb.ProcessStatus:
        left = None if credentials is None else left_s(credentials, now())
        left_ms = None if left is None else int(left * 1000)
        return pb.ProcessStatus(
            version=version, is_insecure=is_insecure, certificate_left_ms=left_ms
        )

    return describe


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
        raise InvalidArgument(
            "a bucket must last 5 minutes to 24 hours and divide a day evenly, not "
            f"{_minutes(bucket)} minutes"
        )
    if not 0 < most <= YEARS_MAX * 366 * DAY_MS:
        raise InvalidArgument(
            f"the longest delay must be above 0 and at most {YEARS_MAX} years, not "
            f"{_days(most)} days"
        )
    return settings


def check_kind(group: str, found: DelaySettings | None, wanted: DelaySettings | None) -> None:
    """Raise InvalidArgument if the existing group is of another kind than this replica."""
    if found == wanted:
        return
    if found is None:
        raise InvalidArgument(
            f"{group} is a broker group: start its replicas with `qmq broker`, or choose "
            "another --group for `qmq delay`"
        )
    if wanted is None:
        raise InvalidArgument(
            f"{group} is a delay group: start its replicas with `qmq delay`, or choose "
            "another --group for `qmq broker`"
        )
    raise InvalidArgument(
        f"delay group {group} was created with {_named(found)}, but this replica was "
        f"started with {_named(wanted)}: all replicas of a group need the same settings. "
        "Start it with the group's settings, or create another group"
    )


def _named(settings: DelaySettings) -> str:
    return (
        f"QMQ_BUCKET={_minutes(settings.bucket_ms)}m QMQ_DELAY_MAX={_days(settings.delay_ms_max)}d"
    )


def _minutes(ms: int) -> str:
    return f"{ms / MINUTE_MS:g}"


def _days(ms: int) -> str:
    return f"{ms / DAY_MS:g}"


# --- in the coordination store --------------------------------------------------------------------


async def found(
    store: CoordinationStore, group: str, replicas: tuple[str, ...], wanted: DelaySettings | None
) -> ReplicaMembership:
    """The group's membership. A new group is created. Waits until the store can be reached. Raises
    InvalidArgument if the group is of another kind.
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


# --- in the replica's folder ----------------------------------------------------------------------


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
            f"{path.name} cannot be read ({cause}): this file holds the settings with which "
            "the delay group was created"
        ) from cause
    check_kind(group, settings, wanted)


def note_folder(disk: Disk, data: Path, settings: DelaySettings | None) -> None:
    """Record that the folder belongs to a group of this kind. Raises DiskFull, FlushFailed."""
    if settings is not None and not (data / FILE).exists():
        disk.replace(data / FILE, settings.encode())
