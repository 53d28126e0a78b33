"""The outbox's tables, by the statements that `qmq outbox migration` prints."""

from typing import Any

from django.db import migrations, models

from qmq.sql.outbox_tables import TABLE, lease_table, statements


def create(apps: Any, schema_editor: Any) -> None:
    for each in statements(schema_editor.connection.vendor):
        schema_editor.execute(each)


def drop(apps: Any, schema_editor: Any) -> None:
    for each in (TABLE, lease_table(TABLE)):
        schema_editor.execute(f"DROP TABLE {each}")


class Migration(migrations.Migration):
    initial = True
    operations = [  # noqa: RUF012 - as Django has it
        migrations.RunPython(
            create, drop, atomic=False
        ),  # MySQL creates tables only outside of transactions
        migrations.CreateModel(
            name="OutboxEntry",
            fields=[("id", models.BigAutoField(primary_key=True, serialize=False))],
            options={
                "db_table": TABLE,
                "managed": False,
                "verbose_name": "message in the outbox",
                "verbose_name_plural": "messages in the outbox",
            },
        ),
    ]
