"""A log that ends between two entries does not show that it is short: the commit mark does, and
such a replica judges no election.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest
from damage import cells
from damage.cells import Kind

from qmq.errors import NotConnected
from qmq.log import commit_mark
from qmq.testing import TestCluster, virtual
from qmq.testing.machine import ReplicaMachine

SOON = timedelta(seconds=5)


async def test_a_replica_whose_log_was_cut_short_does_not_elect_one_that_lags() -> None:
    async with TestCluster(brokers=3, delay=False, clock=virtual()) as cluster:
        mq, master = cluster.client(), cluster.master()
        short, lagging = [name for name in cluster.groups["group-1"] if name != master]
        machine = cluster.machine(short)
        assert isinstance(machine, ReplicaMachine)
        assert machine.node is not None
        folder = machine.node.config.data
        await mq.send("orders", b"0")
        heals = [cluster.cut(lagging, each) for each in (master, short)]
        for number in range(1, 6):
            await mq.send("orders", b"%d" % number)
        end = machine.node.broker.store.messages.end
        for _ in range(200):
            mark = commit_mark.read(folder / "broker")
            if mark is not None and mark.message_position == end:
                break
            await asyncio.sleep(0.02)  # the master's next message says what is committed
            await cluster.clock.advance(seconds=1)
        assert mark is not None
        assert mark.message_position == end
        await cluster.kill(short)
        await cluster.kill(master)
        path = cells.files_of(Kind.MESSAGES, folder)[-1]
        cells.cut(path, cells.last_entry(path.read_bytes()))
        for heal in heals:
            heal()
        await cluster.restart(short)
        for _ in range(40):
            await asyncio.sleep(0.05)
            with pytest.raises(NotConnected):
                cluster.master()
        await cluster.restart(master)
        await cluster.until_master()
        async with mq.consumer("orders", "late", ack="explicit") as consumer:
            found: list[bytes] = []
            while len(found) < 6 and (got := await consumer.pull(10, SOON)):
                found += [message.body for message in got]
                await got.ack_sync()
        assert found == [b"%d" % number for number in range(6)]
