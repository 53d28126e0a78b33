"""Kill and stop the master of a three-replica group under load, repeatedly; check the whole
history; report how long writes were interrupted.

Exit status 1 if an acknowledged message was lost, a message was stored twice, or another checker
(tests/history) fails.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import statistics
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT / "tests"), str(ROOT / "scripts")]

from rich.console import Console  # noqa: E402
from rich.progress import Progress  # noqa: E402
from rich.table import Table  # noqa: E402
from system.group import describe  # noqa: E402
from system.workload import Workload  # noqa: E402

from bench.processes import ReplicaSet  # noqa: E402
from qmq.proto.v1 import control_pb2 as pb  # noqa: E402

console = Console()
errors = Console(stderr=True)


async def statuses(group: ReplicaSet) -> dict[str, pb.ReplicaStatus]:
    """The status of each replica."""
    found = {name: await describe(address) for name, address in group.control.items()}
    return {name: status for name, status in found.items() if status is not None}


async def settled(group: ReplicaSet) -> str:
    """Wait until all three replicas are in sync. Returns the master."""
    async with asyncio.timeout(60):
        while True:
            found = await statuses(group)
            masters = [name for name, each in found.items() if each.is_serving]
            if (
                len(found) == 3
                and len(masters) == 1
                and sum(peer.in_step for peer in found[masters[0]].peers) == 2
            ):
                return masters[0]
            await asyncio.sleep(0.05)


async def strike(group: ReplicaSet, work: Workload, name: str, kind: str) -> float:
    """Make one fault. Returns the seconds without an acknowledged write after it."""
    work.note(f"{kind} {name}")
    process = group.processes[name]
    before = max(len(work.ok_ns) - 1, 0)
    if kind == "kill":
        group.kill(name)
    else:
        process.send_signal(signal.SIGSTOP)
    async with asyncio.timeout(60):
        while not any(
            each.is_serving for other, each in (await statuses(group)).items() if other != name
        ):
            await asyncio.sleep(0.02)
    await work.wait_for_acks(200)
    gap_ns = max(b - a for a, b in pairwise(work.ok_ns[before:]))
    if kind == "kill":
        await asyncio.to_thread(group.start, name)
    else:
        await asyncio.sleep(random.uniform(0.5, 6.0))
        process.send_signal(signal.SIGCONT)
    return gap_ns / 1e9


async def run(kills: int, stops: int, flush: str, as_json: bool) -> dict[str, object]:
    """All faults, then the verdict."""
    group = ReplicaSet(3, "--flush", flush)
    with tempfile.TemporaryDirectory() as folder:
        try:
            work = Workload(group.address, "faults", Path(folder) / "history.jsonl")
            await work.start()
            await work.wait_for_acks(500)
            gaps: dict[str, list[float]] = {"kill": [], "stop": []}
            kinds = ["kill"] * kills + ["stop"] * stops
            random.shuffle(kinds)
            with Progress(console=errors, transient=True, disable=as_json) as bar:
                task = bar.add_task("faults", total=len(kinds))
                for kind in kinds:
                    gaps[kind].append(await strike(group, work, await settled(group), kind))
                    bar.advance(task)
            await settled(group)
            report = await work.stop()
        finally:
            group.stop()
    found: dict[str, object] = {
        "flush": flush,
        "kills of the master": kills,
        "stops of the master": stops,
        "acknowledged": report.counts["acked"],
        "anomalies": [str(each) for each in report.anomalies][:10],
        **{f"history: {name}": count for name, count in report.counts.items()},
    }
    for kind, each in gaps.items():
        if each:
            found[f"writes stood still after a {kind}, p50, s"] = round(statistics.median(each), 3)
            found[f"writes stood still after a {kind}, p99, s"] = round(
                sorted(each)[min(int(len(each) * 0.99), len(each) - 1)], 3
            )
    return found


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--kills", type=int, default=50)
    options.add_argument(
        "--stops", type=int, default=0, help="how often it is stopped (SIGSTOP), and wakes later"
    )
    options.add_argument("--flush", choices=("async", "sync"), default="async")
    options.add_argument("--json", action="store_true")
    chosen = options.parse_args()
    found = asyncio.run(run(chosen.kills, chosen.stops, chosen.flush, chosen.json))
    if chosen.json:
        sys.stdout.write(json.dumps(found, indent=1) + "\n")
    else:
        table = Table(title="faults", show_header=False)
        table.add_column()
        table.add_column(justify="right")
        for name, value in found.items():
            table.add_row(name, str(value))
        console.print(table)
    return 1 if found["anomalies"] else 0


if __name__ == "__main__":
    sys.exit(main())
