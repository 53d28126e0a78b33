"""Django's tasks on QMQ. Most tests are those of Django 6 for its backends (its tests/tasks),
adapted to a worker.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

import qmq
import qmq.blocking

django = pytest.importorskip("django", reason="needs Django: pip install 'qmq[django]'")

HERE = Path(__file__).parent
SOON_S = 30
pytestmark = [
    pytest.mark.xdist_group("django"),
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning"),
]


@pytest.fixture(scope="module")
def tasks(project: str) -> Any:
    """The module with the tasks."""
    from django_shop import tasks as found

    return found


@pytest.fixture(scope="module")
def backend(tasks: Any) -> Any:
    from qmq.integrations.django.task_api import task_backends

    return task_backends["default"]


@pytest.fixture(scope="module")
def worker(backend: Any, address: str) -> Iterator[None]:
    """Runs the tasks of the queue `default`, as the command does."""
    from qmq.integrations.django.subject_listeners import with_connections
    from qmq.integrations.django.task_worker import handle

    with qmq.blocking.connect(address, state_dir=False) as mq:
        mq.listen(
            backend.subject("default"), with_connections(handle), backend.group, concurrency=2
        )
        thread = threading.Thread(target=mq.run)
        thread.start()
        yield
        mq.stop()
        thread.join()


def finished(result: Any) -> Any:
    deadline = time.monotonic() + SOON_S
    while not result.is_finished:
        assert time.monotonic() < deadline, f"the task is {result.status} after {SOON_S} s"
        result.refresh()
    return result


def records() -> Any:
    from qmq.integrations.django.models import TaskRecord

    return TaskRecord.objects


@pytest.mark.parametrize("name", ["nothing", "nothing_async"])
def test_a_task_waits_until_a_worker_has_run_it(tasks: Any, worker: None, name: str) -> None:
    task = getattr(tasks, name)
    result = task.enqueue(1, two=3)
    assert (result.status, result.started_at, result.finished_at, result.attempts) == (
        "READY",
        None,
        None,
        0,
    )
    with pytest.raises(ValueError, match="has not finished yet"):
        _ = result.return_value
    assert (result.task, result.args, result.kwargs) == (task, [1], {"two": 3})
    finished(result)
    assert result.status == "SUCCESSFUL"
    assert result.return_value is None
    assert result.enqueued_at <= result.started_at == result.last_attempted_at <= result.finished_at
    assert result.attempts == 1


def test_a_coroutine_enqueues_a_task_and_gets_its_result(
    tasks: Any, worker: None, backend: Any
) -> None:
    async def enqueue_and_wait() -> Any:
        result = await tasks.meaning_of_life.aenqueue()
        async with asyncio.timeout(SOON_S):
            while not result.is_finished:
                await result.arefresh()
        assert await backend.aget_result(result.id) == result
        return result.return_value

    assert asyncio.run(enqueue_and_wait()) == 42


@pytest.mark.parametrize(
    ("name", "error"), [("value_error", ValueError), ("system_exit", SystemExit)]
)
def test_a_task_that_raises_has_failed_with_its_traceback(
    tasks: Any, worker: None, name: str, error: type, caplog: Any
) -> None:
    result = finished(getattr(tasks, name).enqueue())
    assert result.status == "FAILED"
    with pytest.raises(ValueError, match="Task failed"):
        _ = result.return_value
    (told,) = result.errors
    assert told.exception_class is error
    assert "this task failed" in told.traceback
    assert result.started_at <= result.finished_at


def test_a_task_whose_result_is_not_json_has_failed(tasks: Any, worker: None) -> None:
    result = finished(tasks.returns_no_json.enqueue())
    assert result.status == "FAILED"
    with pytest.raises(ValueError, match="Task failed"):
        _ = result.return_value
    assert result.errors[0].exception_class is TypeError
    assert "Unsupported type" in result.errors[0].traceback


def test_a_task_is_given_its_context(tasks: Any, worker: None) -> None:
    result = finished(tasks.own_id.enqueue(1))
    assert result.return_value == result.id


def test_a_result_is_found_by_its_id_and_its_task(tasks: Any, backend: Any, worker: None) -> None:
    from qmq.integrations.django.task_api import TaskResultDoesNotExist

    result = finished(tasks.nothing.enqueue())
    assert tasks.nothing.get_result(result.id) == result == backend.get_result(result.id)
    with pytest.raises(Exception, match="does not match"):
        tasks.meaning_of_life.get_result(result.id)
    with pytest.raises(TaskResultDoesNotExist):
        backend.get_result("123")


def test_unsupported_options_are_refused_before_the_task_is_stored(tasks: Any) -> None:
    from datetime import datetime

    before = records().count()
    with pytest.raises(TypeError, match="Unsupported type"):
        tasks.nothing.enqueue(datetime.now())
    with pytest.raises(Exception, match="'queue-2' is not valid"):
        tasks.nothing.using(queue_name="queue-2")
    with pytest.raises(Exception, match="priority"):
        tasks.nothing.using(priority=1)
    with pytest.raises(Exception, match="must be an aware datetime"):
        tasks.nothing.using(run_after=datetime.now())
    assert records().count() == before


def test_signals_tell_of_a_task_that_is_enqueued_begins_and_ends(tasks: Any, worker: None) -> None:
    from qmq.integrations.django.task_api import task_enqueued, task_finished, task_started

    told: list[tuple[str, str]] = []

    def receive(sender: Any, task_result: Any, **kwargs: Any) -> None:
        told.append((task_result.id, task_result.status))

    for each in (task_enqueued, task_started, task_finished):
        each.connect(receive)
    try:
        result = finished(tasks.nothing.enqueue())
        while len(told) < 3:
            assert told
    finally:
        for each in (task_enqueued, task_started, task_finished):
            each.disconnect(receive)
    # The worker may begin before `enqueue` has told its own receivers.
    assert (result.id, "READY") in told
    assert [each for each in told if each[1] != "READY"] == [
        (result.id, "RUNNING"),
        (result.id, "SUCCESSFUL"),
    ]


@pytest.mark.parametrize("has_outbox", [True, False])
def test_a_task_is_rolled_back_with_the_transaction(
    tasks: Any, worker: None, has_outbox: bool
) -> None:
    from django.conf import settings
    from django.db import transaction
    from django.test import override_settings

    with override_settings(QMQ={**settings.QMQ, "OUTBOX": has_outbox}):
        with pytest.raises(ZeroDivisionError), transaction.atomic():
            lost = tasks.nothing.enqueue()
            raise ZeroDivisionError
        with transaction.atomic():
            kept = tasks.nothing.enqueue()
        finished(kept)
    assert not records().filter(id=lost.id).exists()


def test_a_task_that_runs_after_a_time_is_a_delayed_message(
    tasks: Any, worker: None, backend: Any
) -> None:
    from django.utils import timezone

    from qmq.integrations.django import client

    now = timezone.now()
    soon = tasks.meaning_of_life.using(run_after=now + timedelta(seconds=1)).enqueue()
    much_later = tasks.meaning_of_life.using(run_after=now + timedelta(days=365)).enqueue()
    finished(soon)
    assert soon.started_at >= now + timedelta(seconds=1)
    waiting = [each.due for each in client().delayed.list(backend.subject("default"))]
    assert [abs(each - much_later.task.run_after) < timedelta(seconds=1) for each in waiting] == [
        True
    ]


def test_a_finished_task_does_not_run_again_and_a_broken_one_does(tasks: Any, backend: Any) -> None:
    from django.utils import timezone

    from qmq.integrations.django.task_backend import set_started
    from qmq.integrations.django.task_worker import handle

    class Message:
        def __init__(self, identifier: str) -> None:
            self.body = identifier.encode()

    result = tasks.own_id.using(queue_name="queue-1").enqueue(2)
    record = records().get(id=result.id)
    set_started(record, "a worker that died", timezone.now())
    record.save()
    for _ in range(2):
        handle(Message(result.id))  # type: ignore[arg-type]
    result.refresh()
    assert (result.status, result.attempts) == ("SUCCESSFUL", 2)
    handle(Message(32 * "d"))  # type: ignore[arg-type]  # its row was deleted
    with pytest.raises(qmq.Reject):
        handle(Message("of another program"))  # type: ignore[arg-type]


def test_a_path_that_names_no_task_is_not_run(project: str, backend: Any) -> None:
    from django.core.exceptions import SuspiciousOperation
    from django.utils import timezone

    for path, error in (
        ("django_shop.tasks.not_a_task", SuspiciousOperation),
        ("missing.function", ImportError),
    ):
        row = records().create(
            id=uuid4().hex,
            task_path=path,
            queue_name="default",
            backend="default",
            status="READY",
            enqueued_at=timezone.now(),
        )
        with pytest.raises(error):
            backend.get_result(row.id)


def test_the_check_tells_of_an_option_that_does_not_exist(backend: Any) -> None:
    from django.test import override_settings

    from qmq.integrations.django.task_backend import TaskBackend

    assert list(backend.check()) == []
    with override_settings(INSTALLED_APPS=[]):
        found = [each.id for each in TaskBackend("other", {"OPTIONS": {"topic": "x"}}).check()]
    assert found == ["qmq.E002", "qmq.E003"]


@pytest.mark.sampled
def test_the_command_runs_the_tasks_of_a_queue(project: str, tasks: Any) -> None:
    result = tasks.meaning_of_life.using(queue_name="queue-1").enqueue()
    command = [sys.executable, str(HERE / "django_project.py"), "qmq_tasks", "--queue", "queue-1"]
    with subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": str(HERE)}, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "tasks of queue-1 run\n"
        assert finished(result).return_value == 42
        process.send_signal(signal.SIGTERM)
        assert process.wait(SOON_S) == 0
