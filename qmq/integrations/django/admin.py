"""Django's admin: what waits in the outbox, what was set aside and why, with retry and drop as in
`qmq outbox`; tasks and results.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django.contrib import admin, messages

from qmq.integrations.django.models import OutboxEntry, TaskRecord
from qmq.process.event_loop import time_of
from qmq.sql.outbox_tables import ASIDE, WAITING


@admin.register(OutboxEntry)
class OutboxEntryAdmin(admin.ModelAdmin):
    list_display = ("id", "subject", "key", "state", "attempts", "created", "last_error")
    list_filter = ("state", "subject")
    ordering = ("id",)
    actions = ("retry",)
    fields = (
        "id",
        "subject",
        "key",
        "tags",
        "headers",
        "text",
        "state",
        "attempts",
        "created",
        "due",
        "claimed_by",
        "last_error",
    )
    readonly_fields = fields

    @admin.display(description="key")
    def key(self, row: OutboxEntry) -> str:
        return bytes(row.message_key or b"").decode(errors="replace")

    @admin.display(description="body")
    def text(self, row: OutboxEntry) -> str:
        return bytes(row.body).decode(errors="replace")

    @admin.display(description="created")
    def created(self, row: OutboxEntry) -> datetime:
        return time_of(row.create_time_ms)

    @admin.display(description="due")
    def due(self, row: OutboxEntry) -> datetime | None:
        return None if row.due_ms is None else time_of(row.due_ms)

    @admin.action(description="Send again what was set aside", permissions=["delete"])
    def retry(self, request: Any, rows: Any) -> None:
        count = rows.filter(state=ASIDE).update(state=WAITING, claimed_until=0)
        self.message_user(request, f"{count} messages wait for the watchdog.", messages.SUCCESS)

    def has_add_permission(self, request: Any) -> bool:
        return False

    def has_change_permission(self, request: Any, obj: Any = None) -> bool:
        """Messages cannot be changed. Users who may delete a message may retry it."""
        return False


@admin.register(TaskRecord)
class TaskRecordAdmin(admin.ModelAdmin):
    list_display = (
        "id",
        "task_path",
        "queue_name",
        "status",
        "enqueued_at",
        "run_after",
        "finished_at",
    )
    list_filter = ("status", "queue_name")
    ordering = ("-enqueued_at",)
    search_fields = ("id", "task_path")

    def has_add_permission(self, request: Any) -> bool:
        return False

    def has_change_permission(self, request: Any, obj: Any = None) -> bool:
        """Results cannot be changed. Users who may delete one may cancel the task: a worker that
        gets its message does nothing.
        """
        return False
