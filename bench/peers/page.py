"""The blocks of pages that come from docs/peers.json: between `<!-- peers: NAME -->` and `<!-- end
of peers -->`.

`python bench/peers/page.py` writes them; `tests/scripts/test_peers.py` fails when a page differs.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import verdict

ROOT: Final = Path(__file__).parents[2]
RECORD: Final = ROOT / "docs" / "peers.json"
PAGES: Final = ("README.md", "docs/PEERS.md", "docs/BENCH.md", "docs/zh/README.md")
BLOCK: Final = re.compile(r"(<!-- peers: ([a-z ]+) -->\n).*?(<!-- end of peers -->)", re.DOTALL)
OURS: Final = "QMQ"

SOURCE: Final = "{command}, commit {commit}, {runs} runs: medians (least to most); {machine}"

Whole = Mapping[str, Any]
Range = tuple[float, float, float]

CHINESE: Final[dict[str, str]] = json.loads(
    Path(__file__).with_name("words.zh.json").read_text(encoding="utf-8")
)


def number(value: float) -> str:
    """Three figures that count."""
    if value >= 1e6:
        return f"{value / 1e6:.3g} M"
    if value >= 1e4:
        return f"{value / 1e3:.3g} k"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def ranged(value: Range) -> str:
    """The median, and the least and most."""
    return f"{number(value[0])} ({number(value[1])} to {number(value[2])})"


def tables(whole: Whole) -> str:
    """Each row: each system's median and range, CPU times, and how many times as good QMQ is."""
    return "\n\n".join(
        [table(name, systems) for name, systems in whole["rows"].items() if systems]
        + [left_out(whole)]
        + [said(whole)]
    )


def table(name: str, systems: Mapping[str, list[verdict.Figures]]) -> str:
    found = {system: verdict.summary(runs) for system, runs in systems.items()}
    names = list(dict.fromkeys(each for figures in found.values() for each in figures))
    rated = verdict.RATE in names
    lines = [
        f"**{name}**",
        "",
        f"| | {' | '.join(names)} |{' QMQ / it |' if rated else ''}",
        f"|---|{'---|' * (len(names) + rated)}",
    ]
    for system, figures in found.items():
        cells = [ranged(figures[each]) if each in figures else "" for each in names]
        if rated:
            cells.append(
                f"{verdict.ratio(found[OURS], figures):.2g}"
                if OURS in found and system != OURS
                else ""
            )
        lines.append(f"| {system} | {' | '.join(cells)} |")
    return "\n".join(lines)


def best_of(
    found: Mapping[str, Mapping[str, Range]], figure: str
) -> tuple[str, Range, float] | None:
    """The best of the others by a figure: its name, its figure, and how many times as good QMQ
    is.
    """
    others = {
        name: (figures[figure], verdict.times_as_good(figure, found[OURS], figures))
        for name, figures in found.items()
        if name != OURS and figure in figures
    }
    if not others:
        return None
    name = min(others, key=lambda each: others[each][1])
    return name, *others[name]


def short(whole: Whole, said_as: Callable[[str], str] = str) -> str:
    """Each row in one line: QMQ, the best of the others, and the ratio of the medians. A row that
    QMQ loses is bold. `said_as` gives a row's, a figure's or a heading's words.
    """
    head = [said_as(each) for each in ("QMQ", "the best peer", "times as good")]
    lines = [f"| | {head[0]} | {head[1]} | | {head[2]} |", "|---|---|---|---|---|"]
    for name, systems in whole["rows"].items():
        found = {system: verdict.summary(runs) for system, runs in systems.items()}
        for figure in verdict.said_first(found.get(OURS, {})):
            best = best_of(found, figure)
            if best is None:
                continue
            system, theirs, times = best
            bold = "**" if times < 1 else ""
            lines.append(
                f"| {bold}{said_as(name)}{bold}: {said_as(figure)} | {ranged(found[OURS][figure])} "
                f"| {system} | {ranged(theirs)} | {bold}{times:.2g}{bold} |"
            )
    lines += [
        "",
        said_as(SOURCE).format(
            command=f"`{whole['command']}`",
            commit=whole["commit"][:12],
            runs=whole["runs"],
            machine=of_machine(whole),
        ),
    ]
    return "\n".join(lines)


def chinese(words: str) -> str:
    """The words of the short table on the Chinese page. Raises KeyError for words that it lacks."""
    return CHINESE[words]


def left_out(whole: Whole) -> str:
    return "\n".join(
        f"* Left out: {name}: {why.splitlines()[-1][:200]}"
        for name, why in whole["missing"].items()
    )


def of_machine(whole: Whole) -> str:
    machine = whole["machine"]
    return f"{machine['cores']} cores, {machine['processor']}, {machine['memory, GiB']} GiB"


def said(whole: Whole) -> str:
    """Command, machine, commit, versions and settings."""
    lines = [
        (
            f"* `{whole['command']}` of {whole['date']}, commit {whole['commit'][:12]}, "
            f"{whole['runs']} runs; medians, least and most."
        ),
        f"* {of_machine(whole)}.",
        "* " + ", ".join(f"{name} {version}" for name, version in whole["versions"].items()) + ".",
    ]
    lines += [
        f"* {name}: {each['durability']}. Settings: {each['settings']}."
        for name, each in whole["systems"].items()
    ]
    return "\n".join(lines)


BLOCKS: Final[dict[str, Callable[[Whole], str]]] = {
    "all": tables,
    "short": short,
    "short zh": lambda whole: short(whole, chinese),
}


def filled(text: str, whole: Whole) -> str:
    """A page with its blocks made from the record.
    Raises KeyError for a block that there is not.
    """
    return BLOCK.sub(lambda found: f"{found[1]}{BLOCKS[found[2]](whole)}\n{found[3]}", text)


def write_pages(whole: Whole) -> None:
    for each in PAGES:
        path = ROOT / each
        if path.exists():
            path.write_text(filled(path.read_text(), whole))


if __name__ == "__main__":
    if not RECORD.exists():
        sys.exit("docs/peers.json is not there: scripts/bench --peers --record makes it")
    write_pages(json.loads(RECORD.read_text()))
