"""etcd's own users: a client's certificate decides which keys the client may read and write. etcd runs with --client-cert-auth, and uses
the common name of a client's certificate as the name of its user. So users have no passwords here: `root` may do everything, one user may
read and write the keys under a prefix, and no other user may do anything. The members present certificates to each other, too; their user
exists for their health checks, which etcd would otherwise log as errors.

Each step may be repeated, so an interrupted run is repeated from its beginning.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Final

from qmq.proto.etcd import etcd_pb2 as pb
from qmq_coordination.etcd.calls import EtcdCalls, UserOrRoleExists
from qmq_coordination.etcd.channel import AUTH_ENABLE, ROLE_ADD, ROLE_GRANT_PERMISSION, USER_ADD, USER_GRANT_ROLE

ROOT: Final = "root"
"""The name of etcd's administrator, and of its role, which always exist."""


async def protect(calls: EtcdCalls, user: str, member: str, key: bytes, range_end: bytes) -> None:
    """Create the users and the role, and turn on access control. Raises CoordinationError, CoordinationUnavailable."""
    for name in (ROOT, user, member):
        with suppress(UserOrRoleExists):
            await calls.read(USER_ADD, pb.AuthUserAddRequest(name=name, options=pb.UserAddOptions(no_password=True)))
    with suppress(UserOrRoleExists):
        await calls.read(ROLE_ADD, pb.AuthRoleAddRequest(name=user))
    permission = pb.Permission(perm_type=pb.Permission.READWRITE, key=key, range_end=range_end)
    await calls.read(ROLE_GRANT_PERMISSION, pb.AuthRoleGrantPermissionRequest(name=user, perm=permission))
    for name in (ROOT, user):
        await calls.read(USER_GRANT_ROLE, pb.AuthUserGrantRoleRequest(user=name, role=name))
    await calls.read(AUTH_ENABLE, pb.AuthEnableRequest())
