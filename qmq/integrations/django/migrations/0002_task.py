"""The table of tasks and their results."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("qmq", "0001_initial")]  # noqa: RUF012 - as Django has it
    operations = [  # noqa: RUF012
        migrations.CreateModel(
            name="TaskRecord",
            fields=[
                ("id", models.CharField(max_length=32, primary_key=True, serialize=False)),
                ("task_path", models.TextField()),
                ("queue_name", models.CharField(max_length=127)),
                ("backend", models.CharField(max_length=127)),
                ("run_after", models.DateTimeField(null=True)),
                ("args", models.JSONField(default=list)),
                ("kwargs", models.JSONField(default=dict)),
                ("status", models.CharField(max_length=10)),
                ("enqueued_at", models.DateTimeField(db_index=True)),
                ("started_at", models.DateTimeField(null=True)),
                ("finished_at", models.DateTimeField(null=True)),
                ("last_attempted_at", models.DateTimeField(null=True)),
                ("return_value", models.JSONField(null=True)),
                ("errors", models.JSONField(default=list)),
                ("worker_ids", models.JSONField(default=list)),
            ],
            options={"verbose_name": "task", "db_table": "qmq_task"},
        ),
    ]
