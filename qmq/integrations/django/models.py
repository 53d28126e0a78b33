"""The outbox's table, as the admin sees it (`qmq.sql` reads and writes the table by its own
statements), and the table of tasks.
"""

from __future__ import annotations

from typing import Final

from django.db import models

from qmq.integrations.django.task_ids import ID_CHARS
from qmq.sql.outbox_tables import ASIDE, TABLE, WAITING

STATES: Final = ((WAITING, "waiting"), (ASIDE, "set aside"))


class OutboxEntry(models.Model):
    """A message of a committed transaction that is not sent yet."""

    id = models.BigAutoField(primary_key=True)
    message_id = models.BinaryField()
    subject = models.CharField(max_length=127)
    message_key = models.BinaryField(null=True)
    tags = models.TextField(null=True)
    headers = models.TextField(null=True)
    body = models.BinaryField()
    due_ms = models.BigIntegerField(null=True)
    create_time_ms = models.BigIntegerField()
    content_bytes = models.BigIntegerField()
    state = models.SmallIntegerField(choices=STATES)
    attempts = models.IntegerField()
    claimed_by = models.CharField(max_length=200)
    claimed_until = models.BigIntegerField()
    last_error = models.TextField(null=True)

    class Meta:
        managed = False  # the migration has qmq.sql's own statements
        db_table = TABLE
        verbose_name = "message in the outbox"
        verbose_name_plural = "messages in the outbox"

    def __str__(self) -> str:
        return f"{self.subject} {bytes(self.message_id).hex()}"


class TaskRecord(models.Model):
    """A task of `django.tasks` and its result. Rows stay until the project deletes them."""

    id = models.CharField(max_length=ID_CHARS, primary_key=True)
    task_path = models.TextField()
    queue_name = models.CharField(max_length=127)
    backend = models.CharField(max_length=127)
    run_after = models.DateTimeField(null=True)
    args = models.JSONField(default=list)
    kwargs = models.JSONField(default=dict)
    status = models.CharField(max_length=10)
    enqueued_at = models.DateTimeField(db_index=True)
    started_at = models.DateTimeField(null=True)
    finished_at = models.DateTimeField(null=True)
    last_attempted_at = models.DateTimeField(null=True)
    return_value = models.JSONField(null=True)
    errors = models.JSONField(default=list)
    worker_ids = models.JSONField(default=list)

    class Meta:
        db_table = "qmq_task"
        verbose_name = "task"

    def __str__(self) -> str:
        return f"{self.task_path} {self.id}"
