"""The identity of a cluster: a random number that the first server writes into the coordination store, and that never changes. A restored
cluster has its own number, because backups leave out `/qmq/meta/`. Each replica keeps the number in its folder: it does not register in
another cluster's store, and `qmq backup rebuild` gives a new store the number that clients know.

    /qmq/meta/cluster    the identity of the cluster, a random number; written once by the first server, and in no backup
        removed by nobody
"""

from __future__ import annotations

import secrets
from typing import Final

from qmq_coordination.coordination_store import CoordinationStore, Put, absent

CLUSTER: Final = "/qmq/meta/cluster"


async def ensure_cluster(store: CoordinationStore, known: str = "") -> str:
    """Write the identity, `known` or a new one, if there is none. Returns it. Raises CoordinationError."""
    await store.txn([absent(CLUSTER)], [Put(CLUSTER, (known or secrets.token_hex(8)).encode())])
    found = await store.get(CLUSTER)
    return "" if found is None else found.value.decode()
