"""Messages as they are stored, as server-sent events; a sample of them if they are too many to read.

    event: message    one message as JSON
    event: pace       {"shown": N, "skipped": M} of the last second in which any messages arrived

At most SHOWN_PER_S messages a second are sent; `pace` counts the others. The stream ends when the browser leaves, and when the console
stops; an id with each message lets a browser that was cut off continue from there.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Final

from qmq.clock import time_of
from qmq.console.message_finding import ReadPlace, ShownMessage, shown_message
from qmq.console.wording import exact_time
from qmq.printable import visible

if TYPE_CHECKING:
    from qmq.client.client import Client

SHOWN_PER_S: Final = 20
FIRST: Final = 10
KEEP_ALIVE_S: Final = 15.0


class TailPace:
    """Counts the messages of this second. Pure: the time is handed in."""

    def __init__(self, shown_per_s: int = SHOWN_PER_S) -> None:
        self._per_s = shown_per_s
        self._second = -1
        self.shown = self.skipped = 0

    def take(self, now_s: float) -> tuple[bool, tuple[int, int] | None]:
        """Returns (whether the message is shown, (shown, skipped) of the last second if it has ended and messages were skipped)."""
        ended = None
        if int(now_s) != self._second:
            ended = (self.shown, self.skipped) if self.skipped else None
            self._second, self.shown, self.skipped = int(now_s), 0, 0
        if self.shown < self._per_s:
            self.shown += 1
            return True, ended
        self.skipped += 1
        return False, ended


def event(kind: str, value: Any, event_id: str = "") -> bytes:
    """One server-sent event. The JSON contains no line breaks."""
    head = f"id: {event_id}\n" if event_id else ""
    return f"{head}event: {kind}\ndata: {json.dumps(value, ensure_ascii=False)}\n\n".encode()


def message_fields(message: ShownMessage) -> dict[str, Any]:
    """The fields of a message for the browser, as text without hidden characters."""
    return {
        "id": message.id,
        "time": exact_time(message.append_time_ms),
        "place": visible(f"{message.place}@{message.sequence}"),
        "key": visible(message.key),
        "form": message.body.form,
        "body": visible(message.body.line),
    }


async def tail_events(
    mq: Client, subject: str, masked: Collection[str], place: ReadPlace, time_s: Callable[[], float]
) -> AsyncIterator[bytes]:
    """The stream. `place` is the id of the last message that the browser has; an empty one: begin with the newest. Raises as
    `Client.browse`.
    """
    options: dict[str, Any] = {"last": FIRST}
    if place.time_ms:
        options = {"start": time_of(place.time_ms), "positions": dict(place.positions)}
    pace = TailPace()
    messages: Any = mq.browse(subject, follow=True, partial=True, **options)
    async with aclosing(messages):
        coming = asyncio.ensure_future(anext(messages))
        try:
            while True:
                done, _ = await asyncio.wait([coming], timeout=KEEP_ALIVE_S)
                if not done:
                    yield b": nothing came\n\n"
                    continue
                message = await coming
                place.passed(message)
                is_shown, ended = pace.take(time_s())
                if ended is not None:
                    yield event("pace", {"shown": ended[0], "skipped": ended[1]})
                if is_shown:
                    yield event("message", message_fields(shown_message(message, masked)), str(place))
                coming = asyncio.ensure_future(anext(messages))
        finally:
            coming.cancel()
            await asyncio.gather(coming, return_exceptions=True)
