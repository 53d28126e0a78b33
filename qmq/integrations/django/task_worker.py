"""Runs a task and records how it ended."""

from __future__ import annotations

import logging
import os
import socket
from typing import Any

from django.db import router
from django.utils import timezone

import qmq
from qmq.integrations.django.models import TaskRecord
from qmq.integrations.django.task_api import (
    TaskContext,
    normalize_json,
    task_backends,
    task_finished,
    task_started,
)
from qmq.integrations.django.task_backend import (
    result_of,
    set_failed,
    set_started,
    set_successful,
    task_of,
)
from qmq.integrations.django.task_ids import task_id

logger = logging.getLogger(__name__)


def handle(message: qmq.Message) -> None:
    """Run the task that a message names, and acknowledge the message. A task that raises is not run
    again, as in Django's own backends.

    Raises qmq.Reject for a message that no backend sent, and ImportError if this process does not
    have the task's function. Either ends as a dead letter, the latter after the group's attempts.
    """
    identifier = task_id(message.body)
    using = router.db_for_write(TaskRecord)
    record = TaskRecord.objects.using(using).filter(id=identifier).first()
    if record is None:
        logger.warning(
            "task %s is not in the table %s: its row was deleted",
            identifier,
            TaskRecord._meta.db_table,
        )
    elif record.finished_at is None:
        run(record, using)


def run(record: TaskRecord, using: str) -> None:
    """Run a task and record its end. Raises as `task_of`."""
    task = task_of(record)
    sender = type(task_backends[record.backend])
    set_started(record, f"{socket.gethostname()}-{os.getpid()}", timezone.now())
    _save(record, using, "status", "started_at", "last_attempted_at", "worker_ids")
    result = result_of(record, task)
    task_started.send(sender, task_result=result)
    try:
        set_successful(record, normalize_json(_call(task, result)), timezone.now())
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        set_failed(record, error, timezone.now())
        _save(record, using, "status", "errors", "finished_at")
        task_finished.send(
            sender, task_result=result_of(record, task)
        )  # within `except`, so that a receiver can log the exception
    else:
        _save(record, using, "status", "return_value", "finished_at")
        task_finished.send(sender, task_result=result_of(record, task))


def _call(task: Any, result: Any) -> Any:
    if task.takes_context:
        return task.call(TaskContext(task_result=result), *result.args, **result.kwargs)
    return task.call(*result.args, **result.kwargs)


def _save(record: TaskRecord, using: str, *fields: str) -> None:
    """Save fields of an unfinished task. If two workers ran the task, because one was taken for
    dead, the first result is kept.
    """
    values = {field: getattr(record, field) for field in fields}
    TaskRecord.objects.using(using).filter(id=record.id, finished_at=None).update(**values)
