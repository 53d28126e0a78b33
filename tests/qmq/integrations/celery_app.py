"""The application of the tests of Celery. `QMQ_TEST_BROKER` and `QMQ_TEST_RESULTS` are the URLs of
its broker and its results.
"""

from __future__ import annotations

import os
import signal
from typing import Any

from celery import Celery

import qmq.integrations.kombu

app = Celery(
    "celery_app", broker=os.environ["QMQ_TEST_BROKER"], backend=os.environ["QMQ_TEST_RESULTS"]
)
app.conf.update(
    task_default_queue=os.environ["QMQ_TEST_QUEUE"],
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    worker_prefetch_multiplier=1,
    result_backend_thread_safe=True,
)
assert qmq.integrations.kombu.Transport


@app.task
def add(x: int, y: int) -> int:
    return x + y


@app.task(bind=True)
def fails_once(self: Any) -> int:
    if self.request.retries < 1:
        raise self.retry(countdown=0.1)
    return int(self.request.retries)


@app.task
def kills_its_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@app.task
def fails() -> None:
    raise ValueError("as it should")
