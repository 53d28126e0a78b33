"""Checks every request before its page: the host, the origin and the size of a form; and adds the
security headers to the answer.

Host            one of the console's names: a page of another site cannot reach a console on
                loopback under its own name (DNS rebinding)
Sec-Fetch-Site  of a POST: same-origin. Browsers that do not send it send Origin, which must be the
                console's
CSP             scripts, styles, pictures and requests only from here; nothing inline; no frame
                around it
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qmq.console.config import plain_host
from qmq.text import PORT_MAX, whole_number

FORM_BYTES_MAX: Final = 64 * 1024
TOO_LONG: Final = f"a form has at most {FORM_BYTES_MAX} bytes"
SECURITY_HEADERS: Final = {
    "content-security-policy": (
        "default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; "
        "form-action 'self'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    # with no-referrer, browsers send "Origin: null" with our own forms
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
}


def refusal(method: str, headers: Headers, hosts: Iterable[str]) -> tuple[int, str] | None:
    """The status and the reason with which the guard refuses a request; None if it serves the
    request. Pure.
    """
    host = headers.get("host", "")
    if bare_host(host) not in hosts:
        return (
            421,
            (
                f"this console is not {host!r}: start it with --name {bare_host(host)} if "
                "browsers shall reach it so"
            ),
        )
    if method not in ("GET", "HEAD", "POST"):
        return 405, f"{method} is not a method of this console"
    if method != "POST":
        return None
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if site not in (None, "same-origin"):
        return 403, "the form was not sent from this console"
    if origin is not None and urlsplit(origin).netloc.lower() != host.lower():
        return 403, "the form was not sent from this console"
    if whole_number(headers.get("content-length", ""), FORM_BYTES_MAX) is None:
        return 413, TOO_LONG
    return None


def bare_host(host: str) -> str:
    """A Host header without its port, as `plain_host` writes it."""
    name, colon, port = host.rpartition(":")
    return plain_host(name if colon and port.isdigit() else host)


def named_by_port(name: str, request: Request) -> str:
    """A cookie's name with the port that the browser asked. Browsers share cookies between all
    ports of a host. Pure.
    """
    port = whole_number(request.headers.get("host", "").rpartition(":")[2], PORT_MAX)
    return name if port is None else f"{name}_{port}"


class ConsoleGuard:
    """Middleware that refuses requests by `refusal`, and adds the headers to every answer."""

    def __init__(self, app: ASGIApp, hosts: frozenset[str], *, is_tls: bool) -> None:
        self._app, self._hosts = app, hosts
        self._added = dict(SECURITY_HEADERS)
        if is_tls:
            self._added["strict-transport-security"] = "max-age=31536000"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(self._added)
                headers.setdefault("cache-control", "no-store")
            await send(message)

        refused = refusal(scope["method"], Headers(scope=scope), self._hosts)
        if refused is not None:
            status, reason = refused
            await PlainTextResponse(reason + "\n", status)(scope, receive, guarded)
            return
        await self._app(scope, _counted(receive), guarded)


def _counted(receive: Receive) -> Receive:
    """`receive`, which raises HTTPException when the body is too long. Headers do not tell: a
    chunked body has any length beside them.
    """
    got = 0

    async def counted() -> Message:
        nonlocal got
        message = await receive()
        got += len(message.get("body", b""))
        if got > FORM_BYTES_MAX:
            raise HTTPException(413, TOO_LONG)
        return message

    return counted
