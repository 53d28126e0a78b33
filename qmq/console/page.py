"""One request for a page: its session, its language, and its answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qs, urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from qmq.console.config import ConsoleConfig
from qmq.console.wording import (
    LANGUAGES,
    Wording,
    bytes_text,
    chosen_language,
    count_text,
    exact_time,
)
from qmq.errors import (
    AccessDenied,
    CallerError,
    CoordinationUnavailable,
    InvalidArgument,
    MessageNotFound,
    NeverReached,
    NotAuthenticated,
    QmqError,
    Unavailable,
    UnknownGroup,
    UnknownSubject,
)
from qmq.text import visible, whole_number

if TYPE_CHECKING:
    from qmq.client.client import Client
    from qmq.console.sessions import BrowserSession, ConsoleCaller

LANGUAGE_COOKIE: Final = "qmq_language"
LIVE_HEADER: Final = "x-live"
"""A page has it when it reads its live parts again (frontend/src/live.ts). Such an answer shows no
notes: they are for a person.
"""
_STATUS: Final = (
    (NotAuthenticated, HTTPStatus.UNAUTHORIZED),
    (AccessDenied, HTTPStatus.FORBIDDEN),
    (UnknownSubject, HTTPStatus.NOT_FOUND),
    (UnknownGroup, HTTPStatus.NOT_FOUND),
    (MessageNotFound, HTTPStatus.NOT_FOUND),
    (NeverReached, HTTPStatus.SERVICE_UNAVAILABLE),
    (CallerError, HTTPStatus.BAD_REQUEST),
    (Unavailable, HTTPStatus.SERVICE_UNAVAILABLE),
    (CoordinationUnavailable, HTTPStatus.SERVICE_UNAVAILABLE),
)


def _shown(value: Any) -> Any:
    """Removes characters that hide or reorder the text around them; Jinja escapes the rest."""
    return visible(value) if type(value) is str else value


def templates() -> Environment:
    """The templates' environment. It escapes every value,
    and raises an error for a missing name.
    """
    made = Environment(
        loader=PackageLoader("qmq.console"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"count": count_text, "bytes": bytes_text, "exact": exact_time}
    return made


class RefusedRequest(Exception):
    """Ends a request with a status and a text for a person."""

    def __init__(self, status: HTTPStatus, text: str) -> None:
        super().__init__(text)
        self.status, self.text = status, text


@dataclass(frozen=True, slots=True)
class ConsolePage:
    """A request with its session. The address holds the page's whole state."""

    request: Request
    session: BrowserSession
    config: ConsoleConfig
    environment: Environment
    wall_s: Callable[[], float]

    @property
    def caller(self) -> ConsoleCaller:
        return self.session.caller

    @property
    def mq(self) -> Client:
        """The caller's client."""
        return self.session.caller.client

    @property
    def words(self) -> Wording:
        return wording_of(self.request)

    @property
    def now_ms(self) -> int:
        return int(self.wall_s() * 1000)

    def text(self, name: str, default: str = "") -> str:
        """A parameter of the address."""
        return self.request.query_params.get(name, default).strip()

    def number(self, name: str, default: int, most: int) -> int:
        """A whole number from 0 to `most` in the address. Raises InvalidArgument."""
        return number_of(name, self.text(name), default, most)

    async def form(self) -> dict[str, str]:
        """The fields of a form from one of the console's pages. Raises RefusedRequest for a form
        from elsewhere.
        """
        given = {
            name: values[-1]
            for name, values in parse_qs(
                (await self.request.body()).decode("utf-8", "replace")
            ).items()
        }
        if not self.session.is_csrf(given.pop("csrf", "")):
            raise RefusedRequest(HTTPStatus.FORBIDDEN, self.words("refused.csrf"))
        return given

    async def render(self, template: str, status: int = 200, **values: Any) -> Response:
        """Render a page with its frame."""
        try:
            principal = await self.caller.principal()
        except QmqError:
            principal = "?"
        known = {
            "session": self.session,
            "principal": principal,
            "notes": [] if LIVE_HEADER in self.request.headers else self.session.taken_notes(),
            "is_writable": self.config.is_writable,
        }
        return rendered(
            self.request, self.environment, template, status, now_ms=self.now_ms, **known, **values
        )

    def back(self, path: str, note: str, **state: str) -> Response:
        """Redirect to another page, which shows `note` once."""
        self.session.notes.append(note)
        return RedirectResponse(
            path + (f"?{urlencode(state)}" if state else ""), HTTPStatus.SEE_OTHER
        )


def number_of(name: str, text: str, default: int, most: int) -> int:
    """A whole number from 0 to `most`. Raises InvalidArgument."""
    if not text:
        return default
    found = whole_number(text, most)
    if found is None:
        raise InvalidArgument(f"{name} is a number from 0 to {most}, not {text[:40]!r}")
    return found


def wording_of(request: Request) -> Wording:
    """The language of a request."""
    cookie, accepted = (
        request.cookies.get(LANGUAGE_COOKIE, ""),
        request.headers.get("accept-language", ""),
    )
    return Wording(chosen_language(request.query_params.get("lang", ""), cookie, accepted))


def rendered(
    request: Request, environment: Environment, template: str, status: int = 200, **values: Any
) -> Response:
    """Render a page. If the address names a language, a cookie keeps the language."""
    words = wording_of(request)
    path, query = (
        request.url.path,
        [(name, value) for name, value in request.query_params.multi_items() if name != "lang"],
    )
    switch = {
        language: f"{path}?{urlencode([*query, ('lang', language)])}" for language in LANGUAGES
    }
    text = environment.get_template(template).render(
        t=words,
        language=words.language,
        languages=LANGUAGES,
        switch=switch,
        path=path,
        query=dict(query),
        **values,
    )
    answer = HTMLResponse(text, status)
    if request.query_params.get("lang") in LANGUAGES:
        answer.set_cookie(
            LANGUAGE_COOKIE, words.language, max_age=365 * 86_400, httponly=True, samesite="strict"
        )
    return answer


def status_of_failure(failure: QmqError) -> HTTPStatus:
    """The HTTP status of one of QMQ's errors."""
    return next(
        (status for kind, status in _STATUS if isinstance(failure, kind)),
        HTTPStatus.INTERNAL_SERVER_ERROR,
    )


Show = Callable[[ConsolePage], Awaitable[Response]]
"""Answers a request for a page."""
