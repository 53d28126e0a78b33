"""Split, merge, move and drain an ordered subject under load while masters, slaves, metaservers and
consumers die, and a group is cut off.

All actions of producers and consumers are recorded and checked (tests/history/ordered). Exit status
1 if a guarantee of docs/ORDERING.md was violated. `--keep DIR` keeps the history, the cluster's
data and the output of its processes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT / "tests"), str(ROOT / "scripts"), str(ROOT / "examples")]

from rich.console import Console  # noqa: E402
from rich.progress import Progress  # noqa: E402
from rich.table import Table  # noqa: E402
from system.group import Shape  # noqa: E402
from system.ordered_nemesis import Options, Result, run_in  # noqa: E402

console = Console()
errors = Console(stderr=True)


def parser() -> argparse.ArgumentParser:
    known, shape = Options(), Shape()
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument(
        "--changes", type=int, default=40, help="of the route: splits, merges, moves, drains"
    )
    options.add_argument(
        "--kills", type=int, default=20, help="and stops, of brokers, metaservers and consumers"
    )
    options.add_argument(
        "--freezes",
        type=int,
        default=2,
        help="how often a whole broker group is out of reach for longer than its lease",
    )
    options.add_argument(
        "--seconds",
        type=float,
        default=180.0,
        help="over which these are spread; faults may take longer",
    )
    options.add_argument("--seed", type=int, default=known.seed)
    options.add_argument("--rate", type=float, default=known.rate, help="messages a second")
    options.add_argument(
        "--consumers", type=int, default=known.consumers, help="of each of two consumer groups"
    )
    options.add_argument("--workload", choices=("flights", "binlog"), default=known.workload)
    options.add_argument(
        "--rows", type=int, default=known.rows, help="of the binlog; it ends when all are sent"
    )
    options.add_argument("--groups", type=int, default=shape.groups, help="broker groups")
    options.add_argument("--replicas", type=int, default=shape.replicas, help="of each")
    options.add_argument("--metas", type=int, default=shape.metas)
    options.add_argument("--etcds", type=int, default=shape.etcds)
    options.add_argument(
        "--network",
        choices=("loopback", "netns"),
        default="",
        help="netns, the default for root, can be cut",
    )
    options.add_argument(
        "--secure",
        action="store_true",
        help="TLS everywhere, rules, etcd with users: docker-compose.secure.yml",
    )
    options.add_argument("--flush", choices=("async", "sync"), default=known.flush)
    options.add_argument(
        "--slow",
        type=float,
        default=known.slow_s,
        metavar="SECONDS",
        help="a message that waits longer needs a reason",
    )
    options.add_argument(
        "--keep", type=Path, metavar="DIR", help="an empty folder, or one to be made"
    )
    options.add_argument("--json", action="store_true")
    return options


def options_of(chosen: argparse.Namespace) -> Options:
    """The options of the command line."""
    return Options(
        changes=chosen.changes,
        kills=chosen.kills,
        freezes=chosen.freezes,
        seconds=chosen.seconds,
        seed=chosen.seed,
        rate=chosen.rate,
        consumers=chosen.consumers,
        workload=chosen.workload,
        rows=chosen.rows,
        network=chosen.network,
        secure=chosen.secure,
        flush=chosen.flush,
        slow_s=chosen.slow,
        shape=Shape(chosen.etcds, chosen.metas, chosen.groups, chosen.replicas),
    )


async def run(options: Options, folder: Path, *, is_quiet: bool) -> Result:
    """The run with a bar. SIGTERM ends it as Ctrl-C does: with all that it started."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    with Progress(console=errors, transient=True, disable=is_quiet) as bar:
        steps = bar.add_task(
            "changes and faults", total=options.changes + options.kills + options.freezes
        )
        return await run_in(folder, options, lambda: bar.advance(steps))


def show(found: dict[str, Any]) -> None:
    table = Table(title="ordered faults", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in found.items():
        table.add_row(name, text_of(value))
    console.print(table)


def text_of(value: Any) -> str:
    """A figure, quantiles, or paragraphs."""
    if isinstance(value, dict):
        return (
            f"p50 {value['p50']:.3f}  p99 {value['p99']:.3f}  max {value['max']:.3f}  (of "
            f"{value['of']})"
        )
    if isinstance(value, list):
        return "\n\n".join(value) or "none"
    return value if isinstance(value, str) else f"{value:,}"


def main() -> int:
    chosen = parser().parse_args()
    if chosen.keep is not None:
        chosen.keep.mkdir(parents=True, exist_ok=True)
    with (
        nullcontext(str(chosen.keep))
        if chosen.keep is not None
        else tempfile.TemporaryDirectory() as folder
    ):
        result = asyncio.run(run(options_of(chosen), Path(folder), is_quiet=chosen.json))
    if chosen.json:
        sys.stdout.write(
            json.dumps(
                {**result.figures, "seed": chosen.seed, "found": dict(result.report.names)},
                indent=1,
            )
            + "\n"
        )
    else:
        show(result.figures)
    return 0 if result.ok else 1


if __name__ == "__main__":
    sys.exit(main())
