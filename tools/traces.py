"""Record what simulated or real groups and clusters do, and let TLC decide whether Replication.tla
or Ordering.tla allows it.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import ordersim.bugs
import sim.bugs
from specs import ordering_traces, replication_traces
from specs.model_checker import TraceVerdict
from specs.ordering_traces import NEEDS, check_observations, traced
from specs.replication_traces import check_replicas, trace
from specs.traced_cluster import a_replicated_run, an_ordered_run

Record = Callable[..., Any]
"""Records a trace: of a seed, of so many lines, of a planted bug, with the plan that a bug of this
name needs.
"""


def main() -> int:
    """Exit code 0: every trace is allowed, or, with --bugs, all were tried."""
    parser = argparse.ArgumentParser(description=__doc__, prog="tools/run traces")
    parser.add_argument(
        "--ordering",
        action="store_true",
        help="what clusters do with an ordered subject; --lines counts observations",
    )
    parser.add_argument(
        "--real",
        action="store_true",
        help="of real groups or clusters, each until its run is over; --seeds counts them",
    )
    parser.add_argument("--seeds", type=int, help="how many seeds (default: 20; with --bugs 100)")
    parser.add_argument(
        "--first", type=int, default=1, help="the first seed (default: %(default)s)"
    )
    parser.add_argument(
        "--lines", type=int, default=1_000, help="how long a trace may be (default: %(default)s)"
    )
    parser.add_argument(
        "--workers", type=int, default=1, help="traces checked at one time (default: %(default)s)"
    )
    parser.add_argument(
        "--bugs",
        action="store_true",
        help="show which of the simulator's planted bugs are refused within the seeds",
    )
    parser.add_argument(
        "--only", default="", help="with --bugs: only those whose name contains this"
    )
    options = parser.parse_args()
    if options.real and options.bugs:
        parser.error("the planted bugs are the simulators': leave out --real")
    record: Record = _ordering if options.ordering else _replication
    check: Callable[[Any, Path], TraceVerdict] = (
        check_observations if options.ordering else check_replicas
    )
    seeds = range(options.first, options.first + (options.seeds or (100 if options.bugs else 20)))
    if options.real:
        record = _real_ordering if options.ordering else _real_replication
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.workers) as pool:
        if options.bugs:
            bugs: Mapping[str, Any] = ordersim.bugs.BUGS if options.ordering else sim.bugs.BUGS
            chosen = {name: bug for name, bug in bugs.items() if options.only in name}
            return hunt(
                chosen,
                seeds,
                lambda *args: record(args[0], options.lines, *args[1:]),
                lambda found: check(found, Path(folder)),
            )
        begun, lines, refused = time.monotonic(), 0, 0
        verdicts = pool.map(
            lambda seed: check(record(seed, options.lines, None), Path(folder) / f"{seed}"), seeds
        )
        for seed, verdict in zip(seeds, verdicts, strict=True):
            lines += verdict.taken
            if not verdict.is_accepted:
                refused += 1
                print(
                    (
                        f"seed {seed}: line {verdict.taken + 1} of {verdict.lines} is refused: "
                        f"{verdict.refused}"
                    ),
                    flush=True,
                )
    print(
        f"{len(seeds)} traces, {lines:,} lines taken, {refused} traces refused, in "
        f"{time.monotonic() - begun:,.0f} s"
    )
    return 1 if refused else 0


def _replication(seed: int, lines_max: int, bug: Any, _: str = "") -> Any:
    return trace(seed, lines_max, bug)


def _ordering(seed: int, lines_max: int, bug: Any, needing: str = "") -> Any:
    return traced(seed, lines_max, bug, NEEDS.get(needing)).found


def _real_replication(*_: Any) -> Any:
    return asyncio.run(a_replicated_run())


def _real_ordering(*_: Any) -> Any:
    return asyncio.run(an_ordered_run()).found


def hunt(
    bugs: Mapping[str, Any],
    seeds: range,
    record: Callable[[int, Any, str], Any],
    check: Callable[[Any], TraceVerdict],
) -> int:
    """Print the first seed at which each planted bug is refused. Only traces that differ from the
    program's own are judged.
    """
    own = cache(lambda seed, needing: record(seed, None, needing))
    left_out = {**replication_traces.OUTSIDE, **ordering_traces.OUTSIDE}
    for name, bug in bugs.items():
        if name in left_out:
            print(f"{name}: outside the specification ({left_out[name]})")
            continue
        needing = name if name in NEEDS else ""
        allowed: list[int] = []
        refused = ""
        for seed in seeds:
            found = record(seed, bug, needing)
            if found == own(seed, needing):
                continue
            verdict = check(found)
            if not verdict.is_accepted:
                refused = (
                    f"refused at seed {seed}, line {verdict.taken + 1}: "
                    f"{(verdict.refused or {}).get('do')}"
                )
                break
            allowed.append(seed)
        met = f"allowed in seeds {', '.join(map(str, allowed))}" if allowed else "never met"
        print(f"{name}: {refused or met}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
