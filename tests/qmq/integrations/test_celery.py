"""Celery on QMQ: a real worker process with a pool of processes, and the scenarios of Celery's
smoke tests.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import ModuleType
from typing import Any
from uuid import uuid4

import pytest

celery = pytest.importorskip("celery", reason="needs Celery: pip install 'qmq[celery]'")

import qmq.blocking  # noqa: E402

pytestmark = [
    pytest.mark.sampled,
    pytest.mark.xdist_group("celery"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning"),
]
HERE = Path(__file__).parent
CELERY = (sys.executable, "-m", "celery", "-A", "celery_app")
SOON_S = 300


@pytest.fixture(scope="module")
def environment(address: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    results = tmp_path_factory.mktemp("results")
    return {
        "QMQ_TEST_BROKER": f"qmq://{address}",
        "QMQ_TEST_RESULTS": f"file://{results}",
        "QMQ_TEST_QUEUE": f"tasks-{uuid4().hex[:8]}",
        "PYTHONPATH": str(HERE),
    }


@pytest.fixture(scope="module")
def tasks(environment: dict[str, str]) -> Iterator[ModuleType]:
    patch = pytest.MonkeyPatch()
    for name, value in environment.items():
        patch.setenv(name, value)
    patch.syspath_prepend(str(HERE))
    import celery_app

    yield celery_app
    celery_app.app.close()
    patch.undo()


def worker_process(
    environment: dict[str, str], log: Path, *options: str
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*CELERY, "worker", "-c", "2", "-l", "INFO", *options],
        env={**os.environ, **environment},
        stdout=log.open("wb"),
        stderr=subprocess.STDOUT,
        cwd=HERE,
    )


@pytest.fixture(scope="module")
def worker(
    environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[subprocess.Popen[bytes]]:
    log = tmp_path_factory.mktemp("worker") / "log"
    process = worker_process(environment, log, "-n", "one@here")
    # A fan-out is for the queues that are bound when it is sent: a worker that still starts never
    # gets a control message sent now.
    while b"one@here ready." not in log.read_bytes():
        assert process.poll() is None, log.read_text()
        time.sleep(0.02)
    yield process
    process.send_signal(signal.SIGTERM)
    assert process.wait(SOON_S) == 0, log.read_text()


@pytest.fixture
def mq(address: str) -> Iterator[qmq.blocking.BlockingClient]:
    with qmq.blocking.connect(address, state_dir=False) as client:
        yield client


async def allow_attempts(address: str, queue: str, attempts_max: int) -> None:
    async with qmq.connect(address, state_dir=False) as mq:
        await mq.metadata.set_group_settings(queue, queue, attempts_max=attempts_max)


async def dead_letter(address: str, queue: str, task: str) -> Any:
    """The dead letter of a task."""
    async with qmq.connect(address, state_dir=False) as mq:
        while not (
            found := [
                each
                for each in await mq.dead_letters(queue).show(1000)
                if each.key == task.encode()
            ]
        ):
            await asyncio.sleep(0.05)
        return found[0]


@pytest.mark.usefixtures("worker")
class TestWorker:
    def test_a_task_runs_and_its_result_comes_back(self, tasks: ModuleType) -> None:
        assert tasks.add.delay(1, 2).get(timeout=SOON_S) == 3

    def test_a_message_that_is_no_task_ends_no_worker(
        self, tasks: ModuleType, mq: qmq.blocking.BlockingClient, environment: Any
    ) -> None:
        queue = environment["QMQ_TEST_QUEUE"]
        kinds = {
            "content-type": "application/json",
            "content-encoding": "utf-8",
            "properties": {"delivery_info": {}},
        }
        task = json.dumps({**kinds, "headers": {"task": "celery_app.add", "id": "odd"}})
        first = json.dumps({**kinds, "headers": {}})
        begun = "celery_app.add"
        limited = json.dumps(
            {**kinds, "headers": {"task": begun, "id": "odd", "timelimit": [10**400, 10**400]}}
        )
        stamped = json.dumps(
            {**kinds, "headers": {"task": begun, "id": "odd", "stamped_headers": 5}}
        )
        bodies = (
            *[
                {"task": [], "id": {}},
                {"task": begun, "id": {}},
                {"task": begun, "id": "1", "timelimit": [10**400, 1], "args": [1, 2]},
            ],
            *[{"task": begun, "id": "2", "stamped_headers": 5, "args": [1, 2]}] * 2,
        )
        for header, body in (
            *[
                ("[]", b""),
                ('{"properties": null}', b""),
                (task, b"5"),
                (task, b"[1]"),
                (task, b'[[1, 2], {}, {"stamped_headers": 5}]'),
            ],
            *[(limited, b"[[1, 2], {}, {}]"), *[(stamped, b"[[1, 2], {}, {}]")] * 2],
            *[(first, json.dumps(each).encode()) for each in bodies],
        ):
            mq.send(queue, body, headers={"kombu": header})
        assert tasks.add.delay(1, 2).get(timeout=SOON_S) == 3

    def test_chains_groups_and_chords(self, tasks: ModuleType) -> None:
        canvas = celery.chain(tasks.add.s(1, 1), celery.group(tasks.add.s(n) for n in range(5)))
        assert canvas().get(timeout=SOON_S) == [2, 3, 4, 5, 6]
        assert (
            celery.chord([tasks.add.s(n, n) for n in range(3)], tasks.add.si(7, 7))().get(
                timeout=SOON_S
            )
            == 14
        )

    def test_a_task_that_retries_succeeds_later(self, tasks: ModuleType) -> None:
        assert tasks.fails_once.delay().get(timeout=SOON_S) == 1

    def test_a_task_that_raises_hands_its_error_back(self, tasks: ModuleType) -> None:
        with pytest.raises(ValueError, match="as it should"):
            tasks.fails.delay().get(timeout=SOON_S)

    def test_a_countdown_is_a_delay_of_the_broker_that_no_worker_holds(
        self, tasks: ModuleType
    ) -> None:
        begun = datetime.now(UTC)
        assert tasks.add.apply_async((1, 1), countdown=1).get(timeout=SOON_S) == 2
        assert datetime.now(UTC) - begun >= timedelta(seconds=1)

    def test_a_task_in_a_year_waits_at_the_broker_until_revoke_cancels_it(
        self, tasks: ModuleType, mq: qmq.blocking.BlockingClient, environment: dict[str, str]
    ) -> None:
        queue = environment["QMQ_TEST_QUEUE"]
        result = tasks.add.apply_async((1, 1), countdown=365 * 86_400)
        (pending,) = mq.delayed.list(queue)
        assert pending.key == result.id
        assert pending.due - datetime.now(UTC) > timedelta(days=364)
        assert tasks.app.control.inspect(["one@here"], timeout=SOON_S).scheduled() == {
            "one@here": []
        }
        result.revoke()
        assert list(mq.delayed.list(queue)) == []

    def test_any_process_may_revoke_a_task_that_waits(
        self, tasks: ModuleType, mq: qmq.blocking.BlockingClient, environment: Any
    ) -> None:
        queue = environment["QMQ_TEST_QUEUE"]
        ids = [tasks.add.apply_async((1, 1), countdown=86_400).id for _ in range(2)]
        # Without a destination, celery waits one second for any answer, and fails if no worker was
        # that quick.
        options = ["--destination", "one@here", "--timeout", str(SOON_S)]
        subprocess.run(
            [*CELERY, "control", *options, "revoke", ids[0]],
            env={**os.environ, **environment},
            cwd=HERE,
            check=True,
            capture_output=True,
            timeout=SOON_S,
        )
        assert [each.key for each in mq.delayed.list(queue)] == [ids[1]]
        tasks.app.control.revoke(ids[1])

    def test_remote_control_and_inspection_reach_every_worker(
        self, tasks: ModuleType, environment: dict[str, str]
    ) -> None:
        assert tasks.app.control.ping(["one@here"], timeout=SOON_S) == [
            {"one@here": {"ok": "pong"}}
        ]
        found = tasks.app.control.inspect(["one@here"], timeout=SOON_S)
        assert [each["name"] for each in found.active_queues()["one@here"]] == [
            environment["QMQ_TEST_QUEUE"]
        ]
        assert "celery_app.add" in found.registered()["one@here"]

    def test_a_task_that_kills_its_process_ends_in_the_dead_letter_queue(
        self, tasks: ModuleType, address: str, environment: dict[str, str]
    ) -> None:
        queue = environment["QMQ_TEST_QUEUE"]
        asyncio.run(allow_attempts(address, queue, 2))  # Celery takes seconds to replace a process
        result = tasks.kills_its_process.delay()
        letter = asyncio.run(dead_letter(address, queue, result.id))
        assert letter.attempts == 2
        assert tasks.add.delay(3, 4).get(timeout=SOON_S) == 7

    def test_events_reach_a_monitor(self, tasks: ModuleType) -> None:
        seen: list[str] = []
        with tasks.app.connection_for_read() as connection:
            receiver = tasks.app.events.Receiver(
                connection,
                handlers={"worker-heartbeat": lambda event: seen.append(event["hostname"])},
            )
            receiver.capture(limit=1, timeout=SOON_S)
        assert seen == ["one@here"]


def test_the_tasks_of_a_killed_worker_go_to_the_next_one(
    address: str,
    environment: dict[str, str],
    tasks: ModuleType,
    mq: qmq.blocking.BlockingClient,
    tmp_path: Path,
) -> None:
    queue = f"orphans-{uuid4().hex[:8]}"
    results = [tasks.add.apply_async((n, n), queue=queue) for n in range(20)]
    consumer = mq.consumer(queue, queue, ack="explicit", lease_ms=1_000)
    assert len(consumer.pull(20)) == 20
    process = worker_process(environment, tmp_path / "log", "-Q", queue, "-n", "two@here")
    try:
        consumer.close()
        assert [each.get(timeout=SOON_S) for each in results] == [2 * n for n in range(20)]
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(SOON_S) == 0, (tmp_path / "log").read_text()
