"""A Django project for the tests: its settings, and a command line (`python django_project.py
COMMAND`).
"""

import json
import os
import sys
from typing import Any

import django
from django.conf import settings


def database() -> dict[str, Any]:
    """The database of `QMQ_TEST_DATABASE`, which has the path of an SQLite database, or Django's
    settings as JSON.
    """
    given = os.environ.get("QMQ_TEST_DATABASE", ":memory:")
    if not given.startswith("{"):
        return {"ENGINE": "django.db.backends.sqlite3", "NAME": given}
    found: dict[str, Any] = json.loads(given)
    if found["ENGINE"].endswith("mysql"):
        import pymysql

        # Django wants mysqlclient, and takes PyMySQL under its name and with its version.
        pymysql.version_info = (2, 2, 4, "final", 0)
        pymysql.install_as_MySQLdb()
    return found


def configure() -> None:
    if settings.configured:
        return
    settings.configure(
        SECRET_KEY="test",
        USE_TZ=True,
        ROOT_URLCONF="django_urls",
        DATABASES={"default": {**database(), "TEST": {"NAME": None}}},
        INSTALLED_APPS=[
            "django.contrib.admin",
            "django.contrib.auth",
            "django.contrib.contenttypes",
            "django.contrib.messages",
            "django.contrib.sessions",
            "qmq.integrations.django",
            "django_shop",
            *(["django_tasks"] if django.VERSION < (6, 0) else []),
        ],
        MIDDLEWARE=[
            "django.contrib.sessions.middleware.SessionMiddleware",
            "django.contrib.auth.middleware.AuthenticationMiddleware",
            "django.contrib.messages.middleware.MessageMiddleware",
        ],
        TEMPLATES=[
            {
                "BACKEND": "django.template.backends.django.DjangoTemplates",
                "APP_DIRS": True,
                "OPTIONS": {
                    "context_processors": [
                        "django.template.context_processors.request",
                        "django.contrib.auth.context_processors.auth",
                        "django.contrib.messages.context_processors.messages",
                    ]
                },
            }
        ],
        TASKS={
            "default": {
                "BACKEND": "qmq.integrations.django.task_backend.TaskBackend",
                "QUEUES": ["default", "queue-1"],
            }
        },
        QMQ={
            "SERVER": os.environ.get("QMQ_SERVER", "127.0.0.1:1"),
            "OPTIONS": {"state_dir": False},
        },
    )


if __name__ == "__main__":
    from django.core.management import execute_from_command_line

    configure()
    execute_from_command_line(sys.argv)
