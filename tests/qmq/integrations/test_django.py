"""Django on QMQ: messages in its transactions, its management command in its own process, its
admin.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

django = pytest.importorskip("django", reason="needs Django: pip install 'qmq[django]'")

HERE = Path(__file__).parent
SOON_S = 30
pytestmark = [
    pytest.mark.xdist_group("django"),
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning"),
]


@pytest.fixture
def subject() -> str:
    return f"orders-{uuid4().hex[:8]}"


def received(subject: str, count: int = 1) -> list[bytes]:
    """The subject's first messages, so many at least."""
    from qmq.integrations.django import client

    found: list[bytes] = []
    with client().consumer(subject, "judge") as consumer:
        for message in consumer:
            found.append(message.body)
            if len(found) == count:
                return found
    raise AssertionError


def rows() -> Any:
    from qmq.integrations.django.models import OutboxEntry

    return OutboxEntry.objects


def test_a_message_commits_with_the_transaction(project: str, subject: str) -> None:
    from django.contrib.auth.models import Group
    from django.db import transaction

    from qmq.integrations.django import send

    with transaction.atomic():
        Group.objects.create(name=subject)
        send(subject, "7", key="k")
        assert rows().filter(subject=subject).count() == 1
    assert received(subject) == [b"7"]
    assert Group.objects.filter(name=subject).exists()
    assert not rows().filter(subject=subject).exists()


def test_a_message_is_rolled_back_with_the_transaction_or_the_savepoint(
    project: str, subject: str
) -> None:
    from django.db import transaction

    from qmq.integrations.django import send

    with pytest.raises(ZeroDivisionError), transaction.atomic():
        send(subject, "1")
        raise ZeroDivisionError
    with transaction.atomic():
        with pytest.raises(ZeroDivisionError), transaction.atomic():
            send(subject, "2")
            raise ZeroDivisionError
        send(subject, "3")
    send(subject, "4")
    assert received(subject, 2) == [b"3", b"4"]


def test_without_the_outbox_a_message_is_sent_at_once(project: str, subject: str) -> None:
    from django.conf import settings
    from django.db import transaction
    from django.test import override_settings

    from qmq.integrations.django import send

    with override_settings(QMQ={**settings.QMQ, "OUTBOX": False}), transaction.atomic():
        send(subject, "1")
        assert received(subject) == [b"1"]
        assert not rows().filter(subject=subject).exists()


def test_a_setting_that_does_not_exist_is_an_error_of_the_check(project: str) -> None:
    from django.test import override_settings

    from qmq.integrations.django.apps import check_settings

    assert check_settings(None) == []
    with override_settings(QMQ={"SERVERS": "x"}):
        (found,) = check_settings(None)
    assert found.id == "qmq.E001"
    assert "SERVER" in found.msg


def test_the_command_runs_listeners_with_the_projects_database(project: str, subject: str) -> None:
    from django.contrib.auth.models import Group

    from qmq.integrations.django import send

    send(subject, f"group-{subject}")
    environment = {**os.environ, "QMQ_TEST_SUBJECT": subject, "PYTHONPATH": str(HERE)}
    command = [sys.executable, str(HERE / "django_project.py"), "qmq_listen"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "1 listeners run\n"
        while not Group.objects.filter(name=f"group-{subject}").exists():
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(SOON_S) == 0


def test_the_admin_shows_the_outbox_and_sends_again_what_was_set_aside(
    project: str, subject: str
) -> None:
    from django.contrib.auth.models import User
    from django.test import Client
    from django.test.utils import override_settings

    from qmq.sql.outbox_tables import ASIDE, WAITING

    User.objects.create_superuser(subject, password="secret")
    row = rows().create(
        message_id=os.urandom(16), subject=subject, message_key=b"the-key", body=b"the-body", create_time_ms=1, content_bytes=15,  # noqa: E501
        state=ASIDE, attempts=3, claimed_by="", claimed_until=0, last_error="the-reason",
    )  # fmt: skip
    browser = Client()
    with override_settings(ALLOWED_HOSTS=["testserver"]):
        assert browser.login(username=subject, password="secret")
        page = browser.get("/admin/qmq/outboxentry/").content.decode()
        assert "the-key" in page
        assert "the-reason" in page
        assert (
            "the-body" in browser.get(f"/admin/qmq/outboxentry/{row.id}/change/").content.decode()
        )
        assert browser.get("/admin/qmq/outboxentry/add/").status_code == 403
        browser.post("/admin/qmq/outboxentry/", {"action": "retry", "_selected_action": [row.id]})
        assert rows().get(id=row.id).state == WAITING
        browser.post(f"/admin/qmq/outboxentry/{row.id}/delete/", {"post": "yes"})
    assert not rows().filter(id=row.id).exists()


def test_the_models_need_no_other_migration_and_the_tables_can_be_dropped(project: str) -> None:
    from django.core.management import call_command
    from django.db import connection

    call_command("makemigrations", "qmq", check=True, dry_run=True, verbosity=0)
    call_command("migrate", "qmq", "zero", verbosity=0)
    assert "qmq_outbox" not in connection.introspection.table_names()
    call_command("migrate", verbosity=0)
    assert "qmq_outbox" in connection.introspection.table_names()
