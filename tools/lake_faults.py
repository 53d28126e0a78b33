"""Kill lake writers (SIGKILL) at random moments while messages flow and a route changes; compare
every row with the sent messages.

Exit status 1 if a row is missing, there twice, or out of its key's order. `--seed` repeats a run's
choices.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT / "tests"), str(ROOT / "scripts")]

from rich.console import Console  # noqa: E402
from rich.progress import Progress  # noqa: E402
from support import NodeProcess  # noqa: E402
from system.lake_run import lake_run  # noqa: E402


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--kills", type=int, default=200)
    options.add_argument("--rows", type=int, default=1_000_000)
    options.add_argument("--changes", type=int, default=10)
    options.add_argument(
        "--typed",
        action="store_true",
        help="a typed table, and messages that do not fit the schema",
    )
    options.add_argument("--seed", type=int, default=random.randrange(10**6))
    chosen = options.parse_args()
    sys.stderr.write(f"seed {chosen.seed}\n")
    with (
        tempfile.TemporaryDirectory(prefix="qmq-lake-") as folder,
        Progress(console=Console(stderr=True), transient=True) as bar,
    ):
        task = bar.add_task("kills", total=chosen.kills)
        node = NodeProcess(Path(folder) / "node")
        node.start()
        try:
            run = lake_run(
                node.address,
                Path(folder),
                rows=chosen.rows,
                kills=chosen.kills,
                changes=chosen.changes,
                seed=chosen.seed,
                is_typed=chosen.typed,
                step=lambda: bar.update(task, advance=1),
            )
            outcome = asyncio.run(run)
        finally:
            node.kill()
    found = {
        "seed": chosen.seed,
        **dataclasses.asdict(outcome),
        "anomalies": outcome.anomalies[:20],
    }
    sys.stdout.write(json.dumps(found, indent=1) + "\n")
    return 1 if outcome.anomalies else 0


if __name__ == "__main__":
    sys.exit(main())
