"""The pages of the whole cluster.

*Overview*: findings and their reasons, rates and lag over time, the busiest subjects, and the
groups with the largest lag.

*Cluster*: broker groups, replicas, epochs and positions; a person can transfer a mastership, drain
a group and resume it.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

from starlette.responses import JSONResponse, Response

from qmq.console.cluster_look import ClusterWatch
from qmq.console.page import ConsolePage, RefusedRequest, Show
from qmq.console.wording import command
from qmq.errors import InvalidArgument
from qmq.model import check_name

ROWS: Final = 10


async def show_overview(page: ConsolePage) -> Response:
    """Show the overview."""
    watch = page.caller.watch
    look = await watch.latest()
    seen = watch.rates
    busiest = sorted(
        look.subjects,
        key=lambda each: (-seen.by_subject.get(each.name, 0.0), -each.produced, each.name),
    )[:ROWS]
    behind = [each for each in look.groups if each.lag_messages][:ROWS]
    readers = [each for each in look.readers if each.lag_messages or each.lost_messages][:ROWS]
    return await page.render(
        "overview.html",
        look=look,
        rates=seen,
        busiest=busiest,
        behind=behind,
        readers=readers,
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


async def show_cluster(page: ConsolePage) -> Response:
    """Show all broker groups and delay groups."""
    look = await page.caller.watch.latest()
    return await page.render(
        "cluster.html", look=look, command=command("cluster", "status"), make_command=command
    )


async def act_on_group(page: ConsolePage) -> Response:
    """Transfer, drain or resume one group. An action that takes messages away from a group requires
    the group's name as confirmation.
    """
    form, group = await page.form(), check_name("broker group", page.request.path_params["group"])
    verb, to = form.get("verb", ""), form.get("to", "").strip()
    if verb != "resume" and form.get("confirm", "").strip() != group:
        raise RefusedRequest(HTTPStatus.BAD_REQUEST, page.words("refused.confirm", name=group))
    metadata = page.mq.metadata
    if verb == "transfer":
        done = await metadata.transfer(group, to)
        return page.back(
            "/cluster",
            page.words(
                "cluster.transferred", group=group, master=done.master, refused=done.refused_ms
            ),
        )
    if verb == "drain":
        await metadata.set_group_mode(group, "read-only")
        return page.back("/cluster", page.words("cluster.drained", group=group))
    if verb == "resume":
        await metadata.set_group_mode(group, "read-write")
        return page.back("/cluster", page.words("cluster.resumed", group=group))
    raise InvalidArgument(f"a broker group is transferred, drained or resumed, not {verb!r}")


CLUSTER_PAGES: Final[tuple[tuple[str, Show], ...]] = (("/cluster", show_cluster),)
CLUSTER_ACTS: Final[tuple[tuple[str, Show], ...]] = (("/cluster/{group}", act_on_group),)
