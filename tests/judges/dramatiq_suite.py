"""Dramatiq's tests of actors, composition, results, callbacks, workers and brokers: those that it
runs with its broker in memory, and those of its broker on Redis.
"""

from __future__ import annotations

import shutil
from typing import Final

from judges.outcomes import Outcomes
from judges.suite import FOLDER, Stage, Suite

FILES: Final = (
    "actors",
    "broker",
    "callbacks",
    "composition",
    "encoders",
    "generic_actors",
    "messages",
    "redis",
    "results",
    "worker",
)


def run(stage: Stage) -> Outcomes:
    cases, tests = FOLDER / "cases", stage.source / "tests"
    shutil.copy(cases / "dramatiq_conftest.py", tests / "conftest.py")
    shutil.copy(cases / "dramatiq_common.py", tests / "common.py")
    (tests / "__init__.py").touch()
    retries = tests / "middleware" / "test_retries.py"
    return stage.pytest(
        *("-o", "addopts=", "--timeout", "60", "--tb", "native"),
        *(f"tests/test_{each}.py" for each in FILES),
        *([str(retries)] if retries.exists() else []),
    )


SUITE: Final = Suite(
    name="dramatiq",
    project="Bogdanp/dramatiq",
    package="dramatiq",
    run=run,
    about="`tests`: " + ", ".join(FILES),
    changes=(
        "the modules `conftest` and `common`, which the source distribution lacks: the fixtures "
        "`stub_broker` and `redis_broker` are a broker on QMQ "
        "(`tests/judges/cases/dramatiq_conftest.py`)"
    ),
    beside=("pika==1.4.4", "redis==8.1.0"),
)
