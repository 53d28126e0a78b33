"""Random tokens for applications and people without certificates. Pure but for `secrets`.

    qmq_ID_SECRET      ID names the record in the coordination store, SECRET is 32 random bytes, base64 without padding

The coordination store has only the SHA-256 of the token. A secret of 256 random bits needs no slow hash: it cannot be guessed, and a slow
hash at each login would help attackers to overload the broker. A comparison takes the same time wherever two digests differ.

A token is sent only over TLS, over a socket of the machine or to a loopback address; a client refuses otherwise.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass
from typing import Final, NamedTuple

from qmq.errors import InvalidArgument, NotAuthenticated
from qmq.security.principal import LOCAL, Principal

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
    """Make a token. Raises InvalidArgument for a server's principal, which shows a certificate, and for a user of one machine."""
    if principal.is_server:
        raise InvalidArgument(f"{principal} is a server, which shows a certificate: `qmq cert server`")
    if principal.kind == LOCAL:
        raise InvalidArgument(f"{principal} is a user of one machine, identified by the kernel: tokens are for app:NAME or op:NAME")
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
    """The token's principal. Raises NotAuthenticated, with the same text and after the same work for an unknown and for a wrong token."""
    known = record.digest if record is not None else _NOBODYS
    if not hmac.compare_digest(known, digest_of(token)) or record is None:
        raise NotAuthenticated("the token is not known: it was revoked, or belongs to another cluster")
    if record.ends_ms and now_ms >= record.ends_ms:
        raise NotAuthenticated(f"token {record.id} has expired: `qmq user token {record.principal}` makes a new one")
    return record.principal
