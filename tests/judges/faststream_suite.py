"""FastStream's base cases for brokers. Its source distribution has no tests."""

from __future__ import annotations

import shutil
from typing import Final

from judges.outcomes import Outcomes
from judges.suite import FOLDER, Stage, Suite


def run(stage: Stage) -> Outcomes:
    """The installed FastStream is judged: the folder of its code in the checkout is put aside."""
    (stage.source / "faststream").rename(stage.source / "not-used")
    to = stage.source / "tests/brokers/qmq"
    to.mkdir()
    (to / "__init__.py").touch()
    shutil.copy(FOLDER / "cases" / "faststream_cases.py", to / "test_qmq.py")
    return stage.pytest("tests/brokers/qmq")


SUITE: Final = Suite(
    name="faststream",
    project="ag2ai/faststream",
    run=run,
    about="`tests/brokers/base`",
    changes=(
        "nothing; `tests/judges/cases/faststream_cases.py` subclasses its classes, with a new "
        "group for each subscriber that names none"
    ),
    beside=("pytest-rerunfailures==16.7",),
)
