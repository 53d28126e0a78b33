"""Jobs over the log. Each is a module with a `JOB`. Their names are listed here, so that the list
can be shown without importing Spark.

job.py       the interface of a job, common arguments, exit status, what several jobs read
report.py    a job's results: printed, as a page (report.html.j2), as JSON and Parquet

The jobs: archive*.py, order_audit*.py, duplicates.py, lag_report*.py, dead_letters*.py,
delay_accuracy*.py.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Sequence
from typing import Final

from qmq.errors import InvalidArgument

JOBS: Final[dict[str, str]] = {
    "archive": "Archive new messages in Iceberg tables, each exactly once.",
    "order_audit": "Check for each key that the log has the order of sending, across all routes.",
    "duplicates": "Find messages stored more than once, and gaps in sequences.",
    "lag_report": "Report the lag of consumer groups, and the time until messages were settled.",
    "dead_letters": "Report dead letters by cause, and replay them.",
    "delay_accuracy": "Report how punctually delayed messages were delivered.",
}
"""The summary of each job. A job's module has the job's name."""


def run(name: str, argv: Sequence[str]) -> int:
    """Run a job like its own command. Returns 0: no findings, 1: findings, 2: failure. Errors are
    printed, not raised.
    """
    known = name.replace("-", "_")
    if known not in JOBS:
        near = difflib.get_close_matches(known, JOBS, 1)
        hint = f"did you mean {near[0]}?" if near else f"jobs: {', '.join(JOBS)}"
        sys.stderr.write(f"error: {InvalidArgument(f'there is no job {name!r}: {hint}')}\n")
        return 2
    module = importlib.import_module(f"{__name__}.{known}")
    from pyspark_qmq.jobs.job import main

    return main(module.JOB, argv)
