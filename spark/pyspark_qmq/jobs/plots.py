"""Draws plots as SVG for embedding in a page: without network or display, and with the same bytes for the same plot.

Text stays text, so that people can search and copy it. Names come from users: matplotlib escapes them, and its mathematical notation is
turned off for them.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from pyspark_qmq.jobs.plot_data import Plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS: Final = ("#2563a8", "#d97706", "#3f8f5f", "#9a4f96", "#c2413a", "#64748b", "#0e8a96", "#a3833b")
INK: Final = "#3b4450"
GRID: Final = "#e3e6ea"
SERIES_MAX: Final = 8
"""More lines would be indistinguishable; the tables have all of them."""
NAMES_MAX: Final = 16
"""Labels along an axis; of more names, only every n-th is shown."""
LABEL_CHARS_MAX: Final = 28

_STYLE: Final[Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "axes.formatter.use_mathtext": False,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana"],
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": "#b8bec6",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "path.simplify": True,
}


def svg(plot: Plot, *, salt: str) -> str:
    """An `<svg>` element of a plot with values. `salt` makes ids unique among the plots of a page."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": salt}), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about letters that the measuring font lacks: the browser has others
        figure = Figure(figsize=(7.6, 3.2), layout="constrained")
        FigureCanvasSVG(figure)
        _draw(figure.add_subplot(), plot)
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return _embedded(file.getvalue())


def _embedded(document: str) -> str:
    """Remove the prologue, the fixed size, and unused ids of groups, which are the same in every plot."""
    found = document[document.index("<svg") :]
    found = re.sub(r'<g id="[^"]*"', "<g", found)
    return re.sub(r'(<svg[^>]*?) width="[^"]*"', r'\1 role="img"', re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", found, count=1), count=1)


def _draw(axes: Axes, plot: Plot) -> None:
    shown = list(plot.series.items())[:SERIES_MAX]
    {"bar": _bars, "line": _lines, "histogram": _bins, "cdf": _shares}[plot.kind](axes, plot.x, shown)
    axes.set_xlabel(plot.x_label)
    axes.set_ylabel(plot.y_label)
    if plot.log_x and plot.kind != "bar":
        axes.set_xscale("symlog", linthresh=1)  # Start at 0, which is a valid lag.
        axes.set_xlim(min(plot.x), max(plot.x))
    if plot.log_y and plot.kind != "cdf":
        axes.set_yscale("symlog", linthresh=1)
    if len(shown) > 1:
        axes.legend([_label(name) for name, _ in shown], loc="best", fontsize=8)
    _write_numbers_out(axes, plot)


def _write_numbers_out(axes: Axes, plot: Plot) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    def figure(value: float, _: Any) -> str:
        return f"{value:,.6g}" if abs(value) < 1e6 else f"{value:,.0f}"

    axes.yaxis.set_major_formatter(FuncFormatter(figure))
    if not plot.log_y and plot.kind != "cdf" and all(float(each).is_integer() for values in plot.series.values() for each in values):
        axes.yaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    if plot.kind in ("histogram", "cdf") or (plot.kind == "line" and isinstance(plot.x[0], int | float)):
        axes.xaxis.set_major_formatter(FuncFormatter(figure))


def _bars(axes: Axes, x: Sequence[Any], shown: list[tuple[str, Sequence[float]]]) -> None:
    width = 0.8 / len(shown)
    for place, (_, values) in enumerate(shown):
        left = [at - 0.4 + width * (place + 0.5) for at in range(len(x))]
        axes.bar(left, list(values), width=width * 0.94, color=COLOURS[place])
    step = -(-len(x) // NAMES_MAX)
    names = [_label(str(each)) for each in x]
    is_long = sum(map(len, names[::step])) > 90
    axes.set_xticks(range(0, len(x), step), names[::step], rotation=30 if is_long else 0, ha="right" if is_long else "center")
    axes.grid(False, axis="x")
    axes.set_ylim(bottom=min(0.0, *(float(each) for _, values in shown for each in values)))


def _lines(axes: Axes, x: Sequence[Any], shown: list[tuple[str, Sequence[float]]]) -> None:
    for place, (_, values) in enumerate(shown):
        axes.plot(list(x), list(values), color=COLOURS[place], linewidth=1.6, marker="o" if len(x) < 30 else None, markersize=3)


def _bins(axes: Axes, x: Sequence[Any], shown: list[tuple[str, Sequence[float]]]) -> None:
    for place, (_, values) in enumerate(shown):
        axes.stairs(list(values), list(x), color=COLOURS[place], fill=len(shown) == 1, linewidth=1.4, alpha=0.9)


def _shares(axes: Axes, x: Sequence[Any], shown: list[tuple[str, Sequence[float]]]) -> None:
    for place, (_, values) in enumerate(shown):
        axes.step(list(x), list(values), where="post", color=COLOURS[place], linewidth=1.6)
    axes.set_ylim(0, 1.02)


def _label(name: str) -> str:
    """A name for a plot: shortened, and without control characters, which XML forbids."""
    found = "".join(each if each.isprintable() else "\ufffd" for each in name)
    return found if len(found) <= LABEL_CHARS_MAX else found[: LABEL_CHARS_MAX - 1] + "…"
