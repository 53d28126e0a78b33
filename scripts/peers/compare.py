"""QMQ beside its peers: the same work through each peer's Python client, on this machine, in alternating runs. docs/PEERS.md explains the
results.

`scripts/bench --peers` runs it. Each round starts each server again, warms it, and measures all rows; medians of the rounds are printed as
a table in Markdown, with QMQ's ratio to each peer. Only loopback is used.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Final

from fetch import cache_folder, fetch_all
from servers import PEERS, Missing, Peer
from session import END_TO_END, Figures, Session

WARM_S: Final = 2.0
OURS: Final = "QMQ"
ISOLATED: Final = "QMQ_PEERS_ISOLATED"
ROWS: Final = {
    "one task awaits each send": ("awaited", 100),
    "256 tasks await each send": ("awaited256", 100),
    "publish, 100 B": ("publish", 100),
    "backlog, one by one, 100 B": ("consume", 100),
    "end to end, one by one, 100 B": (END_TO_END, 100),
    "publish, 1 KB": ("publish", 1024),
    "backlog, one by one, 1 KB": ("consume", 1024),
}

Rounds = dict[str, dict[str, list[Figures]]]
"""By row, then by peer: a value for each round."""


def measure_peer(peer: Peer, cache: Path, python: Path, seconds: float, found: Rounds) -> None:
    """Measure the rows of `found` once, with a new server for each size."""
    rows = {row: ROWS[row] for row in found}
    for size in sorted({size for _, size in rows.values()}):
        server = peer.start(cache)
        try:
            session = Session(peer, server, python)
            session.row("publish", size, WARM_S)
            for row, (work, of_size) in rows.items():
                if of_size == size:
                    figures = session.row(work, size, seconds)
                    found[row].setdefault(peer.name, []).append(figures)
                    said = ", ".join(f"{name} {value:,.1f}" for name, value in figures.items())
                    sys.stderr.write(f"{peer.name}: {row}: {said}\n")
        finally:
            server.stop()


def medians(rounds: Rounds) -> dict[str, dict[str, Figures]]:
    return {
        row: {peer: {name: statistics.median(each[name] for each in values) for name in values[0]} for peer, values in peers.items()}
        for row, peers in rounds.items()
    }


def table(found: dict[str, dict[str, Figures]]) -> str:
    """Markdown: for each row, each peer's rate, QMQ's ratio to it, and CPU times."""
    lines = ["| row | | messages/s | QMQ / it | server, CPU us | client, CPU us |", "|---|---|---|---|---|---|"]
    for row, peers in found.items():
        ours = peers.get(OURS, {}).get("messages/s")
        for number, (peer, figures) in enumerate(peers.items()):
            rate = figures["messages/s"]
            ratio = f"{ours / rate:.2g}" if ours and peer != OURS else ""
            cpu = f"{figures['server, us']:.1f} | {figures['client, us']:.1f}"
            lines.append(f"| {'' if number else row} | {peer} | {rate:,.0f} | {ratio} | {cpu} |")
    return "\n".join(lines)


def draw(found: dict[str, dict[str, Figures]], path: Path) -> None:
    """A picture of the rates: a panel for each row, a bar for each peer."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    shown = {row: peers for row, peers in found.items() if peers}
    figure, panels = plt.subplots(len(shown), 1, figsize=(9, 1.9 * len(shown)), squeeze=False)
    for panel, (row, peers) in zip(panels[:, 0], shown.items(), strict=True):
        names = list(peers)[::-1]
        rates = [peers[name]["messages/s"] for name in names]
        bars = panel.barh(names, rates, color=["#1f6f5c" if name == OURS else "#9aa5b1" for name in names])
        panel.bar_label(bars, [f"{rate:,.0f}/s" for rate in rates], padding=3, fontsize=8)
        panel.set_title(row, loc="left", fontsize=10)
        panel.tick_params(labelsize=8)
        panel.set_xlim(0, max(rates) * 1.18)
        panel.xaxis.set_visible(False)
        for side in ("top", "right", "bottom"):
            panel.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, format=path.suffix[1:])


def isolate() -> None:
    """Continue in a network namespace that has loopback only, where this machine allows that."""
    inner = ["sh", "-c", 'ip link set lo up && exec "$0" "$@"', sys.executable, *sys.argv]
    for command in (["unshare", "--net"], ["unshare", "--map-root-user", "--net"]):
        if ISOLATED not in os.environ and subprocess.run([*command, "true"], capture_output=True).returncode == 0:
            os.execvpe(command[0], [*command, *inner], {**os.environ, ISOLATED: "yes"})


def main() -> None:
    options = argparse.ArgumentParser(prog="scripts/bench --peers", description=__doc__)
    options.add_argument("--runs", type=int, default=5)
    options.add_argument("--seconds", type=float, default=3.0, help="how long each row runs")
    options.add_argument("--peer", action="append", help="those whose name contains this; may be given again")
    options.add_argument("--row", action="append", help="those whose name contains this; may be given again")
    options.add_argument("--plot", type=Path, help="draw the rates into this file (.svg, .png)")
    options.add_argument("--json", type=Path, help="write all values into this file")
    chosen = options.parse_args()
    wanted = [peer for peer in PEERS if not chosen.peer or any(part.lower() in peer.name.lower() for part in chosen.peer)]
    cache = cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    python = fetch_all(cache)
    isolate()
    rounds: Rounds = {row: {} for row in ROWS if not chosen.row or any(part in row for part in chosen.row)}
    missing: dict[str, str] = {}
    for _ in range(chosen.runs):
        for peer in wanted:
            if peer.name not in missing:
                try:
                    measure_peer(peer, cache, python, chosen.seconds, rounds)
                except (Missing, RuntimeError) as failure:
                    missing[peer.name] = str(failure)
                    sys.stderr.write(f"{peer.name} is left out: {failure}\n")
            if chosen.json:
                chosen.json.write_text(json.dumps(rounds, indent=1) + "\n")
    found = medians(rounds)
    if chosen.plot:
        draw(found, chosen.plot)
    durable = "\n".join(f"* {peer.name}: {peer.durability}" for peer in wanted if peer.name not in missing)
    left_out = "\n".join(f"* {name} is left out: {why.splitlines()[0]}" for name, why in missing.items())
    sys.stdout.write(f"medians of {chosen.runs}\n\n{table(found)}\n\n{durable}\n{left_out}\n")


if __name__ == "__main__":
    main()
