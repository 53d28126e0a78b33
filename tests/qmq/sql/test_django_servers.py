"""The tests of Django's integration (tests/qmq/integrations), on database servers: on SQLite they
run by themselves.

They run in a separate process, because a process has one Django project.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.databases import Database

pytest.importorskip("django", reason="needs Django: pip install 'qmq[django]'")
pytestmark = pytest.mark.sampled

TESTS = [
    str(Path("tests") / "qmq" / "integrations" / each)
    for each in ("test_django.py", "test_django_tasks.py")
]
ROOT = Path(__file__).parents[3]
TIMEOUT_S = 300


def settings(database: Database) -> dict[str, object]:
    """Django's settings of the database."""
    assert database.server is not None
    if database.kind == "postgresql":
        return {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": database.name,
            "USER": "qmq",
            "HOST": str(database.server.folder),
        }
    return {
        "ENGINE": "django.db.backends.mysql",
        "NAME": database.name,
        "USER": "root",
        "HOST": database.server.socket,
    }


@pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
def test_the_tests_of_the_django_integration_pass_on_a_server(database: Database) -> None:
    outer = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment = {
        **outer,
        "QMQ_TEST_DATABASE": json.dumps(settings(database)),
        "QMQ_TEST_FORM": "all",
    }
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *TESTS]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        env=environment,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= 24
    assert "skipped" not in done.stdout, done.stdout
    connection = database.connect()
    with connection.cursor() as cursor:
        cursor.execute("SELECT COUNT(*) FROM qmq_task")
        assert cursor.fetchone()[0] > 0, "the tests used another database"
    connection.close()
