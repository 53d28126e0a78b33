"""A job's report and its plots: values, and their output formats.

A job makes one `Report`, which has four outputs: text for a terminal, a self-contained HTML page
(no network, no scripts), JSON for programs, and Parquet for further queries. User data (names,
keys, tags, bodies) is never treated as markup: all text on the page is escaped by Jinja or
matplotlib.

Plots are drawn as SVG for embedding in a page: without network or display, and with the same bytes
for the same plot. Text stays text, so that people can search and copy it. Names come from users:
matplotlib escapes them, and its mathematical notation is turned off for them.
"""

from __future__ import annotations

import io
import json
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from decimal import Decimal
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from pyspark.sql import DataFrame


@dataclass(frozen=True, slots=True)
class Plot:
    """A plot with one x axis for all series.

    bar: x has names, one per bar. line: x has numbers or times. histogram: x has the edges of bins,
    so each series is one shorter. cdf: x has ascending values, and a series has the share (0 to 1)
    at or below each.
    """

    title: str
    kind: Literal["bar", "line", "histogram", "cdf"]
    x: Sequence[Any]
    series: Mapping[str, Sequence[float]]
    x_label: str = ""
    y_label: str = ""
    log_x: bool = False
    log_y: bool = False

    def __post_init__(self) -> None:
        expected = max(len(self.x) - 1, 0) if self.kind == "histogram" else len(self.x)
        assert all(len(each) == expected for each in self.series.values()), (
            f"plot {self.title!r}: series and x do not fit"
        )

    @property
    def has_values(self) -> bool:
        """Whether there are values to draw."""
        return any(len(each) for each in self.series.values())


PAGE_ROWS_MAX: Final = 500
"""The rows of a table shown on the page; Parquet and JSON have all rows."""

TEXT_ROWS_MAX: Final = 40
"""The rows of a table shown in a terminal."""

_NAME: Final = re.compile(r"[a-z0-9_]{1,100}")


@dataclass(frozen=True, slots=True)
class ReportTable:
    """A table for a page. `name` is also a file name: lower-case letters, digits and _."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[object, ...], ...]
    name: str

    def __post_init__(self) -> None:
        assert _NAME.fullmatch(self.name), f"{self.name!r} is not a valid file name"
        assert all(len(row) == len(self.columns) for row in self.rows), (
            f"table {self.name}: rows and columns do not fit"
        )


@dataclass(frozen=True, slots=True)
class Report:
    """The results of a job."""

    job: str
    headline: str
    """The result in one sentence."""
    is_clean: bool
    """Whether there are no findings."""
    facts: Mapping[str, object] = field(default_factory=dict)
    """The input and the figures, in reading order."""
    tables: tuple[ReportTable, ...] = ()
    plots: tuple[Plot, ...] = ()
    counterexample: str = ""
    """Lines that describe one finding in full."""
    details: Mapping[str, DataFrame] = field(default_factory=dict)
    """Data too large for a page, by name as in `ReportTable`.
    It is computed only for the Parquet output.
    """
    folder: str = ""
    """The subfolder of `--out` to write to; empty: `--out` itself."""


class Made(NamedTuple):
    """When and by which command a report was made."""

    time: datetime
    command: str


def plain(value: object) -> Any:
    """A cell for JSON. Bytes become text if they are UTF-8, otherwise `hex:00ff` (as `qmq dlq`
    writes keys). NaN becomes null. Half of a surrogate pair, which no file can hold, becomes its
    escape.
    """
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, bytes | bytearray):
        return _bytes_text(bytes(value))
    if isinstance(value, datetime):
        aware = value if value.tzinfo else value.replace(tzinfo=UTC)
        return aware.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    if isinstance(value, Mapping):
        return {plain(str(key)): plain(each) for key, each in value.items()}
    if isinstance(value, Sequence):
        return [plain(each) for each in value]
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    return value.isoformat() if isinstance(value, date) else str(value)


def _bytes_text(value: bytes) -> str:
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return f"hex:{value.hex()}"
    return text if text.isprintable() else f"hex:{value.hex()}"


def cell(value: object) -> str:
    """A cell for people: commas between thousands, three decimals, lists on one line."""
    found = plain(value)
    if found is None:
        return ""
    if isinstance(found, bool):
        return "yes" if found else "no"
    if isinstance(found, int):
        return f"{found:,}"
    if isinstance(found, float):
        return (
            f"{found:,.3f}".rstrip("0").rstrip(".")
            if abs(found) >= 0.001 or found == 0
            else f"{found:.3g}"
        )
    if isinstance(found, list) and all(isinstance(each, str) for each in found):
        return ", ".join(found)
    return found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)


def summary(report: Report) -> dict[str, Any]:
    """The report as JSON for programs, without plots."""
    return {
        "job": report.job,
        "headline": report.headline,
        "is_clean": report.is_clean,
        "facts": plain(report.facts),
        "tables": [
            {
                "name": each.name,
                "title": each.title,
                "columns": list(each.columns),
                "rows": plain(each.rows),
            }
            for each in report.tables
        ],
        "counterexample": report.counterexample,
        "details": list(report.details),
    }


def write(report: Report, folder: Path, made: Made) -> Path:
    """Write page, JSON and Parquet to a folder, replacing those of an earlier run. Returns the
    page's path. Raises OSError.
    """
    folder = folder / report.folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in report.details.items():
        rows.write.mode("overwrite").parquet(str(folder / f"{name}.parquet"))
    for table in report.tables:
        if table.name not in report.details:
            _write_table(table, folder / f"{table.name}.parquet")
    whole = {
        "made": plain(made.time),
        "command": made.command,
        **summary(report),
        "plots": [_plot_summary(each) for each in report.plots],
    }
    (folder / f"{report.job}.json").write_text(
        json.dumps(whole, indent=1, ensure_ascii=False) + "\n"
    )
    page = folder / f"{report.job}.html"
    page.write_text(html(report, made))
    return page


def _plot_summary(plot: Plot) -> dict[str, Any]:
    labels = {
        "title": plot.title,
        "kind": plot.kind,
        "x_label": plot.x_label,
        "y_label": plot.y_label,
    }
    return {**labels, "x": plain(plot.x), "series": plain(plot.series)}


def _write_table(table: ReportTable, path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = [[row[place] for row in table.rows] for place in range(len(table.columns))]
    pq.write_table(pa.table([_array(each) for each in columns], names=list(table.columns)), path)


def _array(values: list[object]) -> Any:
    import pyarrow as pa

    try:
        is_mixed = {str, bytes} <= {type(value) for value in values}
        found = pa.array([plain(value) for value in values] if is_mixed else values)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OverflowError):
        found = pa.array([None if value is None else cell(value) for value in values], pa.string())
    return (
        found.cast(pa.string()) if pa.types.is_null(found.type) else found
    )  # Spark cannot read a column without a type.


def html(report: Report, made: Made) -> str:
    """The report as a self-contained HTML page."""
    import jinja2

    loader = jinja2.PackageLoader("pyspark_qmq.jobs", ".")
    world = jinja2.Environment(
        loader=loader,
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    world.filters["cell"] = cell
    world.tests["figure"] = lambda value: (
        isinstance(value, int | float | Decimal) and not isinstance(value, bool)
    )
    pictures = [
        (each.title, svg(each, salt=f"{report.job}{place}") if each.has_values else "")
        for place, each in enumerate(report.plots)
    ]
    page = world.get_template("report.html.j2").render(
        report=report,
        made=made,
        pictures=pictures,
        rows_max=PAGE_ROWS_MAX,
        title=report.job.replace("_", " "),
    )
    return str(page)


def text(report: Report, page: Path | None) -> str:
    """The report for a terminal."""
    lines = [("clean: " if report.is_clean else "FINDINGS: ") + report.headline, ""]
    width = max((len(name) for name in report.facts), default=0)
    lines += [f"  {name:<{width}}  {cell(value)}" for name, value in report.facts.items()]
    for table in report.tables:
        lines += ["", *(_table_lines(table) if table.rows else [f"{table.title}: none"])]
    if report.counterexample:
        lines += ["", *(f"  {line}" for line in report.counterexample.splitlines())]
    if page is not None:
        lines += ["", f"report: {page}"]
    return _visible("\n".join(lines)) + "\n"


def _visible(shown: str) -> str:
    """Text without control characters, because user data must not control the terminal."""
    return "".join(each if each.isprintable() or each == "\n" else "\ufffd" for each in shown)


def _table_lines(table: ReportTable) -> list[str]:
    shown = [
        [cell(value).replace("\n", " ") for value in row] for row in table.rows[:TEXT_ROWS_MAX]
    ]
    is_right = [
        all(isinstance(row[place], int | float | None) for row in table.rows)
        for place in range(len(table.columns))
    ]
    widths = [max(map(len, column)) for column in zip_longest(table.columns, *shown, fillvalue="")]

    def line(cells: Sequence[str]) -> str:
        padded = [
            each.rjust(width) if right else each.ljust(width)
            for each, width, right in zip(cells, widths, is_right, strict=True)
        ]
        return "  " + "  ".join(padded).rstrip()

    lines = [
        table.title,
        line(table.columns),
        "  " + "  ".join("─" * width for width in widths),
        *map(line, shown),
    ]
    if len(table.rows) > len(shown):
        lines.append(f"  … and {len(table.rows) - len(shown):,} more")
    return lines


COLOURS: Final = (
    "#2563a8",
    "#d97706",
    "#3f8f5f",
    "#9a4f96",
    "#c2413a",
    "#64748b",
    "#0e8a96",
    "#a3833b",
)
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
    """An `<svg>` element of a plot with values.
    `salt` makes ids unique among the plots of a page.
    """
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": salt}), warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # about letters that the measuring font lacks: the browser has others
        figure = Figure(figsize=(7.6, 3.2), layout="constrained")
        FigureCanvasSVG(figure)
        _draw(figure.add_subplot(), plot)
        file = io.StringIO()
        figure.savefig(
            file, format="svg", transparent=True, metadata={"Date": None, "Creator": None}
        )
    return _embedded(file.getvalue())


def _embedded(document: str) -> str:
    """Remove the prologue, the fixed size, and unused ids of groups,
    which are the same in every plot.
    """
    found = document[document.index("<svg") :]
    found = re.sub(r'<g id="[^"]*"', "<g", found)
    return re.sub(
        r'(<svg[^>]*?) width="[^"]*"',
        r'\1 role="img"',
        re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", found, count=1),
        count=1,
    )


def _draw(axes: Axes, plot: Plot) -> None:
    shown = list(plot.series.items())[:SERIES_MAX]
    {"bar": _bars, "line": _lines, "histogram": _bins, "cdf": _shares}[plot.kind](
        axes, plot.x, shown
    )
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
    if (
        not plot.log_y
        and plot.kind != "cdf"
        and all(float(each).is_integer() for values in plot.series.values() for each in values)
    ):
        axes.yaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    if plot.kind in ("histogram", "cdf") or (
        plot.kind == "line" and isinstance(plot.x[0], int | float)
    ):
        axes.xaxis.set_major_formatter(FuncFormatter(figure))


def _bars(axes: Axes, x: Sequence[Any], shown: list[tuple[str, Sequence[float]]]) -> None:
    width = 0.8 / len(shown)
    for place, (_, values) in enumerate(shown):
        left = [at - 0.4 + width * (place + 0.5) for at in range(len(x))]
        axes.bar(left, list(values), width=width * 0.94, color=COLOURS[place])
    step = -(-len(x) // NAMES_MAX)
    names = [_label(str(each)) for each in x]
    is_long = sum(map(len, names[::step])) > 90
    axes.set_xticks(
        range(0, len(x), step),
        names[::step],
        rotation=30 if is_long else 0,
        ha="right" if is_long else "center",
    )
    axes.grid(False, axis="x")
    axes.set_ylim(bottom=min(0.0, *(float(each) for _, values in shown for each in values)))


def _lines(axes: Axes, x: Sequence[Any], shown: list[tuple[str, Sequence[float]]]) -> None:
    for place, (_, values) in enumerate(shown):
        axes.plot(
            list(x),
            list(values),
            color=COLOURS[place],
            linewidth=1.6,
            marker="o" if len(x) < 30 else None,
            markersize=3,
        )


def _bins(axes: Axes, x: Sequence[Any], shown: list[tuple[str, Sequence[float]]]) -> None:
    for place, (_, values) in enumerate(shown):
        axes.stairs(
            list(values),
            list(x),
            color=COLOURS[place],
            fill=len(shown) == 1,
            linewidth=1.4,
            alpha=0.9,
        )


def _shares(axes: Axes, x: Sequence[Any], shown: list[tuple[str, Sequence[float]]]) -> None:
    for place, (_, values) in enumerate(shown):
        axes.step(list(x), list(values), where="post", color=COLOURS[place], linewidth=1.6)
    axes.set_ylim(0, 1.02)


def _label(name: str) -> str:
    """A name for a plot: shortened, and without control characters, which XML forbids."""
    found = "".join(each if each.isprintable() else "\ufffd" for each in name)
    return found if len(found) <= LABEL_CHARS_MAX else found[: LABEL_CHARS_MAX - 1] + "…"
