"""The console as an ASGI application: addresses, who may see them, and how failures are shown.

/login, /logout     who is asked for, by the login mode; /login/begin and /login/callback: by an
                    identity provider
/static/...         scripts and styles; open to all
everything else     needs a session; a POST needs its CSRF token and `--writable`, and acts with the
                    session's rights
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Final
from urllib.parse import parse_qs, urlencode, urlsplit

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

import qmq
from qmq.client.client import Client
from qmq.console.config import ConsoleConfig, LoginMode
from qmq.console.guard import ConsoleGuard, named_by_port
from qmq.console.oidc import LOGIN_S, OidcFlow, ShownToken
from qmq.console.page import (
    ConsolePage,
    RefusedRequest,
    Show,
    rendered,
    status_of_failure,
    templates,
    wording_of,
)
from qmq.console.pages import dead_letters, delays, message, overview, routes, subject
from qmq.console.sessions import BrowserSession, ConsoleCaller, ProxyToken, Sessions
from qmq.errors import InvalidArgument, NotAuthenticated, QmqError, QuotaExceeded, Unavailable
from qmq.rpc.web_server import WebServer, attempt, proven
from qmq.security.tls import ServedCertificate
from qmq.security.tokens import check as check_token

log = logging.getLogger("qmq.console")

LOGIN_COOKIE: Final = "qmq_console_login"


class OidcLogin:
    """The login pages of one console. Threads ask the provider,
    so that other requests do not wait.
    """

    def __init__(self, flow: OidcFlow, *, is_https: bool) -> None:
        self.flow = flow
        self._is_https = is_https

    async def begin(self, request: Request, target: str) -> Response:
        """Redirect to the provider. Raises NotConnected, InvalidArgument."""
        addresses = await asyncio.to_thread(self.flow.addresses)
        url, browser = self.flow.begin(addresses, target)
        answer = RedirectResponse(url, HTTPStatus.SEE_OTHER)
        # Lax: the provider's site sends the browser back here.
        name = named_by_port(LOGIN_COOKIE, request)
        answer.set_cookie(
            name,
            browser,
            max_age=int(LOGIN_S),
            path="/login",
            httponly=True,
            samesite="lax",
            secure=self._is_https,
        )
        return answer

    async def came_back(self, request: Request) -> tuple[ShownToken, str]:
        """Finish a login: (the person's token, the page that the person requested). Raises
        NotAuthenticated, NotConnected.
        """
        given = request.query_params
        login = self.flow.came_back(
            given.get("state", ""), request.cookies.get(named_by_port(LOGIN_COOKIE, request), "")
        )
        if "code" not in given:
            said = f"{given.get('error', 'no code')} {given.get('error_description', '')}".strip()
            raise NotAuthenticated(f"the identity provider did not log you in: {said[:300]}")
        return ShownToken(
            await asyncio.to_thread(self.flow.finish, login, given["code"])
        ), login.target

    async def keeps(self, session: BrowserSession) -> bool:
        """True if the session continues: its token is valid, or was renewed. While the provider is
        unreachable, the last token counts.
        """
        shown = session.shown
        if shown is None or not self.flow.is_ending(shown.tokens):
            return True
        async with shown.renewing:
            if not self.flow.is_ending(shown.tokens):
                return True  # another request renewed it
            try:
                shown.tokens = await asyncio.to_thread(self.flow.renewed, shown.tokens)
            except NotAuthenticated as failure:
                log.info("a login is not renewed: %s", failure)
                return False
            except QmqError as failure:
                log.warning("a token is not renewed yet: %s", failure)
        return True


COOKIE: Final = "qmq_console"
MakeClient = Callable[[Callable[[], str] | None], "Client"]
"""Makes a client with a token's source; for None, with the console's own credentials."""

PAGES: Final = (
    *overview.PAGES,
    *subject.PAGES,
    *dead_letters.PAGES,
    *message.PAGES,
    *overview.CLUSTER_PAGES,
    *delays.PAGES,
    *routes.PAGES,
    *routes.LANE_PAGES,
)
ACTS: Final = (
    *dead_letters.ACTS,
    *overview.CLUSTER_ACTS,
    *delays.ACTS,
    *routes.ACTS,
    *routes.LANE_ACTS,
)


class ConsoleSite:
    """The application with its sessions. `close` ends the clients' connections.
    Clocks are handed in.
    """

    def __init__(
        self,
        config: ConsoleConfig,
        make_client: MakeClient,
        *,
        monotonic_s: Callable[[], float] = time.monotonic,
        wall_s: Callable[[], float] = time.time,
        key: str | None = None,
    ) -> None:
        self.config = config
        self.key = key if key is not None else secrets.token_urlsafe(24)
        """The secret of the login mode "own": a browser that shows it gets a session."""
        self.sessions = Sessions(monotonic_s)
        self._make_client, self._monotonic_s, self._wall_s = make_client, monotonic_s, wall_s
        self._environment = templates()
        self._own: ConsoleCaller | None = None
        self.oidc = self._oidc()
        self.app = Starlette(
            routes=self._routes(),
            middleware=[Middleware(ConsoleGuard, hosts=config.hosts, is_tls=config.is_tls)],
            exception_handlers={HTTPException: self._no_page},
            lifespan=self._lifespan,
        )

    def _oidc(self) -> OidcLogin | None:
        if self.config.oidc is None:
            return None
        from qmq.console.oidc import OidcFlow

        return OidcLogin(
            OidcFlow(self.config.oidc, monotonic_s=self._monotonic_s), is_https=self.config.is_https
        )

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        yield
        await self.close()

    def _routes(self) -> list[Route | Mount]:
        return [
            Route("/login", self._login, methods=["GET", "POST"]),
            Route("/login/{step}", self._login_step, methods=["GET"]),
            Route("/logout", self._logout, methods=["POST"]),
            Mount("/static", StaticFiles(directory=Path(__file__).parent / "static")),
            *[Route(path, self._page(act, is_act=True), methods=["POST"]) for path, act in ACTS],
            *[Route(path, self._page(show), methods=["GET"]) for path, show in PAGES],
        ]

    async def close(self) -> None:
        """Close all connections to the cluster."""
        callers = self.sessions.callers() | ({self._own} if self._own is not None else set())
        self._own = None
        for each in callers:
            await each.close()

    # --- pages ------------------------------------------------------------------------------------

    def _page(
        self, show: Show, *, is_act: bool = False
    ) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            words = wording_of(request)
            try:
                session = await self._session(request)
                if session is None:
                    return self._ask(request)
                proven(request.scope, session.principal)
                if is_act and not self.config.is_writable:
                    raise RefusedRequest(HTTPStatus.FORBIDDEN, words("refused.read_only"))
                answered = await show(
                    ConsolePage(request, session, self.config, self._environment, self._wall_s)
                )
                return (
                    self._known(request, answered, session)
                    if self.config.login is LoginMode.PROXY
                    else answered
                )
            except RefusedRequest as refused:
                return self._failure(request, refused.status, refused.text)
            except NotAuthenticated as failure:
                return self._failure(request, HTTPStatus.UNAUTHORIZED, str(failure))
            except QmqError as failure:
                return self._failure(request, status_of_failure(failure), str(failure))

        return answer

    def _failure(self, request: Request, status: HTTPStatus, text: str) -> Response:
        return rendered(
            request, self._environment, "failure.html", status, code=int(status), text=text
        )

    async def _no_page(self, request: Request, failure: Exception) -> Response:
        assert isinstance(failure, HTTPException)
        if failure.status_code != HTTPStatus.NOT_FOUND:
            return PlainTextResponse(failure.detail, failure.status_code)
        return self._failure(
            request,
            HTTPStatus.NOT_FOUND,
            wording_of(request)("refused.no_page", path=request.url.path),
        )

    def _ask(self, request: Request) -> Response:
        """Send a browser without a session to the login page of the login mode."""
        if self.config.login is LoginMode.PROXY:
            return self._failure(
                request,
                HTTPStatus.UNAUTHORIZED,
                wording_of(request)("refused.proxy", header=self.config.token_header),
            )
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        return RedirectResponse(
            f"/login?{urlencode({'next': path})}" if path != "/" else "/login", HTTPStatus.SEE_OTHER
        )

    # --- sessions ---------------------------------------------------------------------------------

    async def _session(self, request: Request) -> BrowserSession | None:
        await self._forget()
        found = self.sessions.find(request.cookies.get(cookie_of(request), ""))
        if found is not None and self.oidc is not None and not await self.oidc.keeps(found):
            await self._end(found)
            return None
        if self.config.login is not LoginMode.PROXY:
            return found
        token = self._token_of_proxy(request)
        if not token:
            return None
        if (
            found is not None
            and found.proxied is not None
            and hmac.compare_digest(found.proxied.text.encode(), token.encode())
        ):
            return found
        return await self._proxied(found, ProxyToken(check_token(token, self.config.token_header)))

    def _token_of_proxy(self, request: Request) -> str:
        """The token in a proxy's header; empty if there is none, and if the peer is no proxy.
        Raises InvalidArgument for several: a proxy that adds its header behind the browser's would
        leave the choice to the browser.
        """
        if request.client is None or request.client.host not in self.config.proxies:
            return ""
        shown = request.headers.getlist(self.config.token_header)
        if len(shown) > 1:
            raise InvalidArgument(
                f"{self.config.token_header} came {len(shown)} times: the proxy must replace "
                "the browser's"
            )
        scheme, _, token = shown[0].partition(" ") if shown else ("", "", "")
        return token if scheme.lower() == "bearer" else "".join(shown)

    async def _proxied(self, found: BrowserSession | None, token: ProxyToken) -> BrowserSession:
        """The session of a token that is new here. Raises NotAuthenticated, NotConnected.

        A proxy renews a person's token: then the session, its forms and its jobs continue, with the
        new one. Another person's token ends the session.
        """
        caller = self._caller(token)
        try:
            principal = await caller.principal()
            if found is not None and found.proxied is not None and found.principal == principal:
                await caller.close()
                found.proxied.text = token.text
                return found
            if found is not None:
                await self._end(found)
        except BaseException:
            await caller.close()
            raise
        return self.sessions.open(None, caller, principal=principal, proxied=token)

    async def _end(self, session: BrowserSession) -> None:
        self.sessions.close(session)
        await self._release(session.caller)

    async def _forget(self) -> None:
        for each in self.sessions.ended():
            await self._release(each.caller)

    async def _release(self, caller: ConsoleCaller) -> None:
        if caller is not self._own and caller not in self.sessions.callers():
            await caller.close()

    def _caller(self, token: str | Callable[[], str] | None) -> ConsoleCaller:
        if token is not None:
            source = token if callable(token) else lambda: token
            return ConsoleCaller(self._make_client(source), self._monotonic_s, self._wall_s)
        if self._own is None:
            self._own = ConsoleCaller(self._make_client(None), self._monotonic_s, self._wall_s)
        return self._own

    def _admit(self, request: Request, session: BrowserSession, target: str) -> Response:
        return self._known(request, RedirectResponse(target, HTTPStatus.SEE_OTHER), session)

    def _known(self, request: Request, answer: Response, session: BrowserSession) -> Response:
        answer.set_cookie(
            cookie_of(request),
            session.id,
            httponly=True,
            samesite="strict",
            secure=self.config.is_https,
        )
        return answer

    # --- logging in and out -----------------------------------------------------------------------

    async def _login(self, request: Request) -> Response:
        await self._forget()
        words, mode = wording_of(request), self.config.login
        target = own_path(request.query_params.get("next", "/"))
        try:
            if mode is LoginMode.OWN and (key := request.query_params.get("key", "")):
                if hmac.compare_digest(key.encode(), self.key.encode()):
                    return self._admit(
                        request, self.sessions.open(None, self._caller(None)), target
                    )
                raise RefusedRequest(HTTPStatus.FORBIDDEN, words("refused.key"))
            if mode is LoginMode.TOKEN and request.method == "POST":
                attempt(request.scope)
                return self._admit(
                    request, await self._with_token(await _posted(request, "token")), target
                )
        except RefusedRequest as refused:
            return self._login_page(request, refused.status, refused.text)
        except QmqError as failure:
            return self._login_page(request, _login_status(failure), str(failure))
        return self._login_page(request)

    async def _login_step(self, request: Request) -> Response:
        """Redirect to the identity provider, or handle the return from it."""
        if self.oidc is None or (step := request.path_params["step"]) not in ("begin", "callback"):
            raise HTTPException(HTTPStatus.NOT_FOUND)
        await self._forget()
        try:
            attempt(request.scope)
            if step == "begin":
                return await self.oidc.begin(
                    request, own_path(request.query_params.get("next", "/"))
                )
            shown, target = await self.oidc.came_back(request)
            session = await self._known_to_cluster(self._caller(shown), None, shown)
        except QmqError as failure:
            return self._login_page(request, _login_status(failure), str(failure))
        # A page instead of a redirect: the cookie is Strict, so a browser that another site
        # redirects here would not send it.
        return self._known(
            request, rendered(request, self._environment, "logged_in.html", target=target), session
        )

    def _login_page(self, request: Request, status: int = 200, failure: str = "") -> Response:
        begin = (
            f"/login/begin?{urlencode({'next': own_path(request.query_params.get('next', '/'))})}"
        )
        issuer = self.config.oidc.issuer if self.config.oidc is not None else ""
        return rendered(
            request,
            self._environment,
            "login.html",
            status,
            mode=self.config.login.value,
            failure=failure,
            begin=begin,
            issuer=issuer,
        )

    async def _with_token(self, token: str) -> BrowserSession:
        """Open a session for a token that the cluster knows. Raises NotAuthenticated,
        InvalidArgument, NotConnected.
        """
        return await self._known_to_cluster(self._caller(check_token(token, "the form")), token)

    async def _known_to_cluster(
        self, caller: ConsoleCaller, token: str | None, shown: ShownToken | None = None
    ) -> BrowserSession:
        try:
            principal = await caller.principal()
        except BaseException:
            await caller.close()
            raise
        return self.sessions.open(token, caller, shown, principal)

    async def _logout(self, request: Request) -> Response:
        session = self.sessions.find(request.cookies.get(cookie_of(request), ""))
        if session is not None and session.is_csrf(await _posted(request, "csrf")):
            await self._end(session)
        answer = RedirectResponse("/login", HTTPStatus.SEE_OTHER)
        answer.delete_cookie(
            cookie_of(request), httponly=True, samesite="strict", secure=self.config.is_https
        )
        return answer


def cookie_of(request: Request) -> str:
    """The name of the console's cookie in a browser. Browsers share cookies between a host's ports,
    so the port is part of the name.
    """
    return named_by_port(COOKIE, request)


def _login_status(failure: QmqError) -> int:
    """The status of a login that was refused."""
    if isinstance(failure, QuotaExceeded):
        return HTTPStatus.TOO_MANY_REQUESTS
    return (
        HTTPStatus.SERVICE_UNAVAILABLE if isinstance(failure, Unavailable) else HTTPStatus.FORBIDDEN
    )


async def _posted(request: Request, name: str) -> str:
    return parse_qs((await request.body()).decode("utf-8", "replace")).get(name, [""])[0].strip()


def own_path(target: str) -> str:
    """The path to show after a login. The path always belongs to this console, for any address in
    the request. Pure.
    """
    parts = urlsplit(target)
    is_own = (
        target.startswith("/")
        and not target.startswith(("//", "/\\"))
        and not parts.scheme
        and not parts.netloc
    )
    return target if is_own and target.isprintable() and "\\" not in target else "/"


CLIENT_NAME: Final = "qmq-console"
"""The client name that brokers and operators see."""
REQUESTS_MAX: Final = 500
"""Requests under way."""


class ConsoleServer:
    """Serves a console between `start` and `stop`. `start` raises OSError if the port is taken."""

    def __init__(
        self,
        config: ConsoleConfig,
        make_client: Callable[[Callable[[], str] | None], Client] | None = None,
        *,
        key: str | None = None,
    ) -> None:
        """`make_client` makes a client with a token's source, or with the environment's own
        credentials. `key` is that of `ConsoleSite`.
        """
        self.config = config
        self.site = ConsoleSite(config, make_client or self._client, key=key)
        self._server = WebServer(
            self.site.app,
            config.host,
            config.port,
            requests_max=REQUESTS_MAX,
            certificate=ServedCertificate.of(config.tls_cert, config.tls_key),
        )
        self.port = 0

    def _client(self, token: Callable[[], str] | None) -> Client:
        return qmq.connect(
            self.config.server,
            create_subjects=False,
            state_dir=False,
            token=token,
            name=CLIENT_NAME,
        )

    @property
    def url(self) -> str:
        """The console's address for browsers; in the login mode "own", it contains the key."""
        return self.config.url(self.port, self.site.key)

    async def start(self, listening: socket.socket | None = None) -> None:
        """Listen, at `listening` if it is given, and serve until `stop`."""
        self.port = await self._server.start(listening)

    async def stop(self) -> None:
        """Finish running requests, end streams, and close the connections to the cluster."""
        await self._server.stop()
        await self.site.close()
