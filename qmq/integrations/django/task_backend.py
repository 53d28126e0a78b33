"""A backend for Django's tasks: a task is a message with the id of a row in the table `qmq_task`,
which gets the result.

The row and the message commit in one transaction, by the outbox. A task with `run_after` is a
delayed message, which no worker holds. A worker records the end of a task before it acknowledges
the message: if the worker dies in between, another one gets the message, finds the task finished
and does not run it again. If the worker dies while a task runs, another one runs the task from its
beginning.

Results are rows of the table `qmq_task`, and Django's `TaskResult`.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from functools import partial
from traceback import format_exception
from typing import Any, Final

from django.apps import apps
from django.core import checks
from django.core.exceptions import SuspiciousOperation
from django.db import router, transaction
from django.utils import timezone
from django.utils.crypto import get_random_string
from django.utils.module_loading import import_string

from qmq.integrations.django.models import TaskRecord
from qmq.integrations.django.sending import SiteSettings, send
from qmq.integrations.django.task_api import (
    BaseTaskBackend,
    Task,
    TaskError,
    TaskResult,
    TaskResultDoesNotExist,
    TaskResultStatus,
    normalize_json,
    task_enqueued,
)
from qmq.integrations.django.task_ids import ID_CHARS


def task_of(record: TaskRecord) -> Any:
    """The task of a row. Raises ImportError if this process does not have it, SuspiciousOperation
    if the path names something else.
    """
    found = import_string(record.task_path)
    if not isinstance(found, Task):
        raise SuspiciousOperation(f"task {record.id}: {record.task_path} is not a task")
    return found.using(
        queue_name=record.queue_name, run_after=record.run_after, backend=record.backend
    )


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
    record.status, record.return_value, record.finished_at = (
        TaskResultStatus.SUCCESSFUL.value,
        value,
        now,
    )


def set_failed(record: TaskRecord, error: BaseException, now: datetime) -> None:
    kind = type(error)
    told = {
        "exception_class_path": f"{kind.__module__}.{kind.__qualname__}",
        "traceback": "".join(format_exception(error)),
    }
    record.status, record.errors, record.finished_at = (
        TaskResultStatus.FAILED.value,
        [*record.errors, told],
        now,
    )


OPTIONS: Final = {"subject", "group"}


class TaskBackend(BaseTaskBackend):
    """`OPTIONS` has `subject`, the prefix of the subjects (one for each queue, SUBJECT.QUEUE), and
    `group`, the workers' consumer group; both are "django-tasks" by default. Priorities are
    refused: a subject has none."""

    supports_defer = True
    supports_async_task = True
    supports_get_result = True
    supports_priority = False

    def __init__(self, alias: str, params: dict[str, Any]) -> None:
        super().__init__(alias, params)
        self.group: str = self.options.get("group", "django-tasks")
        self._prefix: str = self.options.get("subject", "django-tasks")

    def subject(self, queue: str) -> str:
        """The subject of a queue."""
        return f"{self._prefix}.{queue}"

    def enqueue(self, task: Any, args: Any, kwargs: Any) -> Any:
        """Store a task with the current transaction. Raises InvalidTask, TypeError for an argument
        that is not JSON, and as `send`.
        """
        self.validate_task(task)
        record = TaskRecord(
            id=get_random_string(ID_CHARS),
            task_path=task.module_path,
            queue_name=task.queue_name,
            backend=self.alias,
            run_after=task.run_after,
            args=normalize_json(args),
            kwargs=normalize_json(kwargs),
            status=TaskResultStatus.READY.value,
            enqueued_at=timezone.now(),
        )
        self._store(record)
        result = result_of(record, task)
        task_enqueued.send(type(self), task_result=result)
        return result

    def _store(self, record: TaskRecord) -> None:
        using = router.db_for_write(TaskRecord)
        due = record.run_after
        if due is not None and timezone.is_naive(due):
            due = timezone.make_aware(due)
        say = partial(send, self.subject(record.queue_name), record.id, at=due)
        with transaction.atomic(using=using):
            record.save(using=using, force_insert=True)
            if SiteSettings.read().has_outbox:
                say(using=using)
            else:
                transaction.on_commit(say, using=using)

    def get_result(self, result_id: str) -> Any:
        """Raises TaskResultDoesNotExist."""
        record = TaskRecord.objects.filter(id=str(result_id)).first()
        if record is None:
            raise TaskResultDoesNotExist(result_id)
        return result_of(record, task_of(record))

    def check(self, **kwargs: Any) -> Iterable[checks.CheckMessage]:
        """Whether the backend can be used as the settings say."""
        if not apps.is_installed("qmq.integrations.django"):
            yield checks.Error(
                "TASKS: QMQ's backend needs its table",
                hint="add 'qmq.integrations.django' to INSTALLED_APPS",
                id="qmq.E002",
            )
        if set(self.options) - OPTIONS:
            told = ", ".join(sorted(OPTIONS))
            yield checks.Error(
                f"TASKS: the OPTIONS of {self.alias!r} are {told}, not {self.options!r}",
                id="qmq.E003",
            )
