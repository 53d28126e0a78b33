"""How a console is set up, and where strangers could reach what they must not. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from qmq.errors import InvalidArgument
from qmq.network import is_local

DEFAULT_PORT: Final = 20888
LOOPBACK: Final = ("localhost", "127.0.0.1", "[::1]")


class LoginMode(Enum):
    """Whose rights a browser has."""

    OWN = "own"
    """Those of who started the console: the context's certificate or token. The start prints an address with a key that lets in."""
    TOKEN = "token"  # noqa: S105 - the name of a mode
    """Those of the token that is typed in: the cluster's own, or the identity provider's."""
    PROXY = "proxy"
    """Those of the token that a proxy adds to each request, such as oauth2-proxy does."""
    OIDC = "oidc"
    """Those of the token that the identity provider gives to who logs in there."""


@dataclass(frozen=True, slots=True)
class MaskRule:
    """A part of bodies that is never shown: the value of a JSON field of this name, in subjects with this prefix."""

    field: str
    subject_prefix: str = ""

    @classmethod
    def parse(cls, text: str) -> MaskRule:
        """ "card", or "payments.*:card" for subjects that begin so. Raises InvalidArgument."""
        subject, _, field = text.rpartition(":")
        if not field or "*" in subject.removesuffix("*"):
            raise InvalidArgument(f"{text!r} masks nothing: write FIELD, or SUBJECT*:FIELD")
        return cls(field, subject.removesuffix("*"))


def require_safe(name: str, url: str) -> None:
    """Raises InvalidArgument for an address over which secrets would travel in the open."""
    parts = urlsplit(url)
    if not (parts.scheme == "https" or (parts.scheme == "http" and is_local(parts.hostname or ""))) or not parts.netloc:
        raise InvalidArgument(f"{name} is an address that begins with https:// (http:// on this machine only), not {url!r}")


@dataclass(frozen=True, slots=True)
class OidcConfig:
    """`token` names which of the provider's tokens the cluster is shown: access_token or id_token."""

    issuer: str
    client_id: str
    redirect_url: str
    client_secret: str = field(default="", repr=False)
    scope: str = "openid"
    token: str = "access_token"  # noqa: S105 - the name of a field

    def check(self) -> None:
        """Raises InvalidArgument."""
        for name, url in (("--oidc-issuer", self.issuer), ("--public-url", self.redirect_url)):
            require_safe(name, url)
        if self.token not in ("access_token", "id_token"):
            raise InvalidArgument(f"--oidc-token is access_token or id_token, not {self.token!r}")
        if "openid" not in self.scope.split():
            raise InvalidArgument("--oidc-scope must have openid in it")


@dataclass(frozen=True, slots=True)
class ConsoleConfig:
    """Port 0 takes a free one. `names` are host names by which browsers reach it beside loopback and `host`."""

    server: str
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    login: LoginMode = LoginMode.OWN
    is_writable: bool = False
    names: tuple[str, ...] = ()
    proxies: tuple[str, ...] = ()
    """Addresses from which the token header is taken."""
    token_header: str = "x-forwarded-access-token"  # noqa: S105 - a name
    tls_cert: Path | None = None
    tls_key: Path | None = None
    masks: tuple[MaskRule, ...] = ()
    oidc: OidcConfig | None = None

    @property
    def is_tls(self) -> bool:
        """Whether browsers speak TLS with the console."""
        return self.tls_cert is not None

    @property
    def is_https(self) -> bool:
        """Whether browsers reach it by https: its own, or that of what stands before it."""
        return self.is_tls or (self.oidc is not None and self.oidc.redirect_url.startswith("https://"))

    @property
    def hosts(self) -> frozenset[str]:
        """What a request's Host may name, without a port."""
        public = [urlsplit(self.oidc.redirect_url).hostname or ""] if self.oidc is not None else []
        return frozenset(each.lower() for each in (*LOOPBACK, self.host, *self.names, *public))


def check(config: ConsoleConfig, *, is_insecure: bool) -> tuple[str, ...]:
    """What is open to strangers, as warnings. Raises InvalidArgument for a setting that cannot be, and, unless `is_insecure`, for them."""
    if (config.tls_cert is None) is not (config.tls_key is None):
        raise InvalidArgument("TLS needs a certificate and its key: --cert and --key together")
    if config.login is LoginMode.PROXY and not config.proxies:
        raise InvalidArgument("--login proxy needs --trusted-proxy ADDRESS: from anybody else the token header is not taken")
    if config.proxies and config.login is not LoginMode.PROXY:
        raise InvalidArgument("--trusted-proxy is for --login proxy")
    if (config.oidc is None) is (config.login is LoginMode.OIDC):
        raise InvalidArgument("--login oidc needs --oidc-issuer and --oidc-client-id, and they are for --login oidc alone")
    if config.oidc is not None:
        config.oidc.check()
    found = [] if is_local(config.host) else _weaknesses(config)
    if found and not is_insecure:
        raise InvalidArgument(f"{'; '.join(found)}; --insecure (QMQ_INSECURE=1) allows it on a private network (docs/CONSOLE.md)")
    return tuple(found)


def _weaknesses(config: ConsoleConfig) -> list[str]:
    found = []
    if config.login is LoginMode.OWN:
        found.append(
            f"whoever learns the key may act as you from everywhere that reaches {config.host}: --login token asks each for a token"
        )
    if not config.is_tls:
        found.append(f"tokens and bodies would travel to {config.host} in clear text: --cert and --key encrypt them")
    return found
