"""`qmq bench`, as typed, against a node: its counts are those of the cluster."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from support import NodeProcess

import qmq.blocking
from qmq.cli.bench import percentile
from qmq.errors import InvalidArgument


def measured(node: NodeProcess, *words: str) -> dict[str, float]:
    command = [sys.executable, "-m", "qmq.cli", "bench", *words, "--json", "--server", node.address]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    (found,) = json.loads(done.stdout)
    return dict(found)


@pytest.mark.sampled
def test_published_messages_are_stored_and_consumed(node_process: NodeProcess) -> None:
    node_process.start()
    published = measured(node_process, "pub", "speed", "--messages", "2500", "--size", "10")
    one_by_one = measured(node_process, "pub", "speed", "--messages", "300", "--each")
    assert (published["messages"], one_by_one["messages"]) == (2_500, 300)
    assert published["messages/s"] > 0
    with qmq.blocking.connect(node_process.address) as mq:
        (described,) = mq.metadata.list_subjects("speed")
        assert sum(queue.next_sequence for queue in described.queues) == 2_802, (
            "and one before the clock runs"
        )
    assert measured(node_process, "sub", "speed", "--messages", "500", "--each")["messages"] == 500
    assert measured(node_process, "sub", "speed", "--messages", "2000")["messages"] >= 2_000
    found = measured(node_process, "latency", "speed", "--rate", "200", "--seconds", "0.5")
    assert found["messages"] == 100
    assert 0 < found["p50_us"] <= found["p99_us"] <= found["max_us"]


def test_a_percentile_is_a_value_that_was_measured() -> None:
    assert [percentile(range(1, 101), share) for share in (0.5, 0.99, 1.0)] == [51, 100, 100]
    with pytest.raises(InvalidArgument, match="--seconds"):
        percentile([], 0.5)
