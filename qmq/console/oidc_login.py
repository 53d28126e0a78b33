"""The pages of the login mode "oidc": begin a login, return from the provider, and renew tokens."""

from __future__ import annotations

import asyncio
import logging
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from qmq.console.guard import named_by_port
from qmq.console.oidc import LOGIN_S, OidcFlow, ShownToken
from qmq.errors import NotAuthenticated, QmqError

if TYPE_CHECKING:
    from qmq.console.sessions import BrowserSession

log = logging.getLogger("qmq.console")

LOGIN_COOKIE: Final = "qmq_console_login"


class OidcLogin:
    """The login pages of one console. Threads ask the provider, so that other requests do not wait."""

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
        answer.set_cookie(name, browser, max_age=int(LOGIN_S), path="/login", httponly=True, samesite="lax", secure=self._is_https)
        return answer

    async def came_back(self, request: Request) -> tuple[ShownToken, str]:
        """Finish a login: (the person's token, the page that the person requested). Raises NotAuthenticated, NotConnected."""
        given = request.query_params
        login = self.flow.came_back(given.get("state", ""), request.cookies.get(named_by_port(LOGIN_COOKIE, request), ""))
        if "code" not in given:
            said = f"{given.get('error', 'no code')} {given.get('error_description', '')}".strip()
            raise NotAuthenticated(f"the identity provider did not log you in: {said[:300]}")
        return ShownToken(await asyncio.to_thread(self.flow.finish, login, given["code"])), login.target

    async def keeps(self, session: BrowserSession) -> bool:
        """True if the session continues: its token is valid, or was renewed. While the provider is unreachable, the last token counts."""
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
