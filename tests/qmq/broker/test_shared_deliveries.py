"""Groups at the same place of a queue share what is found and read for one of them: each gets what
it would get alone (qmq/broker/dispatch/pull.py).
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path

import pytest
from support import ManualClock, node_config
from support.forms import seeds

import qmq
from qmq.broker.dispatch.pull import BatchReader, LaidOut, SharedDelivery, collect, lay_out
from qmq.broker.produce_checks import Destination, read_batch
from qmq.limits import MIB
from qmq.log.actions import Begin, Join, PullAction, SettleAction
from qmq.log.consume_log import IndexEntry
from qmq.log.log_config import LogConfig
from qmq.log.queue import Queue
from qmq.log.recovery import open_store
from qmq.log.store import Store
from qmq.node.dev_node import Node
from qmq.wire.batch import encode, sent_sizes
from qmq.wire.batch_columns import BatchFlag, Columns
from qmq.wire.frame_payloads import Verdict

GROUPS = ("a", "b", "c", "d")


def append(store: Store, queue: Queue, number: int, count: int, group: str) -> None:
    """A batch for one group, or for all."""
    headers: list[Mapping[str, bytes]] | None = (
        [{"qmq-group": group.encode()}] * count if group else None
    )
    flags = BatchFlag.DIRECTED if group else 0
    columns = Columns([b"%d" % number] * count, headers=headers)
    envelope, region = encode(
        b"s", columns, producer_id=7, batch_sequence=number, create_time_ms=1, flags=flags
    )
    destination = Destination(queue, MIB, None)
    store.append([read_batch(region, sent_sizes(envelope)[1], lambda *_: destination)])


@pytest.mark.parametrize("seed", seeds(gate=4, every=20, changing=4))
def test_a_group_gets_what_it_would_get_alone(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    store = open_store(tmp_path, LogConfig(), ManualClock())
    queue = store.open_queue("s", 0)
    shared = SharedDelivery()
    readers = {group: BatchReader(queue) for group in GROUPS}
    for group in GROUPS:
        store.act(Begin("s", 0, group, "", 0))
        store.act(Join("s", 0, group, "c", "i", 1000, -1))
    hits = numbers = 0
    for _ in range(400):
        if draw.random() < 0.3:
            group = draw.choice(GROUPS) if draw.random() < 0.1 else ""
            append(store, queue, numbers, draw.randint(1, 4), group)
            numbers += 1
        if draw.random() < 0.3:
            store.write_actions()
        for group in draw.sample(GROUPS, len(GROUPS)):
            share, reader = queue.share(group), readers[group]
            most = draw.choice((1, 3, 100, 100, 100))
            most_bytes = draw.choice((1, 500, MIB, MIB, MIB))
            found = collect(
                store, BatchReader(queue), group, share, None, most, most_bytes, now_ms=0
            )
            alone = LaidOut(found, *lay_out(store, queue, found))
            sharing = shared.find(store, reader, share, most, most_bytes)
            if sharing is not None:
                hits += 1
                assert sharing == alone
            elif found.pulled:
                collect(store, reader, group, share, None, most, most_bytes, now_ms=0)
                shared.note(store, reader, share.next_sequence, alone)
            if found.pulled:
                pull = share.holders["c"].next_pull
                store.act(PullAction("s", 0, group, "c", tuple(found.pulled)))
                if found.messages and draw.random() < 0.2:
                    failed = ((pull, pull, int(Verdict.NACK), 0),)
                    store.act(SettleAction("s", 0, group, "c", 0, failed))
    store.close()
    assert hits


async def test_a_message_for_many_groups_is_looked_up_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    original = Store.read

    def counted(store: Store, queue: Queue, entry: IndexEntry) -> tuple[bytes, bytes]:
        read.append(entry.base_sequence)
        return original(store, queue, entry)

    monkeypatch.setattr(Store, "read", counted)
    node = Node(node_config(tmp_path))
    await node.start()
    try:
        async with qmq.connect(node.address) as mq:
            await mq.send("s", b"first")
            consumers = [mq.consumer("s", group, start="latest") for group in GROUPS]
            for each in consumers:
                await each.join()
            await mq.send("s", b"second")
            found = [(await anext(aiter(each))).body for each in consumers]
            for each in consumers:
                await each.close()
    finally:
        await node.stop()
    assert found == [b"second"] * len(GROUPS)
    assert read == [1]
