"""Connections to etcd's members: one gRPC channel per endpoint, the choice of the endpoint, the
metadata of every call, and etcd's RPCs by path: the server sees only the path, so this client needs
no generated stubs, which could collide with another library's.

* Calls are made only over a channel that *is* connected. gRPC would queue it on a channel that is
  still connecting, and after the deadline it would be unknown whether it was sent; a member that is
  stopped (SIGSTOP) accepts connections in its kernel and never completes one.
* `hasleader: true` goes with every call: a member cut off from its leader refuses, or ends a watch,
  instead of serving nothing.
* One channel per endpoint, with separate connections, so that under TLS each is checked against its
  own name and one dead member does not slow the others down.
* gRPC must not repeat any request (retries off, no service config from DNS), and must not go
  through a web proxy.
* Liveness is not left to HTTP/2 pings: etcd answers pings faster than every 5 s with GOAWAY
  (`--grpc-keepalive-min-time`). Calls have deadlines, and watches ask for progress (see watch).
* Certificates are read again when their files change, as those of all other connections are. Calls
  and watches that are under way stay on the connection that they have; the next call opens one with
  the new certificates.
* A user's token is requested at first use and again when etcd says it is invalid (simple tokens end
  after 5 minutes of disuse, with a restart of etcd, and with any change of the users).

Addresses of endpoints:

    "etcd-0:2379", "http://127.0.0.1:2379"     plain text
    "https://etcd-0:2379"                      TLS

All calls use the current endpoint. When calls fail there, the next endpoint becomes current. Each
failed call names its endpoint, and only the current one can be left: several calls that fail
together therefore switch the endpoint once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Generic, Protocol, Self, TypeVar

import grpc
from google.protobuf.message import Message

from qmq.errors import CoordinationError, InvalidArgument
from qmq.proto.etcd import etcd_pb2 as pb
from qmq.security.tls import Credentials, Tls
from qmq.text import PORT_MAX, whole_number


@dataclass(frozen=True, slots=True)
class EtcdTls:
    """Paths of PEM files. `ca` None trusts the system's roots; `cert` and `key` are the client's
    own. Raises InvalidArgument if one of them is missing.
    """

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise InvalidArgument("an etcd client certificate needs both `cert` and `key`")
        if self.cert is not None and self.ca is None:
            raise InvalidArgument(
                "an etcd client certificate needs `ca`, too: the CA that signed etcd's certificates"
            )


@dataclass(frozen=True, slots=True)
class EtcdEndpoint:
    """Where a member listens, `HOST:PORT`."""

    address: str
    is_tls: bool


def parse_endpoint(text: str, *, has_tls_files: bool) -> EtcdEndpoint:
    """Parse an endpoint. It uses TLS if it says https, or if it has no scheme and TLS files are
    given. Raises InvalidArgument.
    """
    scheme, separator, rest = text.strip().rpartition("://")
    host, _, port = rest.rstrip("/").rpartition(":")
    if (
        not host
        or whole_number(port, PORT_MAX, 1) is None
        or (separator and scheme not in ("http", "https"))
    ):
        raise InvalidArgument(
            f"etcd endpoint {text!r} is not HOST:PORT, http://HOST:PORT or https://HOST:PORT"
        )
    if scheme == "http" and has_tls_files:
        raise InvalidArgument(
            f"etcd endpoint {text!r} is plain text, but certificates are given: write "
            "https:// or leave them out"
        )
    return EtcdEndpoint(f"{host}:{port}", scheme == "https" or has_tls_files)


class Rotation:
    """The endpoint in use."""

    def __init__(self, endpoints: Sequence[EtcdEndpoint]) -> None:
        """Begin with the first endpoint. Raises InvalidArgument if there is none."""
        if not endpoints:
            raise InvalidArgument("no etcd endpoint is given")
        self.endpoints = tuple(dict.fromkeys(endpoints))
        self._at = 0

    def current(self) -> EtcdEndpoint:
        """The endpoint for the next call."""
        return self.endpoints[self._at]

    def leave(self, failed: EtcdEndpoint) -> None:
        """Switch to the next endpoint, if `failed` is still the current one."""
        if failed == self.current():
            self._at = (self._at + 1) % len(self.endpoints)

    def __str__(self) -> str:
        return ", ".join(each.address for each in self.endpoints)


class EtcdAnswer(Protocol):
    """What all of etcd's answers have."""

    @property
    def header(self) -> pb.ResponseHeader: ...

    @classmethod
    def FromString(cls, serialized: bytes, /) -> Self: ...  # noqa: N802 - protobuf's name


Request = TypeVar("Request", bound=Message)
Response = TypeVar("Response", bound=EtcdAnswer)


@dataclass(frozen=True, slots=True)
class Method(Generic[Request, Response]):
    """An RPC: its path, and the types of its request and its answer."""

    path: str
    request: type[Request]
    response: type[Response]


RANGE: Final = Method("/etcdserverpb.KV/Range", pb.RangeRequest, pb.RangeResponse)
PUT: Final = Method("/etcdserverpb.KV/Put", pb.PutRequest, pb.PutResponse)
DELETE_RANGE: Final = Method(
    "/etcdserverpb.KV/DeleteRange", pb.DeleteRangeRequest, pb.DeleteRangeResponse
)
TXN: Final = Method("/etcdserverpb.KV/Txn", pb.TxnRequest, pb.TxnResponse)
COMPACT: Final = Method("/etcdserverpb.KV/Compact", pb.CompactionRequest, pb.CompactionResponse)
WATCH: Final = Method("/etcdserverpb.Watch/Watch", pb.WatchRequest, pb.WatchResponse)
LEASE_GRANT: Final = Method(
    "/etcdserverpb.Lease/LeaseGrant", pb.LeaseGrantRequest, pb.LeaseGrantResponse
)
LEASE_REVOKE: Final = Method(
    "/etcdserverpb.Lease/LeaseRevoke", pb.LeaseRevokeRequest, pb.LeaseRevokeResponse
)
LEASE_KEEP_ALIVE: Final = Method(
    "/etcdserverpb.Lease/LeaseKeepAlive", pb.LeaseKeepAliveRequest, pb.LeaseKeepAliveResponse
)
AUTHENTICATE: Final = Method(
    "/etcdserverpb.Auth/Authenticate", pb.AuthenticateRequest, pb.AuthenticateResponse
)
USER_ADD: Final = Method("/etcdserverpb.Auth/UserAdd", pb.AuthUserAddRequest, pb.AuthResponse)
USER_GRANT_ROLE: Final = Method(
    "/etcdserverpb.Auth/UserGrantRole", pb.AuthUserGrantRoleRequest, pb.AuthResponse
)
ROLE_ADD: Final = Method("/etcdserverpb.Auth/RoleAdd", pb.AuthRoleAddRequest, pb.AuthResponse)
ROLE_GRANT_PERMISSION: Final = Method(
    "/etcdserverpb.Auth/RoleGrantPermission", pb.AuthRoleGrantPermissionRequest, pb.AuthResponse
)
AUTH_ENABLE: Final = Method("/etcdserverpb.Auth/AuthEnable", pb.AuthEnableRequest, pb.AuthResponse)
STATUS: Final = Method("/etcdserverpb.Maintenance/Status", pb.StatusRequest, pb.StatusResponse)


log = logging.getLogger("qmq.coordination")

Metadata = tuple[tuple[str, str], ...]

_HAS_LEADER: Final[Metadata] = (("hasleader", "true"),)
_OPTIONS: Final[tuple[tuple[str, int], ...]] = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_retries", 0),
    ("grpc.service_config_disable_resolution", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
)
_CONNECT_POLL_S: Final = 0.003


class NotReady(Exception):
    """There is no connection to the endpoint, or it leads to another etcd cluster, so nothing was
    sent. The text says why.
    """


class EtcdConnection:
    """The channel to one endpoint."""

    def __init__(self, endpoint: EtcdEndpoint, credentials: Credentials | None) -> None:
        """The channel connects at its first use.
        Without `credentials` the system's roots are trusted.
        """
        self.endpoint = endpoint
        self.users = 0
        """The number of calls and watches that use it."""
        self.is_replaced = False
        self.is_known = False
        """Whether the member at the other end is known to belong to the right cluster."""
        if endpoint.is_tls:
            of_channel = (
                grpc.ssl_channel_credentials()
                if credentials is None
                else credentials.channel_credentials()
            )
            self._channel = grpc.aio.secure_channel(endpoint.address, of_channel, options=_OPTIONS)
        else:
            self._channel = grpc.aio.insecure_channel(endpoint.address, options=_OPTIONS)
        self._unary: dict[str, grpc.aio.UnaryUnaryMultiCallable[Any, Any]] = {}

    async def ready(self, timeout_s: float) -> None:
        """Connect, unless it is connected. Raises NotReady."""
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout_s
        while (
            state := self._channel.get_state(try_to_connect=True)
        ) is not grpc.ChannelConnectivity.READY:
            # gRPC connects again only when it is asked to, here, so each new connection is noticed.
            self.is_known = False
            if state in (
                grpc.ChannelConnectivity.TRANSIENT_FAILURE,
                grpc.ChannelConnectivity.SHUTDOWN,
            ):
                raise NotReady(await self._failure_reason())
            if loop.time() >= until:
                raise NotReady(f"{self.endpoint.address} did not complete the connection")
            # Polling, because waiting for a change of the state cannot be cancelled (grpc issue
            # 3064).
            await asyncio.sleep(_CONNECT_POLL_S)

    async def _failure_reason(self) -> str:
        """The reason for the failure. gRPC tells it only to a call, and a call fails immediately in
        this state.
        """
        try:
            await self.unary(STATUS, pb.StatusRequest(), 0.1, ())
        except grpc.aio.AioRpcError as failure:
            return f"{self.endpoint.address}: {failure.details()}"
        return f"{self.endpoint.address} was away for a moment"

    async def unary(
        self,
        method: Method[Request, Response],
        request: Request,
        timeout_s: float,
        metadata: Metadata,
    ) -> Response:
        """One request and one answer, with a deadline. Raises grpc.aio.AioRpcError."""
        callable_ = self._unary.get(method.path)
        if callable_ is None:
            callable_ = self._unary[method.path] = self._channel.unary_unary(
                method.path,
                request_serializer=method.request.SerializeToString,
                response_deserializer=method.response.FromString,
            )
        answer: Response = await callable_(request, timeout=timeout_s, metadata=metadata)
        return answer

    def stream(
        self,
        method: Method[Request, Response],
        metadata: Metadata,
        *,
        requests: Iterator[Request] | None = None,
        timeout_s: float | None = None,
    ) -> grpc.aio.StreamStreamCall[Request, Response]:
        """A bidirectional stream; with `requests` only these are sent. Without a deadline the
        caller checks that the stream is alive.
        """
        callable_: grpc.aio.StreamStreamMultiCallable[Request, Response] = (
            self._channel.stream_stream(
                method.path,
                request_serializer=method.request.SerializeToString,
                response_deserializer=method.response.FromString,
            )
        )
        return callable_(requests, timeout=timeout_s, metadata=metadata)

    async def close(self) -> None:
        """Cancel calls and disconnect."""
        await self._channel.close()


class Channels:
    """All connections, the current one, and the user's token."""

    def __init__(
        self,
        rotation: Rotation,
        tls: EtcdTls,
        user: str | None,
        password: str | None,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises InvalidArgument for certificates that cannot be used."""
        self.rotation = rotation
        self._credentials = (
            None if tls.ca is None else Credentials(Tls(tls.ca, tls.cert, tls.key), monotonic_s)
        )
        self.shows_certificate = tls.cert is not None
        self._version = 0 if self._credentials is None else self._credentials.version
        self._replaced: set[EtcdConnection] = set()
        """Connections with older certificates that have calls or watches."""
        self._cluster = 0
        """etcd's number of its cluster; 0 before the first answer."""
        self.strangers: dict[EtcdEndpoint, str] = {}
        """The endpoints that lead to another cluster, and what they answered."""
        self.user = user
        self._password = password
        self._token: str | None = None
        self._authenticating = asyncio.Lock()
        self._connections: dict[EtcdEndpoint, EtcdConnection] = {}
        self.closed = asyncio.Event()

    async def take(self, timeout_s: float, endpoint: EtcdEndpoint | None = None) -> EtcdConnection:
        """The connection to the current endpoint, or to this one, ready; `release` it. An
        endpoint that cannot be reached is left. Raises NotReady; CoordinationError if closed.
        """
        if self.closed.is_set():
            raise CoordinationError("the coordination store is closed")
        if self._credentials is not None and self._credentials.version != self._version:
            self._version = self._credentials.version
            await self._replace()
        endpoint = endpoint or self.rotation.current()
        found = self._connections.get(endpoint)
        if found is None:
            found = self._connections[endpoint] = EtcdConnection(endpoint, self._credentials)
        found.users += 1
        try:
            await found.ready(timeout_s)
        except BaseException as failure:
            await self.release(found)
            if isinstance(failure, NotReady):
                self.rotation.leave(endpoint)
            raise
        return found

    async def release(self, connection: EtcdConnection) -> None:
        """Tell that a call or watch over this connection has ended."""
        connection.users -= 1
        if connection.is_replaced and not connection.users:
            self._replaced.discard(connection)
            await connection.close()

    async def _replace(self) -> None:
        before = list(self._connections.values())
        self._connections.clear()
        for each in before:
            each.is_replaced = True
        self._replaced.update(before)
        for each in before:
            each.users += 1
            await self.release(each)

    async def verify(
        self, connection: EtcdConnection, metadata: Metadata, timeout_s: float
    ) -> None:
        """Check that a new connection leads to the same etcd cluster as all others. Raises
        NotReady, grpc.aio.AioRpcError.
        """
        if not connection.is_known:
            self.check(
                connection,
                (await connection.unary(STATUS, pb.StatusRequest(), timeout_s, metadata)).header,
            )

    def check(self, connection: EtcdConnection, answer: pb.ResponseHeader) -> None:
        """Check that an answer is one of this etcd cluster: gRPC may connect again between `verify`
        and the call. Raises NotReady.
        """
        endpoint, found = connection.endpoint, answer.cluster_id
        self._cluster = self._cluster or found
        if found == self._cluster:
            connection.is_known = True
            self.strangers.pop(endpoint, None)
            return
        connection.is_known = False
        text = (
            f"{endpoint.address} belongs to the etcd cluster {found:x}, and this process uses "
            f"{self._cluster:x}"
        )
        if endpoint not in self.strangers:
            log.critical(
                (
                    "%s: this process does not use it. Correct the address, or restart the "
                    "process if etcd was restored"
                ),
                text,
            )
        self.strangers[endpoint] = text
        self.rotation.leave(endpoint)
        raise NotReady(text)

    async def metadata(self, connection: EtcdConnection, timeout_s: float) -> Metadata:
        """The metadata of a call; requests a token if there is a user and none yet.
        Raises grpc.aio.AioRpcError.
        """
        if self.user is None:
            return _HAS_LEADER
        async with self._authenticating:
            if self._token is None:
                self._token = await self._authenticate(connection, timeout_s)
        return (*_HAS_LEADER, ("token", self._token)) if self._token else _HAS_LEADER

    async def _authenticate(self, connection: EtcdConnection, timeout_s: float) -> str:
        """A new token; empty if authentication is not enabled (as in etcd's own client)."""
        request = pb.AuthenticateRequest(name=self.user or "", password=self._password or "")
        try:
            return (await connection.unary(AUTHENTICATE, request, timeout_s, _HAS_LEADER)).token
        except grpc.aio.AioRpcError as failure:
            if "authentication is not enabled" in (failure.details() or ""):
                return ""
            raise

    def forget_token(self, used: Metadata) -> None:
        """Drop an invalid token, unless a newer one is in use."""
        if self._token in (dict(used).get("token", ""), None):
            self._token = None

    async def close(self) -> None:
        """Disconnect everything; watches see `closed`."""
        self.closed.set()
        for connection in (*self._replaced, *self._connections.values()):
            await connection.close()
        self._connections.clear()
