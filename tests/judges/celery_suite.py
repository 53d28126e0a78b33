"""Celery's integration tests: one worker with processes, and Redis for results."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final

from judges.outcomes import Outcomes
from judges.suite import Stage, Suite

TEST_S_MAX: Final = 1200
"""A time-out in a test of memory, which traces each allocation, would leave the process inside a
task, and fail all later tests. Celery's flaky tests have time-outs of their own.
"""


def run(stage: Stage) -> Outcomes:
    """Workers that tests start as programs know QMQ by a module that each interpreter imports."""
    (stage.source / "sitecustomize.py").write_text("import qmq.integrations.kombu\n")
    return stage.pytest(
        *("-p", "celery.contrib.pytest", "-p", "qmq.integrations.kombu"),
        *("--timeout", str(TEST_S_MAX), "t/integration"),
        TEST_BROKER=f"qmq://{stage.node}",
        TEST_BACKEND=f"redis://127.0.0.1:{stage.redis_port}",
        REDIS_HOST="127.0.0.1",
        REDIS_PORT=str(stage.redis_port),
        WORKER_LOGLEVEL="INFO",
        PATH=os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),
    )


SUITE: Final = Suite(
    name="celery",
    project="celery/celery",
    package="celery",
    run=run,
    about="`t/integration`, with Redis for results",
    changes="a module `sitecustomize` makes `qmq://` known to the workers that tests start",
    beside=(
        "azure-core==1.41.0",
        "azure-storage-blob==12.31.1",
        "azure-storage-queue==12.18.1",
        "azure-identity==1.27.0",
        "freezegun==1.5.5",
        "isodate==0.7.2",
        "msal==1.39.0",
        "pytest-order==1.5.0",
        "pytest-rerunfailures==16.7",
        "pytest-subtests==0.15.0",
        "python-dateutil==4.0.0",
        "redis==8.1.0",
        "requests==2.34.2",
        "six==1.17.0",
        "tblib==3.2.2",
    ),
    programs=("redis-server",),
)
