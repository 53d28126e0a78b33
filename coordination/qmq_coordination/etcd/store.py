"""EtcdStore: the coordination store on an etcd cluster.

The semantics are those of `coordination_store`, which are etcd's. This client adds exact errors. A
read answers, or raises CoordinationUnavailable. A change is made once, or is certainly not made, or
raises CoordinationUnknown (see etcd_calls, failures).

If a member of etcd crashes: calls go to the next one, watches resume there from their last event
(watch). If this process crashes: its leases end. If no member can be reached: calls raise
CoordinationUnavailable after the total deadline, watches wait.

`protect` makes etcd's own users: a client's certificate decides which keys the client may read and
write. etcd runs with --client-cert-auth, and uses the common name of a client's certificate as the
name of its user. So users have no passwords here: `root` may do everything, one user may read and
write the keys under a prefix, and no other user may do anything. The members present certificates
to each other, too; their user exists for their health checks, which etcd would otherwise log as
errors.

Each step may be repeated, so an interrupted run is repeated from its beginning.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from qmq.errors import CoordinationError, LeaseNotFound
from qmq.proto.etcd import etcd_pb2 as pb
from qmq.rpc.request_changes import note_change
from qmq_coordination.coordination_store import (
    NO_LEASE,
    Compare,
    Delete,
    KeyListing,
    KeyValue,
    LeaseId,
    Operation,
    Put,
    Revision,
    TxnResult,
    WatchedChanges,
)
from qmq_coordination.etcd.calls import (
    CALL_S,
    TOTAL_S,
    EtcdCalls,
    LeaseExists,
    TryAgain,
    UserOrRoleExists,
)
from qmq_coordination.etcd.channel import (
    AUTH_ENABLE,
    COMPACT,
    DELETE_RANGE,
    LEASE_GRANT,
    LEASE_KEEP_ALIVE,
    LEASE_REVOKE,
    PUT,
    RANGE,
    ROLE_ADD,
    ROLE_GRANT_PERMISSION,
    STATUS,
    TXN,
    USER_ADD,
    USER_GRANT_ROLE,
    Channels,
    EtcdEndpoint,
    EtcdTls,
    Rotation,
    parse_endpoint,
)
from qmq_coordination.etcd.values import Converter
from qmq_coordination.etcd.watch import Watcher

ROOT: Final = "root"
"""The name of etcd's administrator, and of its role, which always exist."""


async def protect(calls: EtcdCalls, user: str, member: str, key: bytes, range_end: bytes) -> None:
    """Create the users and the role, and turn on access control.
    Raises CoordinationError, CoordinationUnavailable.
    """
    for name in (ROOT, user, member):
        with suppress(UserOrRoleExists):
            await calls.read(
                USER_ADD,
                pb.AuthUserAddRequest(name=name, options=pb.UserAddOptions(no_password=True)),
            )
    with suppress(UserOrRoleExists):
        await calls.read(ROLE_ADD, pb.AuthRoleAddRequest(name=user))
    permission = pb.Permission(perm_type=pb.Permission.READWRITE, key=key, range_end=range_end)
    await calls.read(
        ROLE_GRANT_PERMISSION, pb.AuthRoleGrantPermissionRequest(name=user, perm=permission)
    )
    for name in (ROOT, user):
        await calls.read(USER_GRANT_ROLE, pb.AuthUserGrantRoleRequest(user=name, role=name))
    await calls.read(AUTH_ENABLE, pb.AuthEnableRequest())


_LEASES: Final = 2**63 - 1


@dataclass(frozen=True, slots=True)
class EtcdStatus:
    """The status of a member. `leader` is 0 while there is none."""

    version: str
    member: int
    leader: int
    revision: Revision
    db_size_bytes: int


@dataclass(frozen=True, slots=True)
class EtcdMember:
    """What the member at an address answered. `failure` is the reason why it cannot be used; empty
    if it can. `version` is empty if the member does not tell this user.
    """

    address: str
    version: str = ""
    failure: str = ""


class EtcdStore:
    """A CoordinationStore on etcd 3.4 or later. It belongs to one event loop; calls may run at the
    same time. `namespace` is a prefix of every key. `call_s` is the deadline of one attempt,
    `total_s` of a call with all its attempts.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        user: str | None = None,
        password: str | None = None,
        tls: EtcdTls | None = None,
        namespace: str = "",
        call_s: float = CALL_S,
        total_s: float = TOTAL_S,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Does no I/O. `monotonic_s` is the clock for checking whether the files of `tls` changed.
        Raises InvalidArgument.
        """
        tls = tls or EtcdTls()
        has_tls_files = tls.ca is not None
        rotation = Rotation(
            [parse_endpoint(text, has_tls_files=has_tls_files) for text in endpoints]
        )
        self._channels = Channels(rotation, tls, user, password, monotonic_s)
        self._calls = EtcdCalls(self._channels, call_s, total_s)
        self._converter = Converter(namespace)
        self._call_s = call_s

    async def get(self, key: str) -> KeyValue | None:
        """See CoordinationStore. All reads are linearizable."""
        found = await self._calls.read(RANGE, pb.RangeRequest(key=self._converter.key(key)))
        return self._converter.item(found.kvs[0]) if found.kvs else None

    async def list(self, prefix: str, *, revision: int = 0, limit: int = 0) -> KeyListing:
        key, end = self._converter.span(prefix, is_prefix=True)
        found = await self._calls.read(
            RANGE, pb.RangeRequest(key=key, range_end=end, revision=revision, limit=limit)
        )
        return KeyListing(
            Revision(found.header.revision), tuple(self._converter.item(kv) for kv in found.kvs)
        )

    async def put(self, key: str, value: bytes, lease: LeaseId = NO_LEASE) -> Revision:
        """See CoordinationStore. Raises CoordinationUnknown."""
        done = await self._calls.change(PUT, self._converter.put(Put(key, value, lease)))
        note_change()
        return Revision(done.header.revision)

    async def delete(self, key: str, *, is_prefix: bool = False) -> int:
        """See CoordinationStore. Raises CoordinationUnknown."""
        done = await self._calls.change(
            DELETE_RANGE, self._converter.delete(Delete(key, is_prefix))
        )
        note_change()
        return done.deleted

    async def txn(
        self,
        compares: Sequence[Compare],
        success: Sequence[Operation],
        failure: Sequence[Operation] = (),
    ) -> TxnResult:
        """See CoordinationStore. Raises CoordinationUnknown."""
        request = pb.TxnRequest(
            compare=[self._converter.compare(each) for each in compares],
            success=[self._converter.operation(each) for each in success],
            failure=[self._converter.operation(each) for each in failure],
        )
        done = await self._calls.change(TXN, request)
        if success if done.succeeded else failure:
            note_change()
        results = tuple(self._converter.result(each) for each in done.responses)
        return TxnResult(done.succeeded, Revision(done.header.revision), results)

    async def compact(self, revision: int) -> None:
        """See CoordinationStore. Compacts the history of the whole etcd, not only of the namespace.
        Raises CoordinationUnknown.
        """
        await self._calls.change(COMPACT, pb.CompactionRequest(revision=revision))

    async def grant(self, ttl_s: float) -> LeaseId:
        """See CoordinationStore. Seconds are rounded up to whole ones; etcd may grant more (at
        least 1.5 election timeouts). The lease's number is chosen here, from 2**63, so that a
        repeated request finds its own lease. The lease's time began with the first request: count
        the time from before the call.
        """
        lease = LeaseId(secrets.randbelow(_LEASES) + 1)
        try:
            await self._calls.read(
                LEASE_GRANT, pb.LeaseGrantRequest(id=lease, ttl_s=max(1, math.ceil(ttl_s)))
            )
        except LeaseExists:
            return lease
        return lease

    async def keep_alive(self, lease: LeaseId) -> float:
        """See CoordinationStore. The time begins when etcd receives the request: count it from
        before the call.
        """
        answer = await self._calls.exchange(LEASE_KEEP_ALIVE, pb.LeaseKeepAliveRequest(id=lease))
        if answer.ttl_s <= 0:
            raise LeaseNotFound(f"lease {lease} has ended")
        return float(answer.ttl_s)

    async def revoke(self, lease: LeaseId) -> None:
        """See CoordinationStore. Raises CoordinationUnknown."""
        await self._calls.change(LEASE_REVOKE, pb.LeaseRevokeRequest(id=lease))

    def watch(self, prefix: str, start_revision: int) -> AsyncIterator[WatchedChanges]:
        """See CoordinationStore. Continues after any outage until the store is closed. Raises
        Compacted, CoordinationError.
        """
        return Watcher(
            self._channels, self._converter, self._call_s, prefix, start_revision
        ).changes()

    async def status(self) -> EtcdStatus:
        """The status of the member that this store uses."""
        found = await self._calls.read(STATUS, pb.StatusRequest())
        header = found.header
        return EtcdStatus(
            found.version,
            header.member_id,
            found.leader,
            Revision(header.revision),
            found.db_size_bytes,
        )

    async def members(self) -> tuple[EtcdMember, ...]:
        """What the member at each endpoint answers, within the deadline of one attempt. All are
        asked at the same time.
        """
        return tuple(
            await asyncio.gather(
                *[self._member(each) for each in self._channels.rotation.endpoints]
            )
        )

    async def _member(self, endpoint: EtcdEndpoint) -> EtcdMember:
        try:
            async with asyncio.timeout(self._call_s):
                return EtcdMember(
                    endpoint.address,
                    (await self._calls.read_at(endpoint, STATUS, pb.StatusRequest())).version,
                )
        except TimeoutError:
            return EtcdMember(endpoint.address, failure=f"no answer within {self._call_s:g} s")
        except TryAgain as failure:
            return EtcdMember(endpoint.address, failure=str(failure))
        except CoordinationError:  # the member refuses to tell this user
            if self._channels.closed.is_set():
                raise
            return EtcdMember(endpoint.address)

    async def protect(self, user: str, member: str, prefix: str) -> None:
        """Turn on etcd's access control for users that certificates name (`protect`). Afterwards
        only `root` may do this.
        """
        await protect(self._calls, user, member, *self._converter.span(prefix, is_prefix=True))

    async def close(self) -> None:
        """Close the store. Calls in progress fail."""
        await self._channels.close()
