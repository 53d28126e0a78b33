"""etcd's RPCs by path. The server sees only the path, so this client needs no generated stubs, which could collide with another
library's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Generic, Protocol, Self, TypeVar

from google.protobuf.message import Message

from qmq.proto.etcd import etcd_pb2 as pb


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
DELETE_RANGE: Final = Method("/etcdserverpb.KV/DeleteRange", pb.DeleteRangeRequest, pb.DeleteRangeResponse)
TXN: Final = Method("/etcdserverpb.KV/Txn", pb.TxnRequest, pb.TxnResponse)
COMPACT: Final = Method("/etcdserverpb.KV/Compact", pb.CompactionRequest, pb.CompactionResponse)
WATCH: Final = Method("/etcdserverpb.Watch/Watch", pb.WatchRequest, pb.WatchResponse)
LEASE_GRANT: Final = Method("/etcdserverpb.Lease/LeaseGrant", pb.LeaseGrantRequest, pb.LeaseGrantResponse)
LEASE_REVOKE: Final = Method("/etcdserverpb.Lease/LeaseRevoke", pb.LeaseRevokeRequest, pb.LeaseRevokeResponse)
LEASE_KEEP_ALIVE: Final = Method("/etcdserverpb.Lease/LeaseKeepAlive", pb.LeaseKeepAliveRequest, pb.LeaseKeepAliveResponse)
AUTHENTICATE: Final = Method("/etcdserverpb.Auth/Authenticate", pb.AuthenticateRequest, pb.AuthenticateResponse)
USER_ADD: Final = Method("/etcdserverpb.Auth/UserAdd", pb.AuthUserAddRequest, pb.AuthResponse)
USER_GRANT_ROLE: Final = Method("/etcdserverpb.Auth/UserGrantRole", pb.AuthUserGrantRoleRequest, pb.AuthResponse)
ROLE_ADD: Final = Method("/etcdserverpb.Auth/RoleAdd", pb.AuthRoleAddRequest, pb.AuthResponse)
ROLE_GRANT_PERMISSION: Final = Method("/etcdserverpb.Auth/RoleGrantPermission", pb.AuthRoleGrantPermissionRequest, pb.AuthResponse)
AUTH_ENABLE: Final = Method("/etcdserverpb.Auth/AuthEnable", pb.AuthEnableRequest, pb.AuthResponse)
STATUS: Final = Method("/etcdserverpb.Maintenance/Status", pb.StatusRequest, pb.StatusResponse)
