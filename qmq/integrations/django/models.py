"""The outbox's table, as the admin sees it. `qmq.sql` reads and writes the table by its own statements."""

from __future__ import annotations

from typing import Final

from django.db import models

from qmq.sql.outbox_tables import ASIDE, TABLE, WAITING

STATES: Final = ((WAITING, "waiting"), (ASIDE, "set aside"))


class OutboxEntry(models.Model):
    """the migration has the statements of qmq.sql"""

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
