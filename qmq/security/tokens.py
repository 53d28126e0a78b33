"""Random tokens for applications and people without certificates, and where a client finds its own.

    qmq_ID_SECRET      ID names the record in the coordination store, SECRET is 32 random bytes,
                       base64 without padding

The coordination store has only the SHA-256 of the token. A secret of 256 random bits needs no slow
hash: it cannot be guessed, and a slow hash at each login would help attackers to overload the
broker. A comparison takes the same time wherever two digests differ.

A token is sent only over TLS, over a socket of the machine or to a loopback address; a client
refuses otherwise.

A client's token is an argument, or in the environment:

    QMQ_TOKEN_FILE   a file with the token, which is read again when it changes: as Kubernetes
                     renews it
    QMQ_TOKEN        the token itself
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from qmq.errors import InvalidArgument, NotAuthenticated
from qmq.security.contexts import environment_of
from qmq.security.principal import LOCAL, Principal, TokenSource

PREFIX: Final = "qmq_"
ID_CHARS: Final = 12
SECRET_BYTES: Final = 32
_TOKEN: Final = re.compile(r"qmq_([0-9a-f]{12})_([A-Za-z0-9_-]{43})")


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """The stored record of a token. `ends_ms`: milliseconds since 1970, 0 for never."""

    id: str
    principal: Principal
    digest: str
    ends_ms: int = 0
    by: str = ""
    at_ms: int = 0


class NewToken(NamedTuple):
    """A new token, which is shown once, and its record."""

    token: str
    record: TokenRecord

    def __repr__(self) -> str:
        return f"NewToken({self.record.id})"


def new_token(principal: Principal, *, by: str, now_ms: int, ends_ms: int = 0) -> NewToken:
    """Make a token. Raises InvalidArgument for a server's principal, which shows a certificate, and
    for a user of one machine.
    """
    if principal.is_server:
        raise InvalidArgument(
            f"{principal} is a server, which shows a certificate: `qmq cert server`"
        )
    if principal.kind == LOCAL:
        raise InvalidArgument(
            f"{principal} is a user of one machine, identified by the kernel: tokens are for "
            "app:NAME or op:NAME"
        )
    number = secrets.token_hex(ID_CHARS // 2)
    token = f"{PREFIX}{number}_{secrets.token_urlsafe(SECRET_BYTES)}"
    return NewToken(token, TokenRecord(number, principal, digest_of(token), ends_ms, by, now_ms))


def digest_of(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


_NOBODYS: Final = digest_of("")


def id_of(token: str) -> str:
    """The id of the token's record; empty if the text is not a token of QMQ."""
    found = _TOKEN.fullmatch(token)
    return found[1] if found is not None else ""


def check_token(token: str, record: TokenRecord | None, now_ms: int) -> Principal:
    """The token's principal. Raises NotAuthenticated, with the same text and after the same work
    for an unknown and for a wrong token.
    """
    known = record.digest if record is not None else _NOBODYS
    if not hmac.compare_digest(known, digest_of(token)) or record is None:
        raise NotAuthenticated(
            "the token is not known: it was revoked, or belongs to another cluster"
        )
    if record.ends_ms and now_ms >= record.ends_ms:
        raise NotAuthenticated(
            f"token {record.id} has expired: `qmq user token {record.principal}` makes a new one"
        )
    return record.principal


TOKEN_VARIABLE: Final = "QMQ_TOKEN"  # noqa: S105 - a name
TOKEN_FILE_VARIABLE: Final = "QMQ_TOKEN_FILE"  # noqa: S105 - a name
LOOK_S: Final = 1.0
TOKEN_CHARS_MAX: Final = 8_192

Token = str | Path | TokenSource | None
"""A token, the file that contains the token, or a function that returns the current token."""


class TokenFile:
    """A file that contains a token. A call returns the current token. Raises InvalidArgument if the
    file cannot be read.
    """

    def __init__(self, path: Path, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        self._path, self._monotonic_s = path, monotonic_s
        self._looked_s = float("-inf")
        self._token = ""

    def __call__(self) -> str:
        now_s = self._monotonic_s()
        if now_s - self._looked_s >= LOOK_S:
            self._token = self._read()
            self._looked_s = now_s
        return self._token

    def _read(self) -> str:
        try:
            found = self._path.read_text().strip()
        except (OSError, ValueError) as cause:
            raise InvalidArgument(f"the token cannot be read from {self._path}: {cause}") from cause
        return check(found, str(self._path))


def check(token: str, where: str) -> str:
    """Return the token. Raises InvalidArgument for an impossible token; the error's text does not
    contain the token.
    """
    if (
        not token
        or len(token) > TOKEN_CHARS_MAX
        or not token.isascii()
        or not token.isprintable()
        or " " in token
    ):
        raise InvalidArgument(
            f"{where} has no token: a token is one word of at most {TOKEN_CHARS_MAX} characters"
        )
    return token


def token_source(token: Token, environment: Mapping[str, str] | None = None) -> TokenSource | None:
    """The token's source: the argument, or else the environment or its context; None if there is
    none. Raises InvalidArgument.
    """
    if token is None:
        environment = environment_of() if environment is None else environment
        path, text = environment.get(TOKEN_FILE_VARIABLE), environment.get(TOKEN_VARIABLE)
        if path:
            return TokenFile(Path(path))
        token = text or None
    if token is None:
        return None
    if isinstance(token, Path):
        return TokenFile(token)
    if isinstance(token, str):
        text = check(token, "token")
        return lambda: text
    return token
