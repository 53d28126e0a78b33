"""What the tests of Spark's source for Kafka check of `failOnDataLoss` and `Trigger.AvailableNow`.
They are written for this repository, because Kafka's brokers and partitions are part of them.
"""

from __future__ import annotations

from typing import Final

from judges.outcomes import Outcomes
from judges.suite import ROOT, Stage, Suite

CASES: Final = ROOT / "tests/spark/test_kafka_source_cases.py"


def run(stage: Stage) -> Outcomes:
    return stage.pytest("-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT), str(CASES))


SUITE: Final = Suite(
    name="spark-kafka",
    project="",
    run=run,
    about="`tests/spark/test_kafka_source_cases.py`",
    changes="written for QMQ after three suites of Spark's source for Kafka",
    programs=("java",),
)
