"""A small identity provider for tests: OpenID Connect's code flow with PKCE over HTTP on this machine, with real keys and signatures."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import jwt
from cryptography.hazmat.primitives.asymmetric import ec

from qmq.console.oidc import challenge

CLIENT_ID = "qmq-console"
CLIENT_SECRET = "client's secret"


@dataclass
class IdentityProvider:
    """`changed` are claims of id tokens that a test forges; `refused` are grants that it does not take."""

    issuer: str = ""
    keys: dict[str, ec.EllipticCurvePrivateKey] = field(default_factory=lambda: {"one": ec.generate_private_key(ec.SECP256R1())})
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
            {**json.loads(made.to_jwk(key.public_key())), "kid": name, "use": "sig"} for name, key in self.keys.items() if name != "forged"
        ]
        return json.dumps({"keys": shown}).encode()

    def description(self) -> bytes:
        at = self.issuer
        return json.dumps(
            {"issuer": at, "authorization_endpoint": f"{at}/authorize", "token_endpoint": f"{at}/token", "jwks_uri": f"{at}/jwks"}
        ).encode()

    def signed(self, **claims: Any) -> str:
        now = int(time.time())
        whole = {"iss": self.issuer, "iat": now, "exp": now + self.lasts_s, **claims}
        return jwt.encode(
            whole, self.keys[self.signs_with], algorithm="ES256", headers={"kid": "one" if self.signs_with == "forged" else self.signs_with}
        )

    def logged_in(self, asked: dict[str, str], user: str) -> str:
        """The URL, with a code, to which the provider sends the browser after a login."""
        code = secrets.token_urlsafe(16)
        self.codes[code] = {**asked, "user": user}
        return f"{asked['redirect_uri']}?{urlencode({'code': code, 'state': asked['state']})}"

    def tokens(self, form: dict[str, str]) -> tuple[int, dict[str, Any]]:
        grant = form.get("grant_type", "")
        self.grants.append(grant)
        if grant in self.refused or form.get("client_id") != CLIENT_ID or form.get("client_secret") != CLIENT_SECRET:
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
        identity = {"sub": user, "aud": CLIENT_ID, **({"nonce": nonce} if nonce else {}), **self.changed}
        return {
            "access_token": self.signed(sub=user, aud="qmq", number=len(self.grants)),
            "id_token": self.signed(**identity),
            "refresh_token": refresh,
            "token_type": "Bearer",
            "expires_in": self.lasts_s,
        }


PAGE = """<!doctype html><html lang="en"><title>Provider</title><main><h1>Who are you?</h1>
<form method="post"><label>User <input name="user"></label><button>Sign in</button></form></main></html>"""


@contextmanager
def identity_provider() -> Iterator[IdentityProvider]:
    """Run a provider, which listens at its `issuer`."""
    found = IdentityProvider()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            return

        def answer(self, status: int, body: bytes, kind: str = "application/json", **headers: str) -> None:
            self.send_response(status)
            for name, value in {"content-type": kind, "content-length": str(len(body)), **headers}.items():
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
