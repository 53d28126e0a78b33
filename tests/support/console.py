"""Support for the console's tests: an HTTP client that speaks ASGI with the application and keeps
cookies.

An ordered subject with a consumer of one group, which fails on chosen keys and parks them.

A small identity provider for tests: OpenID Connect's code flow with PKCE over HTTP on this machine,
with real keys and signatures.

The shared parts of the tests in Debian's Chromium: one cluster with content for each screen, one
console, one browser, a page a test.

A page that logs an error or a violation of the Content Security Policy fails its test.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from http.cookies import SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, unquote, urlencode, urlsplit

import jwt
import pytest
import pytest_asyncio
from cryptography.hazmat.primitives.asymmetric import ec

from qmq.client.client import Client
from qmq.client.consuming.ordered.message import OrderedMessage
from qmq.console.app import CLIENT_NAME, ConsoleServer, ConsoleSite
from qmq.console.config import ConsoleConfig
from qmq.console.oidc import challenge
from qmq.errors import UnknownGroup
from qmq.model import Order, SubjectConfig
from qmq.testing import TestCluster
from support import hostile

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
    """Sends requests to a console. Follows redirections to the console's own host, as a browser
    does.
    """

    site: ConsoleSite
    cookies: dict[str, str] = field(default_factory=dict)
    peer: str = "127.0.0.1"
    host: str = HOST

    async def ask(
        self, method: str, path: str, headers: Mapping[str, str] | None = None, body: bytes = b""
    ) -> Answer:
        """Send one request without following redirections."""
        target, _, query = path.partition("#")[0].partition("?")
        sent = {
            "host": self.host,
            **(
                {"cookie": "; ".join(f"{k}={v}" for k, v in self.cookies.items())}
                if self.cookies
                else {}
            ),
        }
        if method == "POST":
            sent |= {
                "content-type": "application/x-www-form-urlencoded",
                "content-length": str(len(body)),
                "sec-fetch-site": "same-origin",
            }
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
            "headers": [
                (name.encode(), value.encode("latin-1")) for name, value in sent.items() if value
            ],
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
        return Answer(
            start["status"],
            found,
            b"".join(each.get("body", b"") for each in received[1:]).decode(),
        )

    async def get(self, path: str, **headers: str) -> Answer:
        """A page, at the end of redirections."""
        return await self._followed(await self.ask("GET", path, headers))

    async def post(self, path: str, form: Mapping[str, str], **headers: str) -> Answer:
        """Send a form with the session's token, which is on any page."""
        token = {} if "csrf" in form else {"csrf": csrf_of((await self.get("/")).text)}
        return await self._followed(
            await self.ask("POST", path, headers, urlencode({**token, **form}).encode())
        )

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
    return ConsoleSite(
        ConsoleConfig(cluster.address, **config),
        clients_of(cluster),
        monotonic_s=clock or SteppedClock(),
        key=KEY,
    )


LOGICAL_PARTITIONS = 1024


class ParkingConsumer:
    """Handles a subject's messages. `seen` are the bodies that it handled, `bad` the keys on which
    it fails.
    """

    def __init__(self, mq: Client, subject: str, group: str, bad: Sequence[str]) -> None:
        self._mq, self._subject, self._group = mq, subject, group
        self.seen: list[bytes] = []
        self.bad = set(bad)

    async def handle(self, message: OrderedMessage) -> None:
        if message.key in self.bad:
            raise ValueError(f"cannot read {message.key}")
        self.seen.append(message.body)

    async def until_parked(self, keys: int) -> None:
        async with asyncio.timeout(30):
            while True:
                with suppress(UnknownGroup):
                    if (
                        len(
                            {
                                each.key
                                for each in await self._mq.metadata.parked(
                                    self._subject, self._group
                                )
                            }
                        )
                        == keys
                    ):
                        return
                await asyncio.sleep(0.01)

    async def until_held(self, lanes: int) -> None:
        """Wait until consumers of the group hold this many lanes."""
        async with asyncio.timeout(30):
            while await self._held() != lanes:
                await asyncio.sleep(0.01)

    async def _held(self) -> int:
        groups = (await self._mq.metadata.describe_route(self._subject)).groups
        return sum(len(each.holders) for group in groups for each in group.partitions)


@asynccontextmanager
async def parked_subject(
    mq: Client, subject: str, group: str, keys: Sequence[str], partitions: int = 1
) -> AsyncIterator[ParkingConsumer]:
    """A subject with a message for each of `keys`, all of them parked, and a running consumer."""
    await mq.metadata.create_subject(
        SubjectConfig(subject, order=Order.STRICT, logical_partitions=LOGICAL_PARTITIONS),
        partitions=partitions,
    )
    made = ParkingConsumer(mq, subject, group, keys)
    consumer = mq.ordered_consumer(
        subject, group, name=f"{group}-1", on_failure="park", attempts_max=1, retry_delays_s=(0.0,)
    )
    task = asyncio.create_task(consumer.run(made.handle))
    try:
        for key in keys:
            await mq.send(subject, f"to {key}".encode(), key=key)
        if keys:
            await made.until_parked(len(keys))
        yield made
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


CLIENT_ID = "qmq-console"
CLIENT_SECRET = "client's secret"


@dataclass
class IdentityProvider:
    """`changed` are claims of id tokens that a test forges; `refused` are grants that it does not
    take.
    """

    issuer: str = ""
    keys: dict[str, ec.EllipticCurvePrivateKey] = field(
        default_factory=lambda: {"one": ec.generate_private_key(ec.SECP256R1())}
    )
    signs_with: str = "one"
    lasts_s: int = 300
    changed: dict[str, Any] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)
    codes: dict[str, dict[str, str]] = field(default_factory=dict)
    refreshes: dict[str, str] = field(default_factory=dict)
    grants: list[str] = field(default_factory=list)

    def jwks(self) -> bytes:
        made = jwt.algorithms.ECAlgorithm
        shown = [
            {**json.loads(made.to_jwk(key.public_key())), "kid": name, "use": "sig"}
            for name, key in self.keys.items()
            if name != "forged"
        ]
        return json.dumps({"keys": shown}).encode()

    def description(self) -> bytes:
        at = self.issuer
        return json.dumps(
            {
                "issuer": at,
                "authorization_endpoint": f"{at}/authorize",
                "token_endpoint": f"{at}/token",
                "jwks_uri": f"{at}/jwks",
            }
        ).encode()

    def signed(self, **claims: Any) -> str:
        now = int(time.time())
        whole = {"iss": self.issuer, "iat": now, "exp": now + self.lasts_s, **claims}
        return jwt.encode(
            whole,
            self.keys[self.signs_with],
            algorithm="ES256",
            headers={"kid": "one" if self.signs_with == "forged" else self.signs_with},
        )

    def logged_in(self, asked: dict[str, str], user: str) -> str:
        """The URL, with a code, to which the provider sends the browser after a login."""
        code = secrets.token_urlsafe(16)
        self.codes[code] = {**asked, "user": user}
        return f"{asked['redirect_uri']}?{urlencode({'code': code, 'state': asked['state']})}"

    def tokens(self, form: dict[str, str]) -> tuple[int, dict[str, Any]]:
        grant = form.get("grant_type", "")
        self.grants.append(grant)
        if (
            grant in self.refused
            or form.get("client_id") != CLIENT_ID
            or form.get("client_secret") != CLIENT_SECRET
        ):
            return 400, {"error": "invalid_client", "error_description": "not this client, not now"}
        if grant == "refresh_token":
            user = self.refreshes.pop(form["refresh_token"], "")
            return (200, self._given(user, "")) if user else (400, {"error": "invalid_grant"})
        asked = self.codes.pop(form.get("code", ""), None)
        if (
            asked is None
            or asked["redirect_uri"] != form.get("redirect_uri")
            or challenge(form.get("code_verifier", "")) != asked["code_challenge"]
        ):
            return 400, {"error": "invalid_grant", "error_description": "the code does not hold"}
        return 200, self._given(asked["user"], asked["nonce"])

    def _given(self, user: str, nonce: str) -> dict[str, Any]:
        refresh = secrets.token_urlsafe(16)
        self.refreshes[refresh] = user
        identity = {
            "sub": user,
            "aud": CLIENT_ID,
            **({"nonce": nonce} if nonce else {}),
            **self.changed,
        }
        return {
            "access_token": self.signed(sub=user, aud="qmq", number=len(self.grants)),
            "id_token": self.signed(**identity),
            "refresh_token": refresh,
            "token_type": "Bearer",
            "expires_in": self.lasts_s,
        }


PAGE = """<!doctype html><html lang="en"><title>Provider</title><main><h1>Who are you?</h1>
<form method="post"><label>User <input name="user"></label><button>Sign in</button></form></main></html>"""  # noqa: E501


@contextmanager
def identity_provider() -> Iterator[IdentityProvider]:
    """Run a provider, which listens at its `issuer`."""
    found = IdentityProvider()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            return

        def answer(
            self, status: int, body: bytes, kind: str = "application/json", **headers: str
        ) -> None:
            self.send_response(status)
            for name, value in {
                "content-type": kind,
                "content-length": str(len(body)),
                **headers,
            }.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            path = urlsplit(self.path).path
            if path == "/.well-known/openid-configuration":
                self.answer(200, found.description())
            elif path == "/jwks":
                self.answer(200, found.jwks())
            elif path == "/authorize":
                self.answer(200, PAGE.encode(), "text/html")
            else:
                self.answer(404, b"{}")

        def do_POST(self) -> None:
            text = self.rfile.read(int(self.headers["content-length"])).decode()
            form = {name: values[0] for name, values in parse_qs(text).items()}
            parts = urlsplit(self.path)
            if parts.path == "/token":
                status, told = found.tokens(form)
                self.answer(status, json.dumps(told).encode())
            else:
                asked = {name: values[0] for name, values in parse_qs(parts.query).items()}
                self.answer(303, b"", location=found.logged_in(asked, form["user"]))

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = Thread(target=server.serve_forever, daemon=True)
    found.issuer = f"http://127.0.0.1:{server.server_address[1]}"
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@dataclass
class Stage:
    """The cluster, console and browser that all tests share."""

    cluster: TestCluster
    mq: Client
    console: ConsoleServer
    browser: Any
    ids: list[str]
    """The ids of the hostile messages."""
    invoice: str
    """The id of a message that was given up."""

    @property
    def base(self) -> str:
        return f"http://127.0.0.1:{self.console.port}"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage() -> AsyncIterator[Stage]:
    playwright = pytest.importorskip("playwright.async_api", reason="scripts/setup installs it")
    async with TestCluster() as cluster, playwright.async_playwright() as driver:
        mq = cluster.client(name="shop")
        ids = await filled(mq)
        invoice = await given_up_invoices(mq)
        await reminders(mq)
        console = ConsoleServer(
            ConsoleConfig(cluster.address, port=0, is_writable=True), clients_of(cluster)
        )
        await console.start()
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = await driver.chromium.launch(
            executable_path=shutil.which("chromium"), args=[*arguments, "--disable-gpu"]
        )
        async with parked_subject(
            mq, "accounts", "ledger", ["customer-1"], partitions=2
        ) as consuming:
            await consuming.until_held(2)
            yield Stage(cluster, mq, console, browser, ids, invoice)
        await browser.close()
        await console.stop()


async def filled(mq: Client) -> list[str]:
    """A cluster with something on each screen; the ids of hostile messages."""
    for number in range(30):
        await mq.send(
            "orders",
            b'{"order": %d, "total": "%d.00 EUR"}' % (number, number * 7),
            key=f"customer-{number % 7}",
            tags=["new"],
        )
    ids = []
    for text in hostile.TEXTS:
        told = await mq.send(
            "hostile", text.encode(), key=text, tags=[text], headers={"trace": text, text: text}
        )
        ids.append(str(told.id))
    for body in hostile.BODIES:
        await mq.send("hostile-bodies", body)
    async with mq.consumer("hostile", "billing", name="billing-1", ack="explicit") as consumer:
        for _ in hostile.TEXTS:
            message = await anext(consumer)
            message.reject(f"cannot read {message.key}")
    async with mq.consumer("orders", "shipping", name="shipping-1", ack="explicit") as consumer:
        await (await anext(consumer)).ack_sync()
    async with parked_subject(mq, "vault", "audit", hostile.TEXTS):
        pass
    while sum(each.waiting for each in await mq.metadata.dead_letter_queues("billing")) < len(
        hostile.TEXTS
    ):
        await asyncio.sleep(0.01)
    return ids


FAILURES = (
    "the customer is not known",
    "the bank did not answer within 3 s",
    "the amount is negative",
)


async def given_up_invoices(mq: Client) -> str:
    """Dead letters of an ordinary kind; the id of one."""
    count = 12
    for number in range(count):
        body = b'{"invoice": %d, "customer": "C-%d", "amount": %d}' % (
            number,
            1_000 + 37 * number,
            40 - 7 * number,
        )
        told = await mq.send(
            "invoices",
            body,
            key=f"customer-{number % 5}",
            tags=["monthly"],
            headers={"trace": f"{number:04x}"},
        )
    async with mq.consumer(
        "invoices", "accounting", name="accounting-1", ack="explicit"
    ) as consumer:
        for number in range(count):
            (await anext(consumer)).reject(FAILURES[number * number % 3 if number % 2 else 2])
    while sum(each.waiting for each in await mq.metadata.dead_letter_queues("accounting")) < count:
        await asyncio.sleep(0.01)
    return str(told.id)


async def reminders(mq: Client) -> None:
    """Delayed messages over two years, most of them soon, and a recurring one."""
    days = [1 + number * number * 690 // 3_600 for number in range(60)]
    await asyncio.gather(
        *[
            mq.send(
                "reminders",
                b"pay, please",
                key=f"customer-{each}",
                delay=timedelta(days=each, hours=2),
            )
            for each in days
        ]
    )
    await mq.send("reminders", b"tidy up", cron="0 9 * * *", zone="Europe/Berlin")


@pytest_asyncio.fixture(loop_scope="module")
async def page(stage: Stage) -> AsyncIterator[Any]:
    """Logged in; it fails the test for what the browser complains about."""
    context = await stage.browser.new_context(viewport={"width": 1280, "height": 800}, locale="en")
    opened, complaints = await context.new_page(), []
    opened.on(
        "console", lambda each: complaints.append(each.text) if each.type == "error" else None
    )
    opened.on("pageerror", lambda each: complaints.append(str(each)))
    opened.on("dialog", lambda each: complaints.append(f"a dialog opened: {each.message}"))
    opened.set_default_timeout(60_000)
    await opened.goto(stage.console.url)
    opened.complaints = complaints
    yield opened
    await context.close()
    assert complaints == []
