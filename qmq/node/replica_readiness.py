"""The readiness of a role, for /readyz. It is read from memory, so it is cheap."""

from __future__ import annotations

from qmq_replication.core import Replica
from qmq_replication.ready import Role

from qmq.metrics.readiness import Readiness


def of_meta(is_serving: bool) -> Readiness:
    """A metaserver is ready once it has listed the cluster; after that it answers from memory, even while etcd cannot be reached."""
    return Readiness(is_serving, "serving" if is_serving else "starting: it waits for the coordination store")


def of_replica(core: Replica, *, is_serving: bool, has_all: bool = True) -> Readiness:
    """A replica is ready while it serves as master, or has a master and a vote. `has_all`: the replica has all data that it needs."""
    if not has_all:
        return Readiness(False, f"{core.state.role.value}: the schedule is being fetched from another replica")
    if core.state.role is Role.MASTER:
        return Readiness(is_serving, "master" if is_serving else "master: it does not serve yet")
    if core.state.role is not Role.SLAVE or not core.hears_master():
        return Readiness(False, f"{core.state.role.value}: no message from a master")
    if not core.state.may_count:
        return Readiness(False, "slave: it may lack entries that it acknowledged, and is catching up with its master")
    return Readiness(True, "slave")
