"""*Message*: where a message is, what it waits for, and the events of its life."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any, Final
from urllib.parse import quote

from starlette.responses import RedirectResponse, Response

from qmq.console.bodies import body_view, masked_fields, masked_headers, text_or_hex
from qmq.console.command_lines import command
from qmq.console.page import ConsolePage, Show
from qmq.errors import QmqError
from qmq.operations.inquiry import Inquiry, inquire
from qmq.operations.message_view import timeline, why


async def ask_for_message(page: ConsolePage) -> Response:
    """Show a form for a message id, or redirect to the page of the id that the form gives."""
    message_id = page.text("id")
    if message_id:
        return RedirectResponse(f"/messages/{quote(message_id, safe='')}", HTTPStatus.SEE_OTHER)
    return await page.render("message.html", message_id="", inquiry=None, failure="", command=command("why", "MESSAGE_ID"))


async def show_message(page: ConsolePage) -> Response:
    """Show all information in the cluster about one message."""
    message_id, subject = page.request.path_params["id"], page.text("subject")
    inquiry: Inquiry | None = None
    failure = ""
    try:
        inquiry = await inquire(page.mq, message_id, subject)
    except QmqError as cause:
        failure = str(cause)
    return await page.render(
        "message.html",
        404 if inquiry is None else 200,
        message_id=message_id,
        inquiry=inquiry,
        failure=failure,
        told=why(inquiry, page.now_ms) if inquiry is not None else [],
        events=[dict(zip(("time", "group", "what", "consumer", "attempt", "note"), row, strict=True)) for row in timeline(inquiry)]
        if inquiry is not None
        else [],
        places=_places(page, inquiry) if inquiry is not None else [],
        command=command("why", *([subject] if subject else []), message_id),
    )


def _places(page: ConsolePage, inquiry: Inquiry) -> list[dict[str, Any]]:
    found = []
    for each in inquiry.followed:
        place = each.place
        masked = masked_fields(page.config.masks, place.subject)
        found.append(
            {
                "place": place,
                "key": text_or_hex(place.key),
                "headers": masked_headers({header.name: text_or_hex(header.value) for header in place.headers}, masked),
                "body": body_view(place.body, masked),
            }
        )
    return found


PAGES: Final[tuple[tuple[str, Show], ...]] = (
    ("/messages", ask_for_message),
    ("/messages/{id}", show_message),
)
