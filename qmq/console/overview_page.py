"""*Overview*: findings and their reasons, rates and lag over time, the busiest subjects, and the groups with the largest lag."""

from __future__ import annotations

from typing import Final

from starlette.responses import JSONResponse, Response

from qmq.console.cluster_watch import ClusterWatch
from qmq.console.command_lines import command
from qmq.console.page import ConsolePage, Show

ROWS: Final = 10


async def show_overview(page: ConsolePage) -> Response:
    """Show the overview."""
    watch = page.caller.watch
    look = await watch.latest()
    seen = watch.rates
    busiest = sorted(look.subjects, key=lambda each: (-seen.by_subject.get(each.name, 0.0), -each.produced, each.name))[:ROWS]
    behind = [each for each in look.groups if each.lag_messages][:ROWS]
    return await page.render(
        "overview.html",
        look=look,
        rates=seen,
        busiest=busiest,
        behind=behind,
        command=command("cluster", "status"),
    )


async def show_history(page: ConsolePage) -> Response:
    """Answer with the cluster's curves."""
    return await history(page.caller.watch)


async def history(watch: ClusterWatch) -> Response:
    """The points of a watch as columns, the form that uPlot draws."""
    await watch.latest()
    points = list(watch.points)
    columns = {
        "time_s": [each.time_s for each in points],
        "stored": [round(each.stored, 2) for each in points],
        "done": [round(each.done, 2) for each in points],
        "lag": [each.lag for each in points],
        "lag_s": [round(each.lag_s, 1) for each in points],
    }
    return JSONResponse(columns)


PAGES: Final[tuple[tuple[str, Show], ...]] = (("/", show_overview), ("/history.json", show_history))
