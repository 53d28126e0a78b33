"""Kill Spark drivers (SIGKILL, JVM included), executors and tasks' processes at random times while
they archive, write to the log, or copy a subject whose source grows, gets more broker groups and is
purged; compare every row with the source.

Exit status 1 if a row is missing, duplicated, or out of its key's order. `--seed` repeats a run's
choices.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path += [
    str(ROOT / "tests"),
    str(ROOT / "tests" / "spark"),
    str(ROOT / "examples"),
    str(ROOT / "scripts"),
]

from rich.console import Console  # noqa: E402
from rich.progress import Progress  # noqa: E402
from rich.table import Table  # noqa: E402
from system.spark_run import Outcome, archive_run, cluster, copy_run, sink_run  # noqa: E402

RUNS: Final = {
    "archive": archive_run,
    "sink": sink_run,
    "copy": copy_run,
    "copy-files": partial(copy_run, files=True),
}


def figures(name: str, outcome: Outcome) -> dict[str, Any]:
    found: dict[str, Any] = {"rows": outcome.rows, "route changes": outcome.changes}
    found |= {
        f"killed: {moment}": count for moment, count in outcome.moments.items()
    } | outcome.figures
    found["anomalies"] = outcome.anomalies[:20]
    return {f"{name}, {what}": value for what, value in found.items()}


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--kills", type=int, default=20)
    options.add_argument("--rows", type=int, default=336_776)
    options.add_argument("--changes", type=int, default=20)
    options.add_argument("--seed", type=int, default=random.randrange(10**6))
    options.add_argument("--only", choices=list(RUNS), action="append")
    options.add_argument(
        "--secure",
        action="store_true",
        help="TLS everywhere, rules, etcd with users: docker-compose.secure.yml",
    )
    options.add_argument("--json", action="store_true")
    chosen = options.parse_args()
    found: dict[str, Any] = {"seed": chosen.seed}
    names = chosen.only or list(RUNS)
    with Progress(console=Console(stderr=True), transient=True, disable=chosen.json) as bar:
        for name in names:
            task = bar.add_task(name, total=chosen.kills)
            with (
                tempfile.TemporaryDirectory(prefix="qmq-spark-") as folder,
                cluster(Path(folder), secure=chosen.secure) as started,
            ):
                outcome = RUNS[name](
                    started,
                    Path(folder),
                    rows=chosen.rows,
                    changes=chosen.changes,
                    kills=chosen.kills,
                    seed=chosen.seed,
                    step=lambda moment, task=task, name=name: bar.update(
                        task, description=f"{name}: killed {moment}", advance=1
                    ),
                )
            found |= figures(name, outcome)
    if chosen.json:
        sys.stdout.write(json.dumps(found, indent=1) + "\n")
    else:
        table = Table(title="Spark drivers killed", show_header=False)
        for name, value in found.items():
            table.add_row(
                name, "\n".join(map(str, value)) if isinstance(value, list) else str(value)
            )
        Console().print(table)
    return 1 if any(value for name, value in found.items() if name.endswith("anomalies")) else 0


if __name__ == "__main__":
    sys.exit(main())
