"""A replica is removed only if a majority of those that stay answers; a dry run says so, too."""

from __future__ import annotations

import asyncio
import os

import pytest
from support import cli_process

from qmq.errors import NoQuorum
from qmq.testing import TestCluster


async def test_the_wrong_one_of_two_voters_is_not_removed_while_the_third_is_dead() -> None:
    async with TestCluster(brokers=3, delay=False) as cluster:
        mq = cluster.client()
        await mq.send("s", b"before")
        healthy, dead = (
            name for name in cluster.names if name.startswith("broker") and name != cluster.master()
        )
        await cluster.kill(dead)
        refused = await refusal(cluster, healthy)
        assert f"would not answer: {dead}" in refused
        assert f"Remove {dead} instead" in refused
        environment = {**os.environ, "QMQ_SERVER": cluster.address}
        words = ("replica", "remove", "group-1", healthy, "--dry-run")
        dry = await asyncio.to_thread(cli_process.run, words, environment)
        assert (dry.returncode, b"would not answer" in dry.stderr.replace(b"\n", b" ")) == (
            3,
            True,
        ), dry
        await mq.send("s", b"after")
        left = await mq.metadata.remove_replica("group-1", dead)
        assert sorted(left.voters) == sorted({healthy, cluster.master()})
        await mq.send("s", b"of two")


async def refusal(cluster: TestCluster, name: str) -> str:
    """The answer when the master has noticed that a voter is silent."""
    mq = cluster.client()
    async with asyncio.timeout(60):
        while True:
            found = await mq.metadata.cluster()
            if all(
                each.is_present == each.HasField("status") for each in found.groups[0].replicas
            ) and any(not each.HasField("status") for each in found.groups[0].replicas):
                break
            await asyncio.sleep(0.05)
    with pytest.raises(NoQuorum) as told:
        await mq.metadata.remove_replica("group-1", name)
    return told.value.message
