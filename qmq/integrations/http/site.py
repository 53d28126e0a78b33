"""The routes `POST /subjects/NAME`, `.../groups/NAME/receive`, `.../groups/NAME/settle`, `GET
/openapi.json`, and their server inside a running event loop.
"""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import qmq
from qmq import errors, limits
from qmq.client.consuming.ordered.consumer import AnyMessage
from qmq.integrations import cloud_event
from qmq.integrations.http.clients import Connect, HttpCaller, HttpClients
from qmq.integrations.http.openapi import document
from qmq.integrations.http.requests import (
    HttpMessage,
    SendOptions,
    Settle,
    messages_of,
    receive_of,
    send_options,
    settle_of,
)
from qmq.rpc.web_server import WebServer, attempt, proven
from qmq.security.tls import ServedCertificate
from qmq.text import joined

log = logging.getLogger("qmq.integrations")

BODY_BYTES_MAX: Final = limits.BATCH_BYTES_MAX
ANSWER_BYTES: Final = 8 * limits.MIB
"""An answer ends with the message whose body reaches this size: bodies may be small on disk and
large when they are decompressed.
"""
STATUSES: Final[tuple[tuple[type[qmq.QmqError], int], ...]] = (
    (errors.NotAuthenticated, 401),
    (errors.AccessDenied, 403),
    (errors.UnknownSubject, 404),
    (errors.OrderMismatch, 409),
    (errors.MessageTooLarge, 413),
    (errors.QuotaExceeded, 429),
    (errors.BufferFull, 429),
    (errors.ClientClosed, 503),
    (errors.NeverReached, 503),
    (errors.CallerError, 400),
)

_DOCUMENT: Final = json.dumps(document(), separators=(",", ":")).encode()

Handler = Callable[[HttpCaller, Request, bytes], Awaitable[dict[str, Any]]]


class HttpSite:
    """The HTTP site; `app` is the ASGI application. Close the site in the loop that served it."""

    def __init__(self, clients: HttpClients) -> None:
        self._clients = clients
        self.app = Starlette(
            routes=[
                Route("/openapi.json", _openapi, methods=["GET"]),
                Route("/subjects/{subject}", partial(self._answer, _send), methods=["POST"]),
                Route(
                    "/subjects/{subject}/groups/{group}/receive",
                    partial(self._answer, _receive),
                    methods=["POST"],
                ),
                Route(
                    "/subjects/{subject}/groups/{group}/settle",
                    partial(self._answer, _settle),
                    methods=["POST"],
                ),
            ]
        )

    async def _answer(self, handler: Handler, request: Request) -> Response:
        try:
            _require_no_page(request.headers)
            async with self._clients.caller(
                request.headers.get("authorization"), partial(attempt, request.scope)
            ) as caller:
                if caller.principal:
                    proven(request.scope, caller.principal)
                return JSONResponse(await handler(caller, request, await _body(request)))
        except qmq.QmqError as failure:
            return refusal(failure)
        except ClientDisconnect:
            return Response(status_code=400)

    async def close(self) -> None:
        """Give back held messages, and disconnect."""
        await self._clients.close()


def _require_no_page(headers: Headers) -> None:
    """Browsers name the site whose page sent a request, also if its name was made to lead here (DNS
    rebinding). Raises AccessDenied.
    """
    if "origin" in headers or headers.get("sec-fetch-site", "none") != "none":
        raise errors.AccessDenied(
            "a page in a browser sent this: send from the page's own server, or let a proxy "
            "check and remove Origin"
        )


async def _openapi(_: Request) -> Response:
    return Response(_DOCUMENT, media_type="application/json")


async def _body(request: Request) -> bytes:
    """The body. Raises MessageTooLarge before more than the limit is read."""
    found = bytearray()
    async for part in request.stream():
        found += part
        if len(found) > BODY_BYTES_MAX:
            raise errors.MessageTooLarge(f"a request has at most {BODY_BYTES_MAX} bytes")
    return bytes(found)


async def _send(caller: HttpCaller, request: Request, body: bytes) -> dict[str, Any]:
    query = request.query_params
    options = send_options(query, query.getlist("tag"))
    messages = messages_of({name.lower(): value for name, value in request.headers.items()}, body)
    return {
        "messages": [
            await _sent(caller.client, request.path_params["subject"], each, options)
            for each in messages
        ]
    }


async def _sent(
    mq: qmq.Client, subject: str, message: HttpMessage, options: SendOptions
) -> dict[str, Any]:
    key = message.key if message.key is not None else options.key
    found = await mq.send(
        subject,
        message.body,
        key=key,
        tags=options.tags,
        headers=message.headers,
        delay=options.delay,
    )
    delayed = {} if found.delayed_id is None else {"delayed_id": str(found.delayed_id)}
    return {"id": str(found.id), **delayed}


async def _receive(caller: HttpCaller, request: Request, body: bytes) -> dict[str, Any]:
    subject, group = request.path_params["subject"], request.path_params["group"]
    ask = receive_of(body)
    try:
        found = await caller.group(subject, group).receive(ask)
    except (errors.CallerError, errors.StorageError) as failure:
        if not isinstance(failure, errors.QuotaExceeded):
            await caller.leave(subject, group)
        raise
    shown: list[dict[str, Any]] = []
    size = 0
    for receipt, message in found.items():
        if size >= ANSWER_BYTES:
            caller.group(subject, group).settle(Settle([receipt], "release", None, ""))
            continue
        size += len(message.body)
        try:
            shown.append(message_fields(receipt, message))
            message.body = b""  # only the verdict is to come
        except Exception as failure:  # this message fails its attempt alone
            log.exception("message %s of %s cannot be written as JSON", message.id, subject)
            caller.group(subject, group).settle(
                Settle([receipt], "nack", timedelta(0), f"no JSON: {failure!r}")
            )
    return {"messages": shown}


def message_fields(receipt: str, message: AnyMessage) -> dict[str, Any]:
    """A message in an answer, as values of JSON."""
    headers = {name: value.decode("utf-8", "replace") for name, value in message.headers.items()}
    key = message.key_bytes
    shown = {
        "receipt": receipt,
        "id": str(message.id),
        "subject": message.subject,
        "sequence": message.sequence,
        "attempt": message.attempt,
        "create_time_ms": message.create_time_ms,
        "key": None if key is None else key.decode("utf-8", "replace"),
        "tags": list(message.tags),
        "headers": headers,
        "body_base64": base64.b64encode(message.body).decode(),
    }
    if isinstance(message, qmq.OrderedMessage):
        shown |= {"partition": message.partition, "token": message.token}
    if cloud_event.is_event(headers):
        try:
            shown["event"] = cloud_event.of_headers(headers, message.body).structured()
        except errors.InvalidArgument:  # sent by another program
            return shown
    return shown


async def _settle(caller: HttpCaller, request: Request, body: bytes) -> dict[str, Any]:
    settled, over = caller.group(
        request.path_params["subject"], request.path_params["group"]
    ).settle(settle_of(body))
    return {"settled": list(settled), "over": list(over)}


def refusal(failure: qmq.QmqError) -> Response:
    """The answer that tells an error."""
    status = next((code for kind, code in STATUSES if isinstance(failure, kind)), 503)
    headers = (
        {"www-authenticate": "Bearer"}
        if status == 401
        else {"retry-after": "1"}
        if status in (429, 503)
        else None
    )
    found = {
        "code": failure.code,
        "error": failure.message,
        "outcome": failure.outcome.name.lower(),
    }
    return JSONResponse(found, status, headers)


REQUESTS_MAX: Final = 1_000
"""Requests under way."""


@dataclass(frozen=True, slots=True)
class HttpConfig:
    """`port` 0 takes a free one. The certificate's files turn TLS on."""

    host: str
    port: int
    tls_cert: Path | None = None
    tls_key: Path | None = None
    allows_anonymous: bool = True
    """Whether a request without a token is passed to the cluster without one; otherwise the request
    is refused here.
    """


class HttpServer:
    """`start`, then `stop`. Raises OSError from `start` if the port is taken."""

    def __init__(self, config: HttpConfig, connect: Connect) -> None:
        self._config = config
        self._site = HttpSite(HttpClients(connect, allows_anonymous=config.allows_anonymous))
        self._server = WebServer(
            self._site.app,
            config.host,
            config.port,
            requests_max=REQUESTS_MAX,
            refuse=refusal,
            certificate=ServedCertificate.of(config.tls_cert, config.tls_key),
        )
        self.port = 0

    @property
    def url(self) -> str:
        """The address for callers."""
        scheme = "http" if self._config.tls_cert is None else "https"
        return f"{scheme}://{joined(self._config.host, self.port)}"

    async def start(self) -> None:
        """Listen, and serve until `stop`."""
        self.port = await self._server.start()

    async def stop(self) -> None:
        """Finish the requests under way, give back held messages, and disconnect."""
        await self._server.stop()
        await self._site.close()
