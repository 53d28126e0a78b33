"""QMQ beside its peers: the same work through each peer's client, on this machine, in alternating
runs. docs/PEERS.md explains the rows.

`scripts/bench --peers` runs it. In each run each system starts its server again, warms it, and
measures all rows; the order of the systems rotates. `--json` gets every value of every run, with
machine, commit, versions and settings; `bench/peers/page.py` writes the pages from it. `--record`
continues a record of the same commit that was interrupted. Only loopback is used.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import verdict
from fetch import cache_folder, fetch_all, versions
from rows import ROWS, Row
from servers import PEERS, Missing, Peer, Server
from session import Session, Times
from spark_rows import SPARK_ROWS, SYSTEMS, SparkRow, measure_spark

ROOT: Final = Path(__file__).parents[2]
ISOLATED: Final = "QMQ_PEERS_ISOLATED"
LIFE: Final = "start and memory"
"""The row that each new server fills:
time until it is ready, memory idle and after a million messages.
"""
MILLION: Final = 1_000_000
RUNS_MIN: Final = 3
MEASURED: Final = (
    "qmq",
    "coordination",
    "replication",
    "ordering",
    "spark",
    "bench",
    "pyproject.toml",
    "requirements.lock",
)
"""What figures depend on. The rest of the tree may change while a record is made."""

Found = dict[str, dict[str, list[verdict.Figures]]]
"""By row, then by system: the figures of each run."""


class Comparison:
    """The runs so far. `missing`: (system, row) and why it has no figure. `turns`: (run, system)
    that are whole.
    """

    def __init__(
        self, rows: Sequence[Row], spark_rows: Sequence[SparkRow], python: Path, times: Times
    ) -> None:
        self._rows, self._spark_rows, self._python, self._times = rows, spark_rows, python, times
        self.found: Found = {LIFE: {}, **{row.name: {} for row in (*rows, *spark_rows)}}
        self.missing: dict[str, str] = {}
        self.turns: list[list[Any]] = []

    def take_up(self, whole: Mapping[str, Any]) -> None:
        """Continue what was written."""
        self.found, self.missing, self.turns = whole["rows"], whole["missing"], whole["turns"]

    def measure(self, peer: Peer, cache: Path, _: int) -> None:
        """All rows once: on one server, on one that flushes,
        and on new ones for the rows that want these.
        """
        wanted = [row for row in self._rows if not row.needs or row.needs in peer.offers]
        shared = [row for row in wanted if not row.fresh and not row.is_flushed]
        flushed = [row for row in wanted if row.is_flushed]
        for rows in (shared, flushed, *([row] for row in wanted if row.fresh)):
            if rows:
                self._on_a_server(peer, cache, rows)

    def measure_spark(self, cache: Path, run: int) -> None:
        """Spark's rows once."""

        def tell(row: str, system: str, told: verdict.Figures | Exception) -> None:
            if isinstance(told, Exception):
                self._leave_out(system, row, told)
            else:
                self._keep(system, row, told)

        if self._spark_rows:
            try:
                measure_spark(self._spark_rows, cache, self._python, self._times, run, tell)
            except (RuntimeError, KeyError) as failure:
                self._leave_out("Spark", "every row", failure)

    def _on_a_server(self, peer: Peer, cache: Path, rows: Sequence[Row]) -> None:
        is_flushed = rows[0].is_flushed
        begin_s = time.monotonic()
        try:
            server = peer.start(cache, is_flushed)
        except (Missing, RuntimeError) as failure:
            self._leave_out(peer.name, "every row", failure)
            return
        try:
            ready_s = time.monotonic() - begin_s
            session = Session(peer, server, self._python, is_flushed=is_flushed)
            if not rows[0].fresh and not is_flushed:
                self._live(peer, server, session, ready_s)
            for row in rows:
                try:
                    figures = session.measure(row, self._times)
                except (Missing, RuntimeError, KeyError) as failure:
                    self._leave_out(peer.name, row.name, failure)
                else:
                    self._keep(peer.name, row.name, figures)
        finally:
            server.stop()

    def _live(self, peer: Peer, server: Server, session: Session, ready_s: float) -> None:
        """Start, memory, and a million messages, which warm the server."""
        figures = {"ready, s": ready_s, "idle, MiB": server.memory_mib()}
        try:
            session.fill(MILLION if "disk" in peer.offers else MILLION // 10, 100)
        except RuntimeError as failure:
            self._leave_out(peer.name, LIFE, failure)
            return
        self._keep(peer.name, LIFE, {**figures, "after messages, MiB": server.memory_mib()})

    def whole(self, said: Mapping[str, Any], runs: int) -> dict[str, Any]:
        return {
            **said,
            "runs": runs,
            "rows": self.found,
            "missing": self.missing,
            "turns": self.turns,
        }

    def _keep(self, system: str, row: str, figures: verdict.Figures) -> None:
        self.found[row].setdefault(system, []).append(figures)
        said = ", ".join(f"{name} {value:,.6g}" for name, value in figures.items())
        sys.stderr.write(f"{system}: {row}: {said}\n")

    def _leave_out(self, system: str, row: str, failure: Exception) -> None:
        self.missing[f"{system}: {row}"] = str(failure).strip() or repr(failure)
        sys.stderr.write(f"{system}: {row} is left out: {failure}\n")


def turns(runs: int, systems: Sequence[str]) -> list[tuple[int, str]]:
    """Which system is measured in which run, in order: each run begins with another system."""
    return [
        (run, systems[(run + place) % len(systems)])
        for run in range(runs)
        for place in range(len(systems))
    ]


def git(*words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


def is_same_tree(commit: str) -> bool:
    """Whether nothing that is measured has changed since this commit."""
    return (
        subprocess.run(
            ["git", "diff", "--quiet", commit, "HEAD", "--", *MEASURED],
            cwd=ROOT,
            capture_output=True,
        ).returncode
        == 0
    )


def machine() -> dict[str, Any]:
    processor = [
        line.split(":")[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    memory_kib = int(Path("/proc/meminfo").read_text().split()[1])
    return {
        "cores": os.cpu_count(),
        "processor": (processor or ["unknown"])[0],
        "memory, GiB": round(memory_kib / 1024**2),
    }


def isolate() -> None:
    """Continue in a network namespace that has loopback only, where this machine allows that."""
    inner = ["sh", "-c", 'ip link set lo up && exec "$0" "$@"', sys.executable, *sys.argv]
    for command in (["unshare", "--net"], ["unshare", "--map-root-user", "--net"]):
        if (
            ISOLATED not in os.environ
            and subprocess.run([*command, "true"], capture_output=True).returncode == 0
        ):
            os.execvpe(command[0], [*command, *inner], {**os.environ, ISOLATED: "yes"})


def options() -> argparse.Namespace:
    found = argparse.ArgumentParser(prog="scripts/bench --peers", description=__doc__)
    found.add_argument("--runs", type=int, default=3)
    found.add_argument(
        "--seconds", type=float, default=5.0, help="how long producers send in each row"
    )
    found.add_argument("--warm", type=float, default=3.0, help="how long each row's clients warm")
    found.add_argument(
        "--peer", action="append", help="those whose name contains this; may be given again"
    )
    found.add_argument(
        "--row", action="append", help="those whose name contains this; may be given again"
    )
    found.add_argument("--json", type=Path, help="write all values into this file")
    found.add_argument(
        "--record",
        action="store_true",
        help="write them into docs/peers.json, and the pages from it",
    )
    return found.parse_args()


def is_named(name: str, parts: Sequence[str] | None) -> bool:
    """Whether the name contains one of these, if any are given."""
    return not parts or any(part.lower() in name.lower() for part in parts)


def main() -> int:
    chosen = options()
    is_part = chosen.runs < RUNS_MIN or chosen.seconds < 5 or chosen.peer or chosen.row
    if chosen.record and (is_part or git("status", "--porcelain", "--", *MEASURED)):
        sys.stderr.write(
            f"--record wants {RUNS_MIN} runs or more of all rows and systems, of 5 s or "
            "more, of committed code\n"
        )
        return 2
    wanted = [peer for peer in PEERS if is_named(peer.name, chosen.peer)]
    rows = [row for row in ROWS if is_named(row.name, chosen.row)]
    spark_rows = [
        row.of([system for system in row.ways if is_named(system, chosen.peer)])
        for row in SPARK_ROWS
    ]
    spark_rows = [row for row in spark_rows if row.ways and is_named(row.name, chosen.row)]
    cache = cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    python = fetch_all(cache)
    isolate()
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit("ended")
    )  # servers are stopped on the way out
    comparison = Comparison(rows, spark_rows, python, Times(chosen.warm, chosen.seconds))
    said = {
        "command": "scripts/bench --peers " + " ".join(sys.argv[1:]),
        "commit": git("rev-parse", "HEAD"),
        "machine": machine(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "versions": versions(cache, python),
        "systems": {
            **{
                peer.name: {"durability": peer.durability, "settings": peer.settings}
                for peer in wanted
            },
            **{
                name: said
                for name, said in SYSTEMS.items()
                if any(name in row.ways for row in spark_rows)
            },
        },
    }
    path = ROOT / "docs" / "peers.json" if chosen.record else chosen.json
    if chosen.record and path.exists():
        begun = json.loads(path.read_text())
        if is_same_tree(begun["commit"]) and all(
            begun[each] == said[each] for each in ("machine", "versions", "systems")
        ):
            comparison.take_up(begun)
    measures: dict[str, Callable[[int], None]] = {
        peer.name: partial(comparison.measure, peer, cache) for peer in wanted if rows
    }
    if spark_rows:
        measures["Spark"] = partial(comparison.measure_spark, cache)
    for run, name in turns(chosen.runs, list(measures)):
        if [run, name] not in comparison.turns:
            measures[name](run)
            comparison.turns.append([run, name])
            if path:
                path.write_text(json.dumps(comparison.whole(said, run + 1), indent=1) + "\n")
    whole = comparison.whole(said, chosen.runs)
    import page

    sys.stdout.write(page.tables(whole) + "\n")
    if chosen.record:
        page.write_pages(whole)
    return 0


if __name__ == "__main__":
    sys.exit(main())
