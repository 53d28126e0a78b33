"""*Cluster*: broker groups, replicas, epochs and positions; a person can transfer a mastership, drain a group and resume it."""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

from starlette.responses import Response

from qmq.console.command_lines import command
from qmq.console.page import ConsolePage, RefusedRequest, Show
from qmq.errors import InvalidArgument
from qmq.model import check_name


async def show_cluster(page: ConsolePage) -> Response:
    """Show all broker groups and delay groups."""
    look = await page.caller.watch.latest()
    return await page.render("cluster.html", look=look, command=command("cluster", "status"), make_command=command)


async def act_on_group(page: ConsolePage) -> Response:
    """Transfer, drain or resume one group. An action that takes messages away from a group requires the group's name as confirmation."""
    form, group = await page.form(), check_name("broker group", page.request.path_params["group"])
    verb, to = form.get("verb", ""), form.get("to", "").strip()
    if verb != "resume" and form.get("confirm", "").strip() != group:
        raise RefusedRequest(HTTPStatus.BAD_REQUEST, page.words("refused.confirm", name=group))
    metadata = page.mq.metadata
    if verb == "transfer":
        done = await metadata.transfer(group, to)
        return page.back("/cluster", page.words("cluster.transferred", group=group, master=done.master, refused=done.refused_ms))
    if verb == "drain":
        await metadata.set_group_mode(group, "read-only")
        return page.back("/cluster", page.words("cluster.drained", group=group))
    if verb == "resume":
        await metadata.set_group_mode(group, "read-write")
        return page.back("/cluster", page.words("cluster.resumed", group=group))
    raise InvalidArgument(f"a broker group is transferred, drained or resumed, not {verb!r}")


PAGES: Final[tuple[tuple[str, Show], ...]] = (("/cluster", show_cluster),)
ACTS: Final[tuple[tuple[str, Show], ...]] = (("/cluster/{group}", act_on_group),)
