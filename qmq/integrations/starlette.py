"""QMQ in a web application of Starlette or FastAPI: the client, listeners, and server-sent events.

    messaging = QmqLifespan("localhost:20880")
    app = FastAPI(lifespan=messaging)

docs/integrations/fastapi.md is the tutorial.

The id of a server-sent event says how far each queue was read.

    g1/0/7,g2/0/9~SEAL        the stream continues with message 7 of queue 0 of broker group g1, and
                              message 9 of queue 0 of g2

A browser sends any id that it wants to, so an id has a seal: an HMAC by a key that only the web
servers have, over the positions, the subject and the selection. So a browser continues where it
was, and reads neither older messages nor another selection's part of the log.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
import logging
import re
import secrets
import signal
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from datetime import timedelta
from typing import Any, Final, TypeVar, Unpack

from starlette.requests import Request
from starlette.responses import StreamingResponse

import qmq
from qmq.client.listening.listener_options import ListenerOptions
from qmq.client.listening.listeners import GRACE, Listening
from qmq.errors import ClientClosed, InvalidArgument, QmqError
from qmq.integrations.pending_listeners import PendingListeners
from qmq.text import whole_number

Positions = Mapping[tuple[str, int], int]
"""The next sequence of each queue, by broker group and partition."""

RESET: Final = "event: reset\ndata:\n\n"
"""Tells a page that its stream does not continue where it was, so that the page may ask for the
present state.
"""
KEY_BYTES_MIN: Final = 16
_PARTITION_MAX = (1 << 31) - 1
_LINE_END = re.compile(r"\r\n|\r|\n")
_POSITION = re.compile(r"([^/,]+)/([^/,]+)/([^/,]+)")


def event(id: str, data: str) -> str:
    """The text of one event: each line of the data has its own field, as the format requires."""
    return f"id: {id}\n" + "".join(f"data: {line}\n" for line in _LINE_END.split(data)) + "\n"


def position_text(positions: Positions) -> str:
    """Positions as an event's id: GROUP/PARTITION/SEQUENCE, separated by commas."""
    return ",".join(
        f"{group}/{partition}/{sequence}"
        for (group, partition), sequence in sorted(positions.items())
    )


def positions_of(text: str) -> dict[tuple[str, int], int]:
    """The positions of an event's id; none for "". Raises InvalidArgument."""
    found = {}
    for each in text.split(",") if text else ():
        match = _POSITION.fullmatch(each)
        partition = whole_number(match[2].removeprefix("-"), _PARTITION_MAX) if match else None
        sequence = whole_number(match[3]) if match else None
        if match is None or partition is None or sequence is None:
            raise InvalidArgument(
                f"Last-Event-ID is {text[:200]!r}, which is not an id of these events: leave "
                "it out to start now"
            )
        found[match[1], -partition if match[2].startswith("-") else partition] = sequence
    return found


class EventIds:
    """Seals and opens the ids of one stream:
    of a subject, and of what `selection` chooses there.
    """

    def __init__(self, key: bytes, subject: str, selection: Mapping[str, Any]) -> None:
        self._key, self._bound = (
            key,
            json.dumps(
                [subject, {name: _plain(value) for name, value in sorted(selection.items())}]
            ),
        )

    def sealed(self, positions: Positions) -> str:
        """The id of an event after which the stream continues at `positions`."""
        text = position_text(positions)
        return f"{text}~{self._seal(text)}"

    def opened(self, text: str) -> dict[tuple[str, int], int]:
        """The positions of an id that `sealed` made for the same subject and selection by the same
        key. Raises InvalidArgument.
        """
        told, _, seal = text.rpartition("~")
        if not hmac.compare_digest(self._seal(told).encode(), seal.encode()):
            raise InvalidArgument("Last-Event-ID is no id of this stream: its seal is wrong")
        return positions_of(told)

    def _seal(self, text: str) -> str:
        made = hmac.digest(self._key, json.dumps([self._bound, text]).encode(), "sha256")
        return base64.urlsafe_b64encode(made[:18]).decode()


def _plain(value: Any) -> str | list[str] | None:
    if isinstance(value, Iterable) and not isinstance(value, str | bytes):
        return sorted(map(repr, value))
    return None if value is None else repr(value)


log = logging.getLogger("qmq.integrations")

HEARTBEAT: Final = timedelta(seconds=15)

_Handler = TypeVar("_Handler", bound=Callable[..., Any])


def stop_process(error: QmqError) -> None:
    """Ask the web server to stop, so that its supervisor starts it again."""
    log.critical("a listener failed, so the web server stops: %s", error)
    signal.raise_signal(signal.SIGTERM)


class QmqLifespan:
    """The client of a web application, from its start to its end. It is the application's lifespan,
    or part of a larger one: `async with messaging(app): ...`.

    Each process of the web server has its own client and listeners; the listeners of one group
    share its messages.
    """

    def __init__(
        self,
        addresses: str | None = None,
        *,
        grace: timedelta = GRACE,
        failed: Callable[[QmqError], object] = stop_process,
        event_key: bytes | str | None = None,
        **connect: Any,
    ) -> None:
        """When the application ends, the listeners have `grace` to finish their messages. `failed`
        is called when a listener ends with an error; the default ends the process, so that a web
        server without listeners does not go unnoticed. `event_key` seals the ids of `events`: a
        secret of 16 bytes or more, the same for all processes of the application; without it, each
        process has its own, and streams continue only at the process that they come from. `connect`
        are options of `qmq.connect`. Raises InvalidArgument.
        """
        key = event_key.encode() if isinstance(event_key, str) else event_key
        if key is not None and len(key) < KEY_BYTES_MIN:
            raise InvalidArgument(
                f"event_key has at least {KEY_BYTES_MIN} bytes, such as `openssl rand -hex "
                f"16` prints, not {len(key)}"
            )
        self._event_key = secrets.token_bytes() if key is None else key
        self._addresses, self._grace, self._connect_options, self._failed = (
            addresses,
            grace,
            connect,
            failed,
        )
        self._listeners = PendingListeners()
        self._client: qmq.Client | None = None

    def client(self) -> qmq.Client:
        """The client: a dependency for FastAPI. Raises ClientClosed before the application started
        and after it ended.
        """
        if self._client is None:
            raise ClientClosed(
                "the application is not running: pass this object to it as `lifespan`"
            )
        return self._client

    def listener(
        self, subject: str, group: str, **options: Unpack[ListenerOptions]
    ) -> Callable[[_Handler], _Handler]:
        """Register a function as a handler, which runs as long as the application does. As
        `Client.listener`; errors are raised when the application starts.
        """
        return self._listeners.listener(subject, group, **options)

    def __call__(self, app: object) -> AbstractAsyncContextManager[None]:
        """The application's lifespan. Raises InvalidName, InvalidArgument; at the end, the error
        that stopped a listener.
        """
        return self._life()

    @asynccontextmanager
    async def _life(self) -> AsyncIterator[None]:
        async with qmq.connect(self._addresses, **self._connect_options) as mq:
            self._listeners.listen_with(mq)
            async with mq.listening(grace=self._grace) as listening:
                watching = asyncio.create_task(self._watch(listening))
                self._client = mq
                try:
                    yield
                finally:
                    self._client = None
                    watching.cancel()
                    await asyncio.gather(watching, return_exceptions=True)

    async def _watch(self, listening: Listening) -> None:
        try:
            await listening.wait()
        except QmqError as error:
            self._failed(error)

    async def events(
        self,
        request: Request,
        subject: str,
        *,
        data: Callable[[qmq.BrowsedMessage], str] = lambda message: message.body.decode(
            errors="replace"
        ),
        heartbeat: timedelta = HEARTBEAT,
        **selection: Any,
    ) -> StreamingResponse:
        """The subject's messages as server-sent events, from now on; for a browser that reconnects
        (`Last-Event-ID`), from where it was.

        `data` makes the text that the browser gets from a message; by default the body as text.
        `selection` are `key`, `tags_any` and `tags_all` of `Client.browse`. A comment every
        `heartbeat` keeps proxies from ending an idle stream. For an id that was not made for this
        subject and selection by `event_key`, the stream begins now, with the event `reset`. Raises
        as `Client.queue_ends`.
        """
        mq, ids, last = (
            self.client(),
            EventIds(self._event_key, subject, selection),
            request.headers.get("last-event-id", ""),
        )
        positions: Positions | None = None
        if last:
            with suppress(InvalidArgument):
                positions = ids.opened(last)
        first = RESET if last and positions is None else ""
        positions = await mq.queue_ends(subject) if positions is None else positions
        messages = mq.browse(subject, follow=True, positions=positions, **selection)
        stream = _stream(messages, positions, data, heartbeat.total_seconds(), ids, first)
        return StreamingResponse(
            stream,
            media_type="text/event-stream",
            headers={"cache-control": "no-cache", "x-accel-buffering": "no"},
        )


async def _stream(
    messages: AsyncIterator[qmq.BrowsedMessage],
    positions: Positions,
    data: Callable[[qmq.BrowsedMessage], str],
    heartbeat_s: float,
    ids: EventIds,
    first: str,
) -> AsyncIterator[str]:
    reached = dict(positions)
    # a browser that reconnects before the first message misses no message
    yield f"{first}id: {ids.sealed(reached)}\n\n"
    coming = asyncio.ensure_future(anext(messages))
    try:
        while True:
            await asyncio.wait((coming,), timeout=heartbeat_s)
            if not coming.done():
                yield ":\n\n"
                continue
            message = coming.result()
            reached[message.broker_group, message.partition] = message.sequence + 1
            coming = asyncio.ensure_future(anext(messages))
            yield event(ids.sealed(reached), data(message))
    finally:
        coming.cancel()
        await asyncio.gather(coming, return_exceptions=True)
