"""Blocking calls to metaservers: asks one after another until one answers or `retry_ms` has passed.
Operations whose failure may be temporary are repeated so, too: another metaserver, a new master.

Spark's driver and executors authenticate with a token from the environment (docs/ACCESS.md). Set it
for executors with `spark.executorEnv.QMQ_TOKEN_FILE`: Spark's UI shows the file's name, but not the
token.

An ordered subject's history becomes partitions of all versions with their sources.

Worked example: version 1 has 1 [0, 16). A split closes 1 for 2 [0, 8) and 3 [8, 16): both have the
source 1. A merge closes them for 4: its sources are 2 and 3. A move closes 4 for 5, on another
broker group: its source is 4.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import grpc
from qmq_ordering.routes import LpRange
from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_random_exponential

from qmq.client.metadata.cache import Placement, placement_of
from qmq.columns.model import RoutePartition, Routes
from qmq.errors import (
    CallerError,
    CoordinationError,
    InvalidArgument,
    NotConnected,
    QmqError,
    Unavailable,
)
from qmq.model import Order
from qmq.process.address import parse, require_private
from qmq.proto.v1 import control_pb2_grpc, meta_pb2_grpc
from qmq.proto.v1 import meta_pb2 as pb
from qmq.rpc.channel import (
    RenewedChannel,
    is_answer,
    is_from_wrong_server,
    metadata_of,
    typed_error,
)
from qmq.rpc.server_name import ANY_SERVER, ServerName
from qmq.security.tls import Credentials, Tls
from qmq.security.tokens import token_source

_PUBLISHED = ("published", "done")


def routes_of(
    first: pb.OrderedRoute, changes: Sequence[pb.RouteChangeInfo], order: str = Order.STRICT.value
) -> Routes:
    """The routes made from the first route and the later changes. An unpublished change can only
    have closed partitions.
    """
    partitions = {each.number: _partition(each, 1, ()) for each in first.partitions}
    version = 1
    sealed_at: dict[int, int] = {}
    for change in sorted(changes, key=lambda each: each.to_version):
        sealed_at.update(
            {number: sequence for number, sequence in change.sealed.items() if sequence >= 0}
        )
        if change.phase in _PUBLISHED:
            version = change.to_version
            for target in change.targets:
                sources = tuple(
                    [
                        source
                        for source in sorted(change.sources)
                        if _overlap(partitions[source], target)
                    ]
                )
                partitions[target.number] = _partition(target, version, sources)
    return Routes(
        first.logical_partitions, version, partitions, sealed_at, order == Order.STRICT.value
    )


def _partition(
    found: pb.OrderedPartition, version: int, sources: tuple[int, ...]
) -> RoutePartition:
    return RoutePartition(
        found.number, LpRange(found.lps.first, found.lps.end), found.broker_group, version, sources
    )


def _overlap(source: RoutePartition, target: pb.OrderedPartition) -> bool:
    return source.lps.overlaps(LpRange(target.lps.first, target.lps.end))


PAUSE_S_MIN: Final = 0.05
PAUSE_S_MAX: Final = 0.5

_R = TypeVar("_R")


def patiently(act: Callable[[], _R], retry_ms: int) -> _R:
    """Retry an operation that raises Unavailable, with growing pauses and jitter, for `retry_ms`;
    then raise the last error.
    """
    retrying = Retrying(
        retry=retry_if_exception_type(Unavailable),
        stop=stop_after_delay(retry_ms / 1000),
        reraise=True,
        wait=wait_random_exponential(multiplier=PAUSE_S_MIN, max=PAUSE_S_MAX),
    )
    return retrying(act)


class RetryDeadline:
    """The same for work in steps: `retry_ms` counts from the last successful step."""

    def __init__(self, retry_ms: int) -> None:
        self._retry_ms = retry_ms
        self._until_s = 0.0
        self._tries = 0
        self.renew()

    def renew(self) -> None:
        """A step succeeded: start the deadline again."""
        self._until_s = time.monotonic() + self._retry_ms / 1000
        self._tries = 0

    @property
    def left_ms(self) -> int:
        """The remaining time for retries; 0 if none is left."""
        return max(int((self._until_s - time.monotonic()) * 1000), 0)

    def pause(self, failure: QmqError) -> None:
        """Wait before the next try. Raises the failure if no time is left."""
        if not self.left_ms:
            raise failure
        longest_s = min(PAUSE_S_MIN * 2**self._tries, PAUSE_S_MAX)
        self._tries += 1
        time.sleep(min(random.uniform(0, longest_s), self.left_ms / 1000))  # noqa: S311 - jitter, not a secret


def token_for(address: str) -> str:
    """The token, or an empty string. Raises InvalidArgument if it cannot be read, or would be sent
    in plain text to another machine.
    """
    source = token_source(None)
    if source is None:
        return ""
    require_private(address, is_encrypted=Tls.from_environment() is not None)
    return source()


CALL_S: Final = 5.0
RETRY_MS: Final = 60_000


class Located(NamedTuple):
    """A metaserver's answer about a subject."""

    settings: pb.SubjectSettings
    placement: Placement
    hosts: tuple[str, ...]
    """All broker groups that may have messages of the subject;
    for delayed messages, the delay groups.
    """


class Metadata:
    """Calls the metaservers at `servers`, a comma-separated list of "host:port". Not thread-safe.

    Every call raises the server's typed error, or NotConnected if no server answered for
    `retry_ms`. `first_ms`: as in `reach`. The constructor raises InvalidArgument.
    """

    def __init__(self, servers: str, retry_ms: int = RETRY_MS, first_ms: int | None = None) -> None:
        self._first_ms = retry_ms if first_ms is None else first_ms
        self._addresses = parse_servers(servers)
        self.retry_ms = retry_ms
        self._turns = itertools.cycle(self._addresses)
        self._address = next(self._turns)
        self._channels: dict[str, RenewedChannel] = {}
        self._cluster = ""
        """The cluster of the metaserver that answered first.
        Metaservers of another cluster refuse.
        """
        self._has_answer = False
        self._first_routes: dict[str, pb.DescribeRouteResponse] = {}

    def reach(self, ask: Callable[[int], _R]) -> _R:
        """Make a driver's call `ask(retry_ms)`, with `first_ms` until a metaserver has answered:
        their addresses may be wrong. Raises what the call raises.
        """
        if self._has_answer:
            return ask(self.retry_ms)
        try:
            return ask(self._first_ms)
        except Unavailable:
            if not self._has_answer:
                raise
            return ask(self.retry_ms)

    # --- where things are -------------------------------------------------------------------------

    def locate(
        self,
        subject: str,
        *,
        delayed: bool = False,
        create: bool = False,
        retry_ms: int | None = None,
    ) -> Located:
        """The location of a subject, or of its delayed messages. With `create` a missing subject is
        created, if the metaserver allows it. Raises UnknownSubject, InvalidName, NotConnected.
        """
        request = pb.LocateRequest(subject=subject, delayed=delayed, create_if_missing=create)
        found: pb.LocateResponse = self._ask("Locate", request, retry_ms)
        placement = placement_of(subject, found)
        hosts = tuple(found.hosts) or tuple(
            dict.fromkeys(
                [each.group for each in placement.routes] + list(found.settings.broker_groups)
            )
        )
        return Located(
            found.settings,
            placement,
            hosts if not delayed else tuple([each.group for each in placement.routes]),
        )

    def list_subjects(
        self, prefix: str = "", *, retry_ms: int | None = None
    ) -> list[pb.SubjectDescription]:
        """All subjects with their queues. Raises NotConnected,
        also if a broker group does not answer.
        """
        found: pb.ListSubjectsResponse = self._ask(
            "ListSubjects", pb.ListSubjectsRequest(prefix=prefix), retry_ms
        )
        return list(found.subjects)

    def describe_route(self, subject: str, version: int = 0) -> pb.DescribeRouteResponse:
        """A version of a subject's route; 0: the latest.
        Raises UnknownSubject, OrderMismatch, NotConnected.
        """
        found: pb.DescribeRouteResponse = self._ask(
            "DescribeRoute", pb.DescribeRouteRequest(subject=subject, version=version)
        )
        return found

    def route_history(self, subject: str) -> list[pb.RouteChangeInfo]:
        """The changes of a subject's route, oldest first.
        Raises UnknownSubject, OrderMismatch, NotConnected.
        """
        found: pb.RouteHistoryResponse = self._ask(
            "RouteHistory", pb.RouteHistoryRequest(subject=subject)
        )
        return list(found.changes)

    def routes(self, subject: str) -> Routes:
        """All routes of an ordered subject. The first one never changes and is cached. Raises what
        `route_history` raises.
        """
        first = self._first_routes.get(subject)
        if first is None:
            first = self._first_routes[subject] = self.describe_route(subject, 1)
        return routes_of(first.route, self.route_history(subject), first.settings.order)

    def cluster(self) -> list[pb.GroupDescription]:
        """The broker groups with their replicas. Raises NotConnected."""
        found: pb.DescribeClusterResponse = self._ask(
            "DescribeCluster", pb.DescribeClusterRequest()
        )
        return list(found.groups)

    def forget_routes(self, subject: str) -> None:
        """The subject was deleted: if it comes back, its first route is another one."""
        self._first_routes.pop(subject, None)

    # --- asking -----------------------------------------------------------------------------------

    def _ask(self, method: str, request: Any, retry_ms: int | None = None) -> Any:
        def once() -> Any:
            address = self._address
            try:
                found = call(
                    self._channel(address),
                    meta_pb2_grpc.MetaStub,
                    method,
                    request,
                    address,
                    ServerName(self._cluster),
                )
                self._cluster = self._cluster or getattr(found, "cluster", "")
                self._has_answer = True
                return found
            except CallerError:
                self._has_answer = True
                raise
            except (Unavailable, CoordinationError, QmqError) as failure:
                self._address = next(self._turns)
                cause = failure.__cause__
                self._has_answer |= isinstance(cause, grpc.RpcError) and is_answer(cause)
                if isinstance(failure, Unavailable):
                    raise
                raise NotConnected(
                    f"the metaserver at {address} did not answer: {failure.message}"
                ) from failure

        return patiently(once, self.retry_ms if retry_ms is None else retry_ms)

    def _channel(self, address: str) -> RenewedChannel:
        found = self._channels.get(address)
        if found is None:
            found = self._channels[address] = open_channel(address)
        return found

    def control(self, address: str, group: str, replica: str, method: str, request: Any) -> Any:
        """Call a replica's control port without retries. Raises the server's typed error,
        NotConnected, DeadlineExceeded.
        """
        server = ServerName(self._cluster, group, replica)
        return call(
            self._channel(address),
            control_pb2_grpc.BrokerControlStub,
            method,
            request,
            address,
            server,
        )

    def close(self) -> None:
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()


def open_channel(address: str) -> RenewedChannel:
    """Open a channel, with TLS if the environment configures it. Raises InvalidArgument."""
    tls = Tls.from_environment()
    return RenewedChannel(address, None if tls is None else Credentials(tls))


def call(
    channel: RenewedChannel,
    stub: Callable[[grpc.Channel], Any],
    method: str,
    request: Any,
    address: str,
    server: ServerName = ANY_SERVER,
) -> Any:
    """Call a server; once more if another server had its address. Raises the server's typed error,
    NotConnected, DeadlineExceeded.
    """
    metadata = metadata_of(token_for(address), server.pack())
    try:
        return _call_once(channel, stub, method, request, metadata)
    except grpc.RpcError as cause:
        if not is_from_wrong_server(cause):
            raise typed_error(cause, address) from cause
    try:
        return _call_once(channel, stub, method, request, metadata)
    except grpc.RpcError as cause:
        raise typed_error(cause, address) from cause


def _call_once(
    channel: RenewedChannel,
    stub: Callable[[grpc.Channel], Any],
    method: str,
    request: Any,
    metadata: Any,
) -> Any:
    with channel.calling() as found:
        return getattr(stub(found), method)(request, timeout=CALL_S, metadata=metadata)


def parse_servers(servers: str) -> list[str]:
    """The addresses in "host:port,host:port". Raises InvalidArgument."""
    addresses = [each.strip() for each in servers.split(",") if each.strip()]
    for each in addresses:
        try:
            parse(each)
        except InvalidArgument as cause:
            raise InvalidArgument(
                f"{each!r} is not the address of a metaserver: write host:port, separated by commas"
            ) from cause
    if not addresses:
        raise InvalidArgument("give at least one metaserver as host:port")
    return addresses
