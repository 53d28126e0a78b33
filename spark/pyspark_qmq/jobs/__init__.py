"""Jobs over the log. Each is a module with a `JOB`; here are their names, so that listing them loads no Spark.

job.py       what a job is, its common arguments, its exit status
report.py    what a job found: printed, as a page (report.html.j2, plots.py), as JSON and Parquet
archive*.py, order_audit*.py, duplicates.py, lag_report*.py, dead_letters*.py, delay_accuracy*.py   the jobs
"""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Sequence
from typing import Final

from qmq.errors import InvalidArgument

JOBS: Final[dict[str, str]] = {
    "archive": "Keep messages as Parquet, by subject and day: each once, and only what is new.",
    "order_audit": "Prove per key that the log has the order in which messages were sent, across all routes.",
    "duplicates": "Find messages that are stored more than once, and gaps in sequences.",
    "lag_report": "How far consumer groups are behind, and how long messages took until they were settled.",
    "dead_letters": "Messages that failed for good, by cause; give them back.",
    "delay_accuracy": "How exactly delayed messages came when they were due.",
}
"""Name and summary; a job's module has its name."""


def run(name: str, argv: Sequence[str]) -> int:
    """Run a job as its own command would: 0 nothing was found, 1 something was, 2 it failed. Errors are printed, not raised."""
    known = name.replace("-", "_")
    if known not in JOBS:
        near = difflib.get_close_matches(known, JOBS, 1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(JOBS)}"
        sys.stderr.write(f"error: {InvalidArgument(f'there is no job {name!r}: {hint}')}\n")
        return 2
    module = importlib.import_module(f"{__name__}.{known}")
    from pyspark_qmq.jobs.job import main

    return main(module.JOB, argv)
