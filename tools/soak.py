"""A long run at a fraction of a node's maximum load: consumers start, stop, hang and crash, and one
message of a hundred always fails.

Exit status 1 if a message was lost or became a dead letter wrongly, or if memory, file handles or
threads grew. --out writes samples as JSON and, if matplotlib is installed, as a plot.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT / "tests"), str(ROOT / "scripts")]

from rich.console import Console  # noqa: E402
from rich.progress import Progress  # noqa: E402
from rich.table import Table  # noqa: E402
from system.soak_run import Report, Soak  # noqa: E402


def rows_of(report: Report) -> list[tuple[str, str]]:
    verdict = report.verdict
    rows = [
        ("seed", str(report.seed)),
        ("minutes", f"{report.seconds / 60:g}"),
        ("taken at full load, messages/s", f"{report.capacity:,.0f}"),
        (f"sent at {report.load:.0%}, messages/s", f"{report.rate:,.0f}"),
        ("events", ", ".join(f"{name} {count}" for name, count in sorted(report.events.items()))),
        ("messages acknowledged", f"{verdict.sent:,}"),
        ("handled", f"{verdict.handled:,}"),
        ("handled again", f"{verdict.handled_again:,}"),
        ("in the dead-letter queue", f"{verdict.dead_lettered:,}"),
        ("of those by lost consumers", f"{verdict.lost_consumers_dead_lettered:,}"),
    ]
    for name, samples in report.samples.items():
        first, last = samples[len(samples) // 4], samples[-1]
        memory = f"{first.rss_mib:.0f} → {last.rss_mib:.0f} MiB"
        counts = (
            f"{first.handles} → {last.handles} handles, {first.threads} → {last.threads} threads"
        )
        rows.append((f"{name}, after a quarter → at the end", f"{memory}, {counts}"))
    return [*rows, ("anomalies", "\n".join(report.anomalies) or "none")]


def plot(report: Report, path: Path) -> None:
    """Memory over time, of each process that was watched. Does nothing without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure = Figure(figsize=(8, 4))
    axes = figure.add_subplot()
    for name, samples in report.samples.items():
        axes.plot(
            [each.time_s / 60 for each in samples], [each.rss_mib for each in samples], label=name
        )
    axes.set(
        xlabel="minutes",
        ylabel="resident memory, MiB",
        ylim=(0, None),
        title=f"soak at {report.rate:,.0f} messages/s",
    )
    axes.legend()
    figure.savefig(path)


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--minutes", type=float, default=30.0)
    options.add_argument(
        "--load", type=float, default=0.7, help="fraction of the node's maximum load"
    )
    options.add_argument("--seed", type=int, default=random.randrange(10**6))
    options.add_argument("--out", type=Path, default=None, help="a folder for samples and plot")
    options.add_argument("--secure", action="store_true", help="use TLS and enforced rules")
    options.add_argument("--json", action="store_true")
    chosen = options.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="qmq-soak-"))
    with Progress(console=Console(stderr=True), transient=True, disable=chosen.json) as bar:
        task = bar.add_task("starting", total=1.0)
        soak = Soak(
            folder,
            chosen.minutes * 60,
            seed=chosen.seed,
            load=chosen.load,
            progress=lambda what, share: bar.update(task, description=what, completed=share),
            secure=chosen.secure,
        )
        report = asyncio.run(soak.run())
    if not report.anomalies:
        shutil.rmtree(folder, ignore_errors=True)
    if chosen.out is not None:
        chosen.out.mkdir(parents=True, exist_ok=True)
        (chosen.out / "soak.json").write_text(report.to_json())
        plot(report, chosen.out / "soak.png")
    if chosen.json:
        sys.stdout.write(json.dumps(dict(rows_of(report)), indent=1, ensure_ascii=False) + "\n")
    else:
        table = Table(title="soak", show_header=False)
        table.add_column()
        table.add_column()
        for row in rows_of(report):
            table.add_row(*row)
        Console().print(table)
    return 1 if report.anomalies else 0


if __name__ == "__main__":
    sys.exit(main())
