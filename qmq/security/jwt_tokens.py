"""Tokens of an identity provider: JWTs, checked against the provider's public keys.

These are checked: the signature (ES256, EdDSA or RS256; never `none`, never a shared secret), the
issuer, the audience, and that the token has an expiry in the future. Clocks may differ by
`LEEWAY_S`.

The keys come from a file (a JWKS, or one public key in PEM) or from a JWKS at an https:// address.
A thread fetches them when the server starts, then every `REFRESH_S` and when a token names an
unknown key, so no login waits for the provider. While the provider is unavailable, the last fetched
keys are used.

The principal is the claim `sub`, or the configured claim: `app:NAME` and `op:NAME` are taken
unchanged, any other text is an application's name. A claim that people may choose for themselves
(OpenID Connect Core 5.1) names an application only. Of an email address in the configured domain
the name is the part before the @; an address of another domain is somebody else, and is refused.
"""

from __future__ import annotations

import logging
import threading
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import jwt

from qmq.errors import CallerError, InvalidArgument, NotAuthenticated
from qmq.security.access import JwtConfig
from qmq.security.principal import CLIENTS, Principal
from qmq.text import parse_json

log = logging.getLogger("qmq.security")

ALGORITHMS: Final = ("ES256", "EdDSA", "RS256")
LEEWAY_S: Final = 30
REFRESH_S: Final = 300.0
ASK_AGAIN_S: Final = 10.0
"""The pause between two fetches, at least: any peer can name an unknown key."""
FETCH_S: Final = 5.0
KEYS_BYTES_MAX: Final = 1 << 20
CHOSEN_CLAIMS: Final = frozenset(
    {
        "name",
        "given_name",
        "family_name",
        "middle_name",
        "nickname",
        "preferred_username",
        "profile",
        "website",
        "email",
    }
)

_INVALID: Final = (jwt.PyJWTError, ValueError, TypeError, OverflowError, RecursionError)
"""What PyJWT and `int` raise for a token: not all versions of PyJWT turn errors of Python's JSON
parser into their own.
"""

Fetch = Callable[[], bytes]


@dataclass(frozen=True, slots=True)
class _Keys:
    """The keys by id; the key of a PEM file has no id."""

    by_id: dict[str, Any]
    fetched_s: float


class JwtVerifier:
    """Verifies tokens. Raises InvalidArgument if the keys' file cannot be used. `fetch` returns the
    keys' text; a test hands in its own.
    """

    def __init__(
        self,
        config: JwtConfig,
        *,
        fetch: Fetch | None = None,
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._fetch = fetch or _fetch_of(config.keys)
        self._now_ms, self._monotonic_s = now_ms, monotonic_s
        self._asked_s = float("-inf")
        self._keys = _Keys({}, float("-inf"))
        self._lock = threading.Lock()
        try:
            self._load()
        except (OSError, ValueError, InvalidArgument) as cause:
            if "://" not in config.keys:
                raise InvalidArgument(
                    f"{config.keys} holds no keys that can be used: {cause}"
                ) from cause
            log.warning("the keys of %s cannot be fetched, trying again: %s", config.issuer, cause)

    # --- checking ---------------------------------------------------------------------------------

    def verify(self, token: str) -> tuple[Principal, int]:
        """The token's principal, and its expiry with the leeway in milliseconds since 1970.
        Raises NotAuthenticated.
        """
        claims, ends_ms = self.claims(token)
        return self._principal(claims), ends_ms

    def claims(self, token: str) -> tuple[dict[str, Any], int]:
        """The claims of a valid token, and its expiry as in `verify`. Raises NotAuthenticated."""
        key = self._key_of(token)
        try:
            claims = jwt.decode(
                token,
                key,
                algorithms=list(ALGORITHMS),
                audience=self._config.audience,
                issuer=self._config.issuer,
                leeway=LEEWAY_S,
                options={
                    "require": ["exp", "iss", "aud"],
                    "verify_exp": False,
                    "verify_nbf": False,
                    "verify_iat": False,
                },
            )
            ends_ms, begins_ms = int(claims["exp"]) * 1000, int(claims.get("nbf", 0)) * 1000
        except _INVALID as cause:
            raise NotAuthenticated(
                f"the token of {self._config.issuer} is not valid: {cause}"
            ) from None
        now_ms = self._now_ms()
        ends_ms += LEEWAY_S * 1000
        if now_ms >= ends_ms:
            raise NotAuthenticated(
                "the token has expired: get a new one from the identity provider"
            )
        if now_ms < begins_ms - LEEWAY_S * 1000:
            raise NotAuthenticated("the token is not valid yet: do the clocks differ?")
        return claims, ends_ms

    def _principal(self, claims: dict[str, Any]) -> Principal:
        claim = claims.get(self._config.claim)
        if not isinstance(claim, str):
            raise NotAuthenticated(
                f"the token has no claim {self._config.claim!r}, which says who this is"
            )
        if self._config.claim == "email" and claims.get("email_verified") in (False, "false"):
            raise NotAuthenticated(
                "the identity provider has not verified this email address: it names whom "
                "the person chose"
            )
        name, at, domain = claim.rpartition("@") if "@" in claim else (claim, "", "")
        wanted = self._config.email_domain.lower()
        if at and (not wanted or domain.lower() != wanted):
            raise NotAuthenticated(
                f"the claim {self._config.claim!r} is an email address of {domain!r}"
                + (
                    f", and not of {wanted}"
                    if wanted
                    else ": QMQ_JWT_EMAIL_DOMAIN names the domain whose people may come"
                )
            )
        has_kind = name.partition(":")[0] in CLIENTS
        if has_kind and self._config.claim in CHOSEN_CLAIMS:
            raise NotAuthenticated(
                f"people choose the claim {self._config.claim!r} themselves, so it names no "
                f"kind of principal: {name!r}"
            )
        try:
            return Principal.parse(name if has_kind else f"app:{name}")
        except CallerError:
            raise NotAuthenticated(
                f"the claim {self._config.claim!r} holds no name of a principal: "
                "QMQ_JWT_CLAIM names another one"
            ) from None

    def _key_of(self, token: str) -> Any:
        try:
            key_id = str(jwt.get_unverified_header(token).get("kid", ""))
        except _INVALID:
            raise NotAuthenticated(
                "this is not a token of this cluster or of its identity provider"
            ) from None
        keys = self._keys
        if self._monotonic_s() - keys.fetched_s > REFRESH_S or (
            key_id not in keys.by_id and "" not in keys.by_id
        ):
            self._refresh()
            keys = self._keys
        found = keys.by_id.get(key_id) or keys.by_id.get("")
        if found is None:
            raise NotAuthenticated(
                f"the token is signed with a key that {self._config.issuer} does not publish "
                "(yet): try again"
            )
        return found

    # --- keys -------------------------------------------------------------------------------------

    def _refresh(self) -> None:
        """Fetch the keys in a thread, at most once in `ASK_AGAIN_S`."""
        now_s = self._monotonic_s()
        if now_s - self._asked_s < ASK_AGAIN_S:
            return
        self._asked_s = now_s
        threading.Thread(target=self._load_quietly, name="qmq-jwks", daemon=True).start()

    def _load_quietly(self) -> None:
        try:
            self._load()
        except (OSError, ValueError, InvalidArgument) as cause:
            log.warning(
                "the keys of %s cannot be fetched, the previous ones stay in use: %s",
                self._config.issuer,
                cause,
            )

    def _load(self) -> None:
        with self._lock:
            found = _parse(self._fetch())
            self._keys = _Keys(found, self._monotonic_s())


def _parse(text: bytes) -> dict[str, Any]:
    """Public keys by id. Raises ValueError, InvalidArgument."""
    if text.lstrip().startswith(b"-----BEGIN"):
        from cryptography.hazmat.primitives.serialization import load_pem_public_key

        return {"": load_pem_public_key(text)}
    found: dict[str, Any] = {}
    key_set = parse_json(text)
    keys = key_set.get("keys") if isinstance(key_set, dict) else None
    if not isinstance(keys, list) or not all(isinstance(each, dict) for each in keys):
        raise InvalidArgument("it is no JSON Web Key Set")
    for each in keys:
        if each.get("kty") in ("EC", "RSA", "OKP") and each.get("use", "sig") == "sig":
            try:
                found[str(each.get("kid", ""))] = jwt.PyJWK(each).key
            except (jwt.PyJWTError, ValueError, TypeError) as cause:
                log.warning("a key of the identity provider is skipped: %s", cause)
    if not found:
        raise InvalidArgument("there is no public key in it")
    return found


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """Refuse redirects: another server, or one without TLS, would get the secret of a form, or
        choose the keys.
        """
        return


WITHOUT_REDIRECTS: Final = urllib.request.build_opener(_NoRedirects)
"""Asks an identity provider."""


def _fetch_of(keys: str) -> Fetch:
    """The function that fetches the keys. Raises InvalidArgument for an address without TLS."""
    if "://" not in keys:
        return Path(keys).read_bytes
    if not keys.startswith("https://"):
        raise InvalidArgument(
            f"the identity provider's keys come from a file or from https://, not from {keys}"
        )

    def fetch() -> bytes:
        with WITHOUT_REDIRECTS.open(keys, timeout=FETCH_S) as answer:
            text: bytes = answer.read(KEYS_BYTES_MAX + 1)
        if len(text) > KEYS_BYTES_MAX:
            raise InvalidArgument(f"{keys} answers with more than {KEYS_BYTES_MAX} bytes")
        return text

    return fetch
