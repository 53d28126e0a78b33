"""One update of the declarative pipeline: what came since the last one goes into all tables."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from .alerts import ALERT_MIN

FLOWS: Final = Path(__file__).parent / "flows.py"
SPEC: Final = """\
name: flights
storage: {storage}
configuration:
  pipeline.servers: "{servers}"
  pipeline.alert_min: "{alert_min}"
libraries:
  - glob:
      include: flows.py
"""


def write_spec(folder: Path, servers: str) -> Path:
    """Write the pipeline's specification and its flows into the folder. Returns the former."""
    shutil.copy(FLOWS, folder)
    spec = folder / "spark-pipeline.yml"
    spec.write_text(
        SPEC.format(storage=(folder / "checkpoints").as_uri(), servers=servers, alert_min=ALERT_MIN)
    )
    return spec


def update(spec: Path, spark: str) -> None:
    """Run what `spark-pipelines run` runs, as a client of the server at the URL `spark`: no other
    JVM starts. The log is in the folder.
    """
    command = [sys.executable, "-m", "pyspark.pipelines.cli", "run", "--spec", str(spec)]
    log = spec.with_name("pipeline.log")
    with log.open("a") as output:
        done = subprocess.run(  # noqa: S603
            command,
            env={**os.environ, "SPARK_REMOTE": spark},
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if done.returncode:
        raise SystemExit(f"the update failed: see {log}\n{log.read_text()[-2000:]}")
