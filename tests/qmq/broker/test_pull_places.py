"""A group's next pull begins in the index where the one before ended: the index's files are
searched once (qmq/broker/dispatch/pull.py).
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support import node_config

import qmq
from qmq.log.consume_log import ConsumeLog
from qmq.node.dev_node import Node

COUNT, BATCH = 2_000, 20


async def test_pulls_one_after_another_search_the_index_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched: list[int] = []
    search = ConsumeLog.find_sequence

    def counted(index: ConsumeLog, sequence: int) -> int:
        searched.append(sequence)
        return search(index, sequence)

    node = Node(node_config(tmp_path))
    await node.start()
    try:
        async with qmq.connect(node.address) as mq:
            for at in range(0, COUNT, BATCH):
                await mq.send_many("s", [b"%d" % number for number in range(at, at + BATCH)])
            monkeypatch.setattr(ConsumeLog, "find_sequence", counted)
            found: list[bytes] = []
            async with mq.consumer("s", "g", prefetch=5 * BATCH - 3) as consumer:
                async for message in consumer:
                    found.append(message.body)
                    if len(found) == COUNT:
                        break
    finally:
        await node.stop()
    assert found == [b"%d" % number for number in range(COUNT)]
    assert len(searched) <= 1
