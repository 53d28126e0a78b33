"""Results of tasks, as rows of the table `qmq_task` and as Django's `TaskResult`."""

from __future__ import annotations

from datetime import datetime
from traceback import format_exception
from typing import Any

from django.core.exceptions import SuspiciousOperation
from django.utils.module_loading import import_string

from qmq.integrations.django.models import TaskRecord
from qmq.integrations.django.task_api import Task, TaskError, TaskResult, TaskResultStatus


def task_of(record: TaskRecord) -> Any:
    """The task of a row. Raises ImportError if this process does not have it, SuspiciousOperation if the path names something else."""
    found = import_string(record.task_path)
    if not isinstance(found, Task):
        raise SuspiciousOperation(f"task {record.id}: {record.task_path} is not a task")
    return found.using(queue_name=record.queue_name, run_after=record.run_after, backend=record.backend)


def result_of(record: TaskRecord, task: Any) -> Any:
    """The row as Django's TaskResult."""
    result: Any = TaskResult(
        task=task,
        id=record.id,
        status=TaskResultStatus(record.status),
        enqueued_at=record.enqueued_at,
        started_at=record.started_at,
        finished_at=record.finished_at,
        last_attempted_at=record.last_attempted_at,
        args=record.args,
        kwargs=record.kwargs,
        backend=record.backend,
        errors=[TaskError(**each) for each in record.errors],
        worker_ids=list(record.worker_ids),
    )
    object.__setattr__(result, "_return_value", record.return_value)
    return result


def set_started(record: TaskRecord, worker: str, now: datetime) -> None:
    """Record the beginning of an attempt."""
    record.status = TaskResultStatus.RUNNING.value
    record.started_at = record.started_at or now
    record.last_attempted_at = now
    record.worker_ids = [*record.worker_ids, worker]


def set_successful(record: TaskRecord, value: Any, now: datetime) -> None:
    record.status, record.return_value, record.finished_at = TaskResultStatus.SUCCESSFUL.value, value, now


def set_failed(record: TaskRecord, error: BaseException, now: datetime) -> None:
    kind = type(error)
    told = {"exception_class_path": f"{kind.__module__}.{kind.__qualname__}", "traceback": "".join(format_exception(error))}
    record.status, record.errors, record.finished_at = TaskResultStatus.FAILED.value, [*record.errors, told], now
