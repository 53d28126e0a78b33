"""Record what simulated groups or clusters do, seed after seed, and let TLC decide whether Replication.tla or Ordering.tla allows it."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import ordersim.bugs
import sim.bugs
from specs.ordering_traces import check_ordering_seed
from specs.replication_traces import check_seed
from specs.trace_checker import TraceVerdict


def main() -> int:
    """Exit code 0: every trace is allowed, or, with --bugs, every planted bug's is refused that was tried."""
    parser = argparse.ArgumentParser(description=__doc__, prog="scripts/traces")
    parser.add_argument("--ordering", action="store_true", help="what clusters do with an ordered subject; --lines counts observations")
    parser.add_argument("--seeds", type=int, default=20, help="how many seeds (default: %(default)s)")
    parser.add_argument("--first", type=int, default=1, help="the first seed (default: %(default)s)")
    parser.add_argument("--lines", type=int, default=1_000, help="how long a trace may be (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=1, help="traces checked at one time (default: %(default)s)")
    parser.add_argument("--bugs", action="store_true", help="show which of the simulator's planted bugs are refused within the seeds")
    options = parser.parse_args()
    check: Callable[..., TraceVerdict] = check_ordering_seed if options.ordering else check_seed
    bugs: Mapping[str, Any] = ordersim.bugs.BUGS if options.ordering else sim.bugs.BUGS
    seeds = range(options.first, options.first + options.seeds)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.workers) as pool:

        def verdict_of(seed: int, bug: Any = None) -> TraceVerdict:
            return check(seed, options.lines, Path(folder) / f"{seed}", bug)

        if options.bugs:
            return hunt(bugs, seeds, verdict_of)
        begun, lines, refused = time.monotonic(), 0, 0
        for seed, verdict in zip(seeds, pool.map(verdict_of, seeds), strict=True):
            lines += verdict.taken
            if not verdict.is_accepted:
                refused += 1
                print(f"seed {seed}: line {verdict.taken + 1} of {verdict.lines} is refused: {verdict.refused}", flush=True)
    print(f"{len(seeds)} traces, {lines:,} lines taken, {refused} traces refused, in {time.monotonic() - begun:,.0f} s")
    return 1 if refused else 0


def hunt(bugs: Mapping[str, Any], seeds: range, verdict_of: Callable[[int, Any], TraceVerdict]) -> int:
    """Print the first seed at which each planted bug is refused."""
    for name, bug in bugs.items():
        refused = None
        for seed in seeds:
            verdict = verdict_of(seed, bug)
            if not verdict.is_accepted:
                refused = f"refused at seed {seed}, line {verdict.taken + 1}: {(verdict.refused or {}).get('do')}"
                break
        print(f"{name}: {refused or 'not refused'}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
