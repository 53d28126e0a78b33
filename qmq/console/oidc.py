"""Login at an identity provider by OpenID Connect: the authorization code flow with PKCE (RFC 6749,
RFC 7636, OpenID Connect Core 1.0).

    browser ──▶ /login ──▶ the provider's page ──▶ /login/callback?code&state
    ──▶ console ──▶ token endpoint ──▶ session

What must hold:
* A code is exchanged only by the browser that began the login: `state` is bound to a cookie, and is
  used once.
* Logins that were begun are kept by nobody but the browsers: the cookie has what the login needs,
  `state` seals it, and verifier and nonce follow from it by a key that only this process has. So no
  number of begun logins can push out another one.
* A stolen code is worthless without the verifier, which never leaves the console (PKCE, S256).
* The id token is the provider's: its signature by the provider's keys, its issuer, that it is for
  this client, its end and its `nonce` are checked. Nothing of it decides about rights: the cluster
  checks the token that the session shows, each time (`QMQ_JWT_ISSUER`).
* Nothing is stored. A restart of the console forgets logins under way; people log in again.

The provider's addresses come from its own description (`/.well-known/openid-configuration`). All
are https, except on this machine.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import secrets
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import quote, urlencode, urlsplit

from qmq.console.config import OidcConfig, require_safe
from qmq.errors import InvalidArgument, NotAuthenticated, NotConnected
from qmq.security.access import JwtConfig
from qmq.security.jwt_tokens import WITHOUT_REDIRECTS, JwtVerifier
from qmq.text import parse_json

ANSWER_S: Final = 10.0
ANSWER_BYTES_MAX: Final = 1 << 20
LASTS_S_MAX: Final = 10 * 365 * 86_400
"""The longest life of a token that a provider may say."""
LOGIN_S: Final = 600.0
"""A person has this long to log in at the provider's page."""
USED_MAX: Final = 10_000
"""Logins of the last `LOGIN_S` that are remembered so that none is used twice."""
TARGET_CHARS_MAX: Final = 2_000
"""Browsers drop cookies of more than 4 KB: a login for a longer page shows the first page."""
RENEW_S: Final = 60.0
"""The console renews a token this long before its end, if the provider gave a refresh token."""

Ask = Callable[[str, Mapping[str, str] | None], bytes]
"""(address, form or None for GET) -> the answer's body. Raises NotConnected, NotAuthenticated."""


@dataclass(frozen=True, slots=True)
class ProviderAddresses:
    """The addresses in the provider's description."""

    authorize: str
    token: str
    keys: str


@dataclass(frozen=True, slots=True)
class OidcTokens:
    """The provider's tokens. `ends_s` is by the clock of the flow;
    0 if the provider gave no end.
    """

    shown: str = field(repr=False)
    """The token that the cluster gets."""
    refresh: str = field(default="", repr=False)
    ends_s: float = 0.0


@dataclass(slots=True, eq=False)
class ShownToken:
    """The current token of a session's client; it changes at each renewal.
    A call returns the token.
    """

    tokens: OidcTokens
    renewing: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __call__(self) -> str:
        return self.tokens.shown


@dataclass(frozen=True, slots=True)
class LoginUnderWay:
    """A login whose browser came back."""

    verifier: str = field(repr=False)
    nonce: str = field(repr=False)
    target: str


class OidcFlow:
    """The logins of one console. `ask` speaks with the provider and blocks: call `addresses`,
    `finish` and `renewed` in a thread.
    """

    def __init__(
        self,
        config: OidcConfig,
        *,
        ask: Ask | None = None,
        monotonic_s: Callable[[], float] = time.monotonic,
        make_secret: Callable[[], str] = lambda: secrets.token_urlsafe(32),
    ) -> None:
        self.config = config
        self._ask, self._monotonic_s, self._make_secret = (
            ask or ask_provider,
            monotonic_s,
            make_secret,
        )
        self._addresses: ProviderAddresses | None = None
        self._verifier: JwtVerifier | None = None
        self._key = secrets.token_bytes(32)
        self._used: dict[str, float] = {}
        """The states that came back, and when; the oldest first."""

    # --- the provider -----------------------------------------------------------------------------

    def addresses(self) -> ProviderAddresses:
        """Read the provider's description, once. Raises NotConnected, or InvalidArgument if the
        description belongs to another issuer.
        """
        if self._addresses is None:
            found = _object(
                self._ask(
                    self.config.issuer.rstrip("/") + "/.well-known/openid-configuration", None
                )
            )
            if found.get("issuer") != self.config.issuer:
                raise InvalidArgument(
                    f"{self.config.issuer} names itself {found.get('issuer')!r}: set "
                    "QMQ_CONSOLE_OIDC_ISSUER to exactly that"
                )
            names = ("authorization_endpoint", "token_endpoint", "jwks_uri")
            for name in names:
                require_safe(name, str(found.get(name, "")))
            self._addresses = ProviderAddresses(*[str(found[name]) for name in names])
        return self._addresses

    def _keys(self) -> JwtVerifier:
        if self._verifier is None:
            keys = self.addresses().keys
            config = JwtConfig(self.config.issuer, keys, audience=self.config.client_id)
            self._verifier = JwtVerifier(config, fetch=lambda: self._ask(keys, None))
        return self._verifier

    # --- a login ----------------------------------------------------------------------------------

    def begin(self, addresses: ProviderAddresses, target: str) -> tuple[str, str]:
        """Begin a login: (where to send the browser, the value of its cookie). `target` is the page
        that the person requested.
        """
        shown = target if len(target) <= TARGET_CHARS_MAX else "/"
        browser = ".".join(
            (self._make_secret(), str(int(self._monotonic_s() * 1000)), _packed(shown.encode()))
        )
        state, verifier, nonce = (
            self._derived(purpose, browser) for purpose in ("state", "verifier", "nonce")
        )
        asked = {
            "response_type": "code",
            "client_id": self.config.client_id,
            "redirect_uri": self.config.redirect_url,
            "scope": self.config.scope,
            "state": state,
            "nonce": nonce,
            "code_challenge": challenge(verifier),
            "code_challenge_method": "S256",
        }
        return (
            f"{addresses.authorize}{'&' if '?' in addresses.authorize else '?'}{urlencode(asked)}",
            browser,
        )

    def _derived(self, purpose: str, browser: str) -> str:
        return _packed(hmac.digest(self._key, f"{purpose} {browser}".encode(), "sha256"))

    def came_back(self, state: str, browser: str) -> LoginUnderWay:
        """Take the login of a browser that comes back; each login can be taken once.
        Raises NotAuthenticated.
        """
        now_s = self._monotonic_s()
        while self._used and (
            len(self._used) > USED_MAX or next(iter(self._used.values())) <= now_s - LOGIN_S
        ):
            del self._used[next(iter(self._used))]
        is_sealed = hmac.compare_digest(self._derived("state", browser).encode(), state.encode())
        if (
            not is_sealed
            or state in self._used
            or int(browser.split(".")[1]) / 1000 <= now_s - LOGIN_S
        ):
            raise NotAuthenticated(
                "this browser did not begin this login, or it took too long: log in again"
            )
        self._used[state] = now_s
        target = base64.urlsafe_b64decode(browser.split(".")[2] + "==").decode()
        return LoginUnderWay(
            self._derived("verifier", browser), self._derived("nonce", browser), target
        )

    def finish(self, login: LoginUnderWay, code: str) -> OidcTokens:
        """Exchange the code for tokens. Raises NotAuthenticated, NotConnected."""
        asked = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": self.config.redirect_url,
            "code_verifier": login.verifier,
        }
        told = self._tokens(asked)
        claims, _ = self._keys().claims(str(told.get("id_token", "")))
        if not hmac.compare_digest(str(claims.get("nonce", "")).encode(), login.nonce.encode()):
            raise NotAuthenticated(
                "the identity provider answered another login than this one: log in again"
            )
        if claims.get("azp", self.config.client_id) != self.config.client_id:
            raise NotAuthenticated(
                f"the token was made for {claims['azp']!r}, not for this console"
            )
        return self._given(told, "")

    def renewed(self, tokens: OidcTokens) -> OidcTokens:
        """Exchange the refresh token for new tokens. Raises NotAuthenticated, NotConnected."""
        return self._given(
            self._tokens({"grant_type": "refresh_token", "refresh_token": tokens.refresh}),
            tokens.refresh,
        )

    def is_ending(self, tokens: OidcTokens) -> bool:
        """True if the tokens need a renewal now."""
        return bool(tokens.refresh) and 0 < tokens.ends_s < self._monotonic_s() + RENEW_S

    def _tokens(self, asked: dict[str, str]) -> dict[str, Any]:
        asked["client_id"] = self.config.client_id
        if self.config.client_secret:
            asked["client_secret"] = self.config.client_secret
        return _object(self._ask(self.addresses().token, asked))

    def _given(self, told: dict[str, Any], refresh: str) -> OidcTokens:
        shown = told.get(self.config.token)
        if not isinstance(shown, str) or not shown:
            raise NotAuthenticated(f"the identity provider gave no {self.config.token}")
        lasts = told.get("expires_in", 0)
        is_time = type(lasts) in (int, float) and 0 < lasts <= LASTS_S_MAX
        ends_s = self._monotonic_s() + lasts if is_time else 0.0
        return OidcTokens(shown, str(told.get("refresh_token") or refresh), ends_s)


def challenge(verifier: str) -> str:
    """The challenge that the provider gets before it sees the verifier (RFC 7636, S256). Pure."""
    return _packed(hashlib.sha256(verifier.encode()).digest())


def _packed(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()


def ask_provider(url: str, form: Mapping[str, str] | None) -> bytes:
    """GET, or POST of a form. Raises NotConnected, NotAuthenticated if the provider refuses."""
    require_safe("the identity provider's address", url)
    data = None if form is None else urlencode(form, quote_via=quote).encode()
    request = urllib.request.Request(url, data, {"Accept": "application/json"})  # noqa: S310 - https, or this machine
    try:
        with WITHOUT_REDIRECTS.open(request, timeout=ANSWER_S) as answer:
            found: bytes = answer.read(ANSWER_BYTES_MAX)
            return found
    except urllib.error.HTTPError as failure:
        with failure:
            said = _error_of(failure.read(4096))
        raise NotAuthenticated(f"the identity provider refused: {said or failure}") from None
    except (OSError, ValueError) as failure:
        raise NotConnected(
            f"the identity provider at {urlsplit(url).netloc} does not answer: {failure}"
        ) from failure


def _error_of(body: bytes) -> str:
    try:
        told = parse_json(body)
        return f"{told['error']} {told.get('error_description', '')}".strip()
    except (ValueError, KeyError, TypeError, AttributeError):
        return ""


def _object(body: bytes) -> dict[str, Any]:
    try:
        found = parse_json(body)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise NotAuthenticated("the identity provider did not answer with JSON")
    return found
