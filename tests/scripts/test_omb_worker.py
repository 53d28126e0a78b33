"""tools/omb_worker.py, asked in the order in which the coordinator of the OpenMessaging Benchmark
asks its workers.
"""

from __future__ import annotations

import base64
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hdrh.histogram import HdrHistogram
from support import NodeProcess

sys.path.append(str(Path(__file__).parents[2] / "tools" / "openmessaging"))

from pace import Pace, keys_of
from worker_stats import END_TO_END_US_MAX, Latencies, WorkerStats, encoded

ROOT = Path(__file__).parents[2]
PAYLOADS = [b"a" * 100, b"b" * 100]


@pytest.fixture
def worker() -> Iterator[httpx.Client]:
    """A worker in a separate process."""
    command = [sys.executable, str(ROOT / "tools" / "omb_worker.py"), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        address = process.stdout.readline().split()[-1]
        with httpx.Client(base_url=address, timeout=60) as client:
            yield client
    finally:
        process.terminate()
        assert process.wait() == 0
        process.stdout.close()


def post(worker: httpx.Client, path: str, body: Any = None) -> Any:
    answer = worker.post(path, json=body) if body is not None else worker.post(path)
    assert answer.status_code == 200, answer.text
    return answer.json() if answer.content else None


def received(worker: httpx.Client, count: int) -> None:
    """Ask until as many messages were consumed."""
    while worker.get("/counters-stats").json()["messagesReceived"] < count:
        pass


def counts_of(text: str) -> int:
    return int(HdrHistogram.decode(text.encode()).get_total_count())


@pytest.mark.parametrize("is_ordered", [False, True])
def test_a_worker_does_the_work_of_a_whole_benchmark(
    worker: httpx.Client, node_process: NodeProcess, is_ordered: bool
) -> None:
    driver = (
        "name: QMQ\ndriverClass: of.another.Worker\nserver: "
        f"{node_process.start()}\ntopicNamePrefix: omb\nordered: {is_ordered}\n"
    )
    assert worker.post("/initialize-driver", content=driver).status_code == 200
    topics = post(worker, "/create-topics", {"numberOfTopics": 2, "numberOfPartitionsPerTopic": 4})
    assert [each[:4] for each in topics] == ["omb-"] * 2
    groups = [{"topic": topic, "subscription": group} for topic in topics for group in ("g1", "g2")]
    post(worker, "/create-consumers", {"topicsSubscriptions": groups})
    post(worker, "/create-producers", [*topics, topics[0]])
    post(worker, "/probe-producers")
    received(worker, 6)
    load = {
        "publishRate": 2_000.0,
        "keyDistributorType": "RANDOM_NANO",
        "payloadData": [base64.b64encode(each).decode() for each in PAYLOADS],
    }
    post(worker, "/start-load", load)
    received(worker, 2_000)
    post(worker, "/pause-consumers")
    post(worker, "/adjust-publish-rate", 50_000.0)
    post(worker, "/resume-consumers")
    received(worker, 4_000)
    period = worker.get("/period-stats").json()
    assert period["messageSendErrors"] == period["totalMessageSendErrors"] == 0
    assert period["bytesSent"] == period["messagesSent"] * 100
    assert period["bytesReceived"] == period["messagesReceived"] * 100 - 6 * 90
    assert (
        counts_of(period["publishLatency"])
        == counts_of(period["publishDelayLatency"])
        == period["messagesSent"]
    )
    assert 0 < counts_of(period["endToEndLatency"]) <= period["messagesReceived"]
    assert (
        counts_of(worker.get("/cumulative-latencies").json()["publishLatency"])
        >= period["messagesSent"]
    )
    post(worker, "/reset-stats")
    post(worker, "/stop-all")
    assert worker.get("/counters-stats").json() == {
        "messagesSent": 0,
        "messageSendErrors": 0,
        "messagesReceived": 0,
    }


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        (
            "/create-topics",
            b'{"numberOfTopics": 1, "numberOfPartitionsPerTopic": 1}',
            "POST /initialize-driver",
        ),
        ("/initialize-driver", b"- a list", "a driver's file is a mapping"),
        ("/start-load", b'{"payloadData": [], "publishRate": 1}', "needs payloads"),
        ("/adjust-publish-rate", b"fast", "could not convert"),
    ],
)
def test_a_wrong_call_is_answered_with_what_is_wrong(
    worker: httpx.Client, path: str, body: bytes, said: str
) -> None:
    answer = worker.post(path, content=body)
    assert (answer.status_code, said in answer.text) == (400, True), answer.text


def test_what_could_not_be_sent_in_time_is_sent_late_and_not_left_out() -> None:
    pace = Pace(1_000.0, 0)
    assert pace.due(0, 10) == [0]
    assert pace.due(500_000, 10) == []
    assert pace.due(5_000_000, 3) == [1_000_000, 2_000_000, 3_000_000]
    assert pace.due(5_000_000, 3) == [4_000_000, 5_000_000]


def test_keys_are_as_the_workload_says() -> None:
    drawn = {
        kind: keys_of(kind, random.Random(1))
        for kind in ("NO_KEY", "KEY_ROUND_ROBIN", "RANDOM_NANO")
    }
    first = {kind: [next(keys) for _ in range(20_000)] for kind, keys in drawn.items()}
    assert [len(set(each)) for each in first.values()][:2] == [1, 10_000]
    assert 8_000 < len(set(first["RANDOM_NANO"])) <= 10_000
    with pytest.raises(ValueError, match="one of NO_KEY"):
        keys_of("SOME", random.Random(1))


def test_a_worker_without_producers_takes_part_in_a_load(
    worker: httpx.Client, node_process: NodeProcess
) -> None:
    assert (
        worker.post("/initialize-driver", content=f"server: {node_process.start()}\n").status_code
        == 200
    )
    post(worker, "/create-producers", [])
    post(worker, "/create-consumers", {"topicsSubscriptions": []})
    post(worker, "/probe-producers")
    post(
        worker,
        "/start-load",
        {
            "publishRate": 1_000.0,
            "keyDistributorType": "NO_KEY",
            "payloadData": [base64.b64encode(b"a").decode()],
        },
    )
    post(worker, "/adjust-publish-rate", 2_000.0)
    assert worker.get("/period-stats").json()["messagesSent"] == 0
    post(worker, "/stop-all")


def test_latencies_are_counted_once_a_period_and_once_in_total() -> None:
    latencies = Latencies()
    latencies.add("endToEndLatency", (5, 5, END_TO_END_US_MAX + 1))
    taken = HdrHistogram.decode(latencies.period()["endToEndLatency"].encode())
    assert (taken.get_total_count(), taken.get_count_at_value(5)) == (3, 2)
    assert taken.get_max_value() >= END_TO_END_US_MAX
    latencies.add("endToEndLatency", (6,))
    assert counts_of(latencies.total()["endToEndLatency"]) == 4
    assert counts_of(latencies.period()["endToEndLatency"]) == 1
    assert (
        counts_of(latencies.total()["endToEndLatency"])
        == counts_of(encoded(Counter(), END_TO_END_US_MAX))
        == 0
    )


def test_end_to_end_latencies_are_whole_milliseconds_above_zero() -> None:
    stats = WorkerStats()
    for latency_ms in (0, 1, 3):
        stats.received(100, latency_ms)
    period = stats.period()
    taken = HdrHistogram.decode(period["endToEndLatency"].encode())
    assert (period["messagesReceived"], taken.get_total_count()) == (3, 2)
    assert [taken.get_count_at_value(us) for us in (1_000, 3_000)] == [1, 1]
