"""etcd's own users: from then on a client's certificate decides which keys it may touch.

etcd runs with --client-cert-auth, and takes the common name of a client's certificate for the name of its user. So users have no
passwords here: `root` may do everything, one user may read and write the keys under a prefix, and nobody else may do anything. The members
show each other certificates, too; their user exists for their health checks, which etcd would log as errors otherwise.

Each step may be repeated, so a run that broke off is begun again.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Final

from qmq.proto.etcd import etcd_pb2 as pb
from qmq_coordination.etcd.etcd_calls import EtcdCalls
from qmq_coordination.etcd.etcd_methods import AUTH_ENABLE, ROLE_ADD, ROLE_GRANT_PERMISSION, USER_ADD, USER_GRANT_ROLE
from qmq_coordination.etcd.failures import UserOrRoleExists

ROOT: Final = "root"
"""The name of etcd's almighty user, and of its role, which is always there."""


async def protect(calls: EtcdCalls, user: str, member: str, key: bytes, range_end: bytes) -> None:
    """Make the users and the role, and turn access control on. Raises CoordinationError, CoordinationUnavailable."""
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
