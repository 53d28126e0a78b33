"""kombu's integration tests, which it runs against RabbitMQ, Redis and its other transports."""

from __future__ import annotations

import shutil
from typing import Final

from judges.outcomes import Outcomes
from judges.suite import FOLDER, Stage, Suite


def run(stage: Stage) -> Outcomes:
    shutil.copy(FOLDER / "cases" / "kombu_cases.py", stage.source / "t/integration/test_qmq.py")
    return stage.pytest("--noconftest", "-o", "python_classes=Test*", "t/integration/test_qmq.py")


SUITE: Final = Suite(
    name="kombu",
    project="celery/kombu",
    package="kombu",
    run=run,
    about="the classes of `t/integration/common`",
    changes="nothing; `tests/judges/cases/kombu_cases.py` subclasses its classes",
)
