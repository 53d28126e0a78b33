"""Support for the console's tests: an HTTP client that speaks ASGI with the application and keeps cookies."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.cookies import SimpleCookie
from typing import Any
from urllib.parse import unquote, urlencode

from qmq.client.client import Client
from qmq.console.app import ConsoleSite
from qmq.console.config import ConsoleConfig
from qmq.console.server import CLIENT_NAME
from qmq.testing import TestCluster

KEY = "key-of-the-test"
HOST = "127.0.0.1:20888"
COOKIE, LOGIN_COOKIE = "qmq_console_20888", "qmq_console_login_20888"
"""The console's cookies in a browser that asks HOST."""


@dataclass
class Answer:
    """The answer to a request."""

    status: int
    headers: dict[str, str]
    text: str


@dataclass
class PlainBrowser:
    """Sends requests to a console. Follows redirections to the console's own host, as a browser does."""

    site: ConsoleSite
    cookies: dict[str, str] = field(default_factory=dict)
    peer: str = "127.0.0.1"
    host: str = HOST

    async def ask(self, method: str, path: str, headers: Mapping[str, str] | None = None, body: bytes = b"") -> Answer:
        """Send one request without following redirections."""
        target, _, query = path.partition("#")[0].partition("?")
        sent = {"host": self.host, **({"cookie": "; ".join(f"{k}={v}" for k, v in self.cookies.items())} if self.cookies else {})}
        if method == "POST":
            sent |= {"content-type": "application/x-www-form-urlencoded", "content-length": str(len(body)), "sec-fetch-site": "same-origin"}
        sent |= dict(headers or {})
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": unquote(target),
            "raw_path": target.encode(),
            "query_string": query.encode(),
            "headers": [(name.encode(), value.encode("latin-1")) for name, value in sent.items() if value],
            "client": (self.peer, 1),
            "server": ("127.0.0.1", 20888),
        }
        received: list[dict[str, Any]] = []
        bodies = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            return bodies.pop() if bodies else {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            received.append(message)

        await self.site.app(scope, receive, send)
        start = received[0]
        found: dict[str, str] = {}
        for name, value in start["headers"]:
            if name == b"set-cookie":
                for morsel in SimpleCookie(value.decode()).values():
                    self.cookies[morsel.key] = morsel.value
            found[name.decode()] = value.decode("latin-1")
        return Answer(start["status"], found, b"".join(each.get("body", b"") for each in received[1:]).decode())

    async def get(self, path: str, **headers: str) -> Answer:
        """A page, at the end of redirections."""
        return await self._followed(await self.ask("GET", path, headers))

    async def post(self, path: str, form: Mapping[str, str], **headers: str) -> Answer:
        """Send a form with the session's token, which is on any page."""
        token = {} if "csrf" in form else {"csrf": csrf_of((await self.get("/")).text)}
        return await self._followed(await self.ask("POST", path, headers, urlencode({**token, **form}).encode()))

    async def _followed(self, answer: Answer) -> Answer:
        while answer.status == 303:
            answer = await self.ask("GET", answer.headers["location"])
        return answer

    async def log_in(self) -> PlainBrowser:
        """Log in with the printed key, without reading a page."""
        found = await self.ask("GET", f"/login?key={KEY}")
        assert found.status == 303, found.text
        return self


def csrf_of(text: str) -> str:
    """The token of a page's forms; "" if it has none."""
    found = re.search(r'name="csrf" value="([^"]+)"', text)
    return found[1] if found else ""


def clients_of(cluster: TestCluster) -> Callable[[Callable[[], str] | None], Client]:
    """Clients of a cluster in this process, as a console makes them."""
    return lambda token: cluster.client(token=token, create_subjects=False, name=CLIENT_NAME)


class SteppedClock:
    """A clock that a test advances by seconds, so that the next page queries the cluster again."""

    def __init__(self) -> None:
        self.now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s


def site_of(cluster: TestCluster, clock: SteppedClock | None = None, **config: Any) -> ConsoleSite:
    """A console of a cluster in this process."""
    return ConsoleSite(ConsoleConfig(cluster.address, **config), clients_of(cluster), monotonic_s=clock or SteppedClock(), key=KEY)
