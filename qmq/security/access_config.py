"""The settings of a server's access control, as its command line gives them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from qmq.security.principal import PrincipalRule

BY_URI: Final = PrincipalRule()
STALE_MS: Final = 300_000


@dataclass(frozen=True, slots=True)
class JwtConfig:
    """An identity provider whose tokens the server accepts.

    issuer: what its tokens say in `iss`.
    keys: its public keys: a file (JWKS or PEM), or the https:// address of its JWKS.
    audience: what its tokens must say in `aud`.
    claim: which claim names the principal.
    email_domain: the domain whose email addresses name principals by the part before the @.
    """

    issuer: str
    keys: str
    audience: str = "qmq"
    claim: str = "sub"
    email_domain: str = ""


@dataclass(frozen=True, slots=True)
class AccessConfig:
    """The settings of a server at its start.

    admins: principals that may do everything, independent of the rules. rule: how certificates name principals. stale_ms: for how long the
    last known rules apply while the coordination store is unavailable. jwt: an identity provider, if its tokens are accepted.
    audit_subject: the subject to which the audit log is also sent; empty for none.
    """

    admins: frozenset[str] = frozenset()
    rule: PrincipalRule = BY_URI
    stale_ms: int = STALE_MS
    jwt: JwtConfig | None = None
    audit_subject: str = ""
