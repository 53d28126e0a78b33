"""`qmq spark`: jobs over the log (docs/SPARK.md). Needs `pip install qmq[spark]`; nothing of it is loaded before it is used.

Words behind a job's name are the job's own: `qmq spark archive --help` explains them. A job's exit status is ours.
"""

from __future__ import annotations

from typing import Annotated, Final

import typer

from qmq.cli.output import fail, show
from qmq.errors import InvalidArgument

CONTEXT: Final = {
    "allow_extra_args": True,
    "allow_interspersed_args": False,
    "ignore_unknown_options": True,
    "help_option_names": list[str](),
}
"""What typer must know, so that it leaves a job's words alone, `--help` too."""

Words = Annotated[list[str] | None, typer.Argument(metavar="[JOB [OPTIONS]...]", help="Without a job: which there are.")]


def spark(words: Words = None) -> None:
    """Run a Spark job over the log; alone: list the jobs."""
    from pyspark_qmq import jobs

    if not words or words[0] in ("--help", "-h"):
        show("jobs: qmq spark JOB --help says more", ("job", "what it does"), list(jobs.JOBS.items()), as_json=False)
        return
    try:
        status = jobs.run(words[0], words[1:])
    except ModuleNotFoundError as cause:
        missing = (cause.name or "").split(".")[0]
        if missing in ("qmq", "pyspark_qmq"):
            raise
        fail(InvalidArgument(f"qmq spark needs more libraries ({missing} is missing): pip install 'qmq[spark]'"))
    raise typer.Exit(status)
