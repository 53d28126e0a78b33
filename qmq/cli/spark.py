"""`qmq spark` runs Spark jobs over the log (docs/SPARK.md). Needs `pip install qmq[spark-jobs]`,
which is imported only when a job runs.

Arguments after a job's name are passed to the job: `qmq spark archive --help` explains them. The
exit status is the job's.
"""

from __future__ import annotations

from typing import Annotated

import typer

from qmq.cli.output import fail, show
from qmq.errors import InvalidArgument

Words = Annotated[
    list[str] | None,
    typer.Argument(metavar="[JOB [OPTIONS]...]", help="The job; leave it out for a list of jobs."),
]


def spark(words: Words = None) -> None:
    """Run a Spark job over the log. Without a job, list the jobs."""
    from pyspark_qmq import jobs

    if not words or words[0] in ("--help", "-h"):
        show(
            "jobs: see qmq spark JOB --help",
            ("job", "what it does"),
            list(jobs.JOBS.items()),
            as_json=False,
        )
        return
    try:
        status = jobs.run(words[0], words[1:])
    except ModuleNotFoundError as cause:
        missing = (cause.name or "").split(".")[0]
        if missing in ("qmq", "pyspark_qmq"):
            raise
        fail(
            InvalidArgument(
                f"qmq spark needs another package ({missing} is missing): "
                "pip install 'qmq[spark-jobs]'"
            )
        )
    raise typer.Exit(status)
