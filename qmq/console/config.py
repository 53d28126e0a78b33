"""The settings of a console, and the checks that find settings open to strangers. Pure."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Final
from urllib.parse import urlencode, urlsplit

from qmq.errors import InvalidArgument
from qmq.process.address import is_local
from qmq.text import joined

DEFAULT_PORT: Final = 20888
LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")


class LoginMode(Enum):
    """How a browser logs in, and whose rights it gets."""

    OWN = "own"
    """The rights of the person who starts the console: the context's certificate or token. The
    start prints a login address with a key.
    """
    TOKEN = "token"  # noqa: S105 - the name of a mode
    """The rights of the token that a person types in,
    from the cluster or from the identity provider.
    """
    PROXY = "proxy"
    """The rights of the token that a proxy, such as oauth2-proxy, adds to each request."""
    OIDC = "oidc"
    """The rights of the token that the identity provider issues at the login."""


@dataclass(frozen=True, slots=True)
class MaskRule:
    """Hides the value of every JSON field with this name, in subjects with this prefix."""

    field: str
    subject_prefix: str = ""

    @classmethod
    def parse(cls, text: str) -> MaskRule:
        """ "card", or "payments.*:card" for subjects with the prefix "payments.". Raises
        InvalidArgument.
        """
        subject, _, field = text.rpartition(":")
        if not field or "*" in subject.removesuffix("*"):
            raise InvalidArgument(f"{text!r} masks nothing: write FIELD, or SUBJECT*:FIELD")
        return cls(field, subject.removesuffix("*"))


def plain_host(host: str) -> str:
    """A host in the one form in which hosts are compared: lower case, an IPv6 address without
    brackets, as short as browsers write it.
    """
    bare = host.strip("[]").lower()
    try:
        return str(ipaddress.ip_address(bare))
    except ValueError:
        return bare


def require_safe(name: str, url: str) -> None:
    """Raises InvalidArgument for an address that would carry secrets without encryption."""
    parts = urlsplit(url)
    if (
        not (parts.scheme == "https" or (parts.scheme == "http" and is_local(parts.hostname or "")))
        or not parts.netloc
    ):
        raise InvalidArgument(
            f"{name} is an address that begins with https:// (http:// on this machine only), "
            f"not {url!r}"
        )


@dataclass(frozen=True, slots=True)
class OidcConfig:
    """The identity provider's settings. `token` names the token that the cluster gets: access_token
    or id_token.
    """

    issuer: str
    client_id: str
    redirect_url: str
    client_secret: str = field(default="", repr=False)
    scope: str = "openid"
    token: str = "access_token"  # noqa: S105 - the name of a field

    def check(self) -> None:
        """Raises InvalidArgument for a setting that cannot work."""
        for name, url in (
            ("QMQ_CONSOLE_OIDC_ISSUER", self.issuer),
            ("QMQ_CONSOLE_PUBLIC_URL", self.redirect_url),
        ):
            require_safe(name, url)
        if self.token not in ("access_token", "id_token"):
            raise InvalidArgument(
                f"QMQ_CONSOLE_OIDC_TOKEN is access_token or id_token, not {self.token!r}"
            )
        if "openid" not in self.scope.split():
            raise InvalidArgument("QMQ_CONSOLE_OIDC_SCOPE must have openid in it")


@dataclass(frozen=True, slots=True)
class ConsoleConfig:
    """The settings of a console. Port 0 takes a free one. `names` are the host names that browsers
    use beside loopback and `host`.
    """

    server: str
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    login: LoginMode = LoginMode.OWN
    is_writable: bool = False
    names: tuple[str, ...] = ()
    proxies: tuple[str, ...] = ()
    """The console takes the token header from these addresses only."""
    token_header: str = "x-forwarded-access-token"  # noqa: S105 - a name
    tls_cert: Path | None = None
    tls_key: Path | None = None
    masks: tuple[MaskRule, ...] = ()
    oidc: OidcConfig | None = None

    @property
    def is_tls(self) -> bool:
        """True if browsers connect to the console by TLS."""
        return self.tls_cert is not None

    @property
    def is_https(self) -> bool:
        """True if browsers reach the console by https, with the console's TLS or a proxy's."""
        return self.is_tls or (
            self.oidc is not None and self.oidc.redirect_url.startswith("https://")
        )

    def url(self, port: int, key: str) -> str:
        """The console's address for browsers; in the login mode "own", it contains the key."""
        scheme = "https" if self.is_tls else "http"
        path = f"/login?{urlencode({'key': key})}" if self.login is LoginMode.OWN else "/"
        return f"{scheme}://{joined(self.host, port)}{path}"

    @property
    def hosts(self) -> frozenset[str]:
        """The values that a request's Host header may have, without a port."""
        public = [urlsplit(self.oidc.redirect_url).hostname or ""] if self.oidc is not None else []
        return frozenset(plain_host(each) for each in (*LOOPBACK, self.host, *self.names, *public))


def check(config: ConsoleConfig, *, is_insecure: bool) -> tuple[str, ...]:
    """Warnings about settings that let strangers in. Raises InvalidArgument for impossible settings
    and, unless `is_insecure`, for these, too.
    """
    if (config.tls_cert is None) is not (config.tls_key is None):
        raise InvalidArgument(
            "TLS needs a certificate and its key: --tls-cert and --tls-key together"
        )
    if config.login is LoginMode.PROXY and not config.proxies:
        raise InvalidArgument(
            "--login proxy needs --trusted-proxy ADDRESS: the console ignores token headers "
            "from all other addresses"
        )
    for each in config.proxies:
        if not _is_address(each):
            raise InvalidArgument(
                "--trusted-proxy is an IP address as the console sees it, such as 10.0.0.7, "
                f"not {each!r}"
            )
    if config.proxies and config.login is not LoginMode.PROXY:
        raise InvalidArgument("--trusted-proxy is for --login proxy")
    if (config.oidc is None) is (config.login is LoginMode.OIDC):
        raise InvalidArgument(
            "--login oidc needs QMQ_CONSOLE_OIDC_ISSUER and QMQ_CONSOLE_OIDC_CLIENT_ID, and "
            "they are for --login oidc alone"
        )
    if config.oidc is not None:
        config.oidc.check()
    found = [] if is_local(config.host) else _weaknesses(config)
    if found and not is_insecure:
        raise InvalidArgument(
            f"{'; '.join(found)}; --insecure (QMQ_INSECURE=1) allows it on a private network "
            "(docs/CONSOLE.md)"
        )
    return tuple(found)


def _is_address(text: str) -> bool:
    """Whether this is an IP address, written as addresses of peers are."""
    try:
        return str(ipaddress.ip_address(text)) == text
    except ValueError:
        return False


def _weaknesses(config: ConsoleConfig) -> list[str]:
    found = []
    if config.login is LoginMode.OWN:
        found.append(
            "everyone who learns the key may act as you from everywhere that reaches "
            f"{config.host}: --login token asks each for a token"
        )
    if not config.is_tls:
        found.append(
            f"tokens and bodies would travel to {config.host} in clear text: --tls-cert and "
            "--tls-key encrypt them"
        )
    return found
