"""PySpark of the supported release that the lock file does not have: the tests of reading,
streaming, writing, Spark Connect and pipelines once more, in a process with that PySpark.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import needs

TESTS = Path(__file__).parent
CHOSEN = {
    "test_spark_versions.py": ("test_the_installed_pyspark_is_a_supported_one",),
    "test_source.py": (
        "test_every_column_is_what_the_producer_sent_and_the_broker_noted",
        "test_a_schema_is_a_projection_and_may_name_more_columns",
        "test_tags_and_keys_select",
        "test_tasks_never_mix_partitions_of_an_ordered_subject_and_rows_say_the_version",
        "test_a_misspelt_option_is_refused_before_anything_runs",
    ),
    "test_stream_reader.py": (
        "test_a_trigger_takes_no_more_than_it_may_and_available_now_comes_to_an_end",
        "test_available_now_ends_at_the_ends_of_its_start_though_routes_change",
        "test_a_stream_waits_for_the_fewest_messages_that_a_trigger_may_take",
    ),
    "test_stateful_stream.py": (
        "test_sessions_of_keys_are_whole_across_route_changes_and_restarts",
    ),
    "test_sink_spark.py": (
        "test_what_was_written_comes_back_by_a_read",
        "test_a_stream_whose_checkpoint_is_put_back_ends_and_stores_nothing_twice",
    ),
    "test_connect.py": ("test_a_client_without_a_jvm_reads_streams_and_writes",),
    "test_pipelines.py": (
        "test_a_pipeline_continues_across_a_route_change_and_writes_alerts_once",
    ),
}
"""What another release of Spark could break: each kind of read and write once."""


def with_pyspark(folder: Path, *words: str) -> str:
    """Run this interpreter with another PySpark; what it printed."""
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    outside = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")
    }
    done = subprocess.run(
        [sys.executable, *words],
        env={**outside, "PYTHONPATH": path, "QMQ_TEST_FORM": "gate"},
        cwd=TESTS.parents[1],
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    return done.stdout


@needs.other_pyspark
@pytest.mark.long
@pytest.mark.xdist_group("connect")
def test_the_source_and_the_sink_run_with_the_other_supported_pyspark() -> None:
    folder = needs.find_other_pyspark()
    assert folder is not None
    version = with_pyspark(folder, "-c", "import pyspark; print(pyspark.__version__)")
    assert version.strip() == needs.OTHER_PYSPARK
    chosen = [f"{TESTS / file}::{each}" for file, tests in CHOSEN.items() for each in tests]
    with_pyspark(folder, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen)
