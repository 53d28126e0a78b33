"""The compose file's delay group as scripts/cluster runs it: founded, led, killed, started again;
without a metaserver or a broker.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from system.group import CONTROL_PORT, ETCD, ETCD_USERS, SECURE, Cluster, master_at, papers_of

from qmq.rpc.network import NETWORK
from qmq.rpc.tls_network import network_of

pytestmark = pytest.mark.xdist_group("faults")

DELAYS = ("d1-a", "d1-b", "d1-c")


async def test_the_delay_group_of_the_compose_file_survives_a_kill_of_its_master(
    tmp_path: Path,
) -> None:
    times = {"QMQ_ETCD_HEARTBEAT_MS": "50", "QMQ_ETCD_ELECTION_MS": "500"}
    with Cluster(tmp_path / "cluster", environment=times, secure=SECURE) as cluster:
        await asyncio.to_thread(
            cluster.up, (*ETCD, *(ETCD_USERS if SECURE else ()), *DELAYS), deps=False
        )
        network = network_of(papers_of(tmp_path / "cluster", "admin")) if SECURE else NETWORK
        controls = {name: f"{cluster.address(name)}:{CONTROL_PORT}" for name in DELAYS}
        first = await master_at(controls, network)
        cluster.kill(first)
        assert await master_at(controls, network, other_than=first) != first
        await asyncio.to_thread(cluster.start, first)
        states = {each.service: each.state for each in cluster.status()}
        assert {name: states[name] for name in (*ETCD, *DELAYS)} == dict.fromkeys(
            (*ETCD, *DELAYS), "running"
        )
        assert states["g1-a"] == states["meta0"] == "absent"
