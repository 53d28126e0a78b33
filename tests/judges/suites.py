"""The table of suites."""

from __future__ import annotations

from typing import Final

from judges import (
    celery_suite,
    dramatiq_suite,
    faststream_suite,
    kombu_suite,
    pyspark_suite,
    rocketmq_suite,
    spark_kafka_suite,
)
from judges.suite import Suite

SUITES: Final[dict[str, Suite]] = {
    each.SUITE.name: each.SUITE
    for each in (
        celery_suite,
        dramatiq_suite,
        faststream_suite,
        kombu_suite,
        rocketmq_suite,
        pyspark_suite,
        spark_kafka_suite,
    )
}
