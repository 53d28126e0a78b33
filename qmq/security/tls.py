"""TLS from PEM files, which are read again when they change.

    Tls                  the paths of the files, and the requirements for the other side
    Credentials          the current content of the files: contexts for listening and connecting,
                         credentials for gRPC channels
    ServedCertificate    a web server's certificate and its key, without an authority for clients

A process has one `Credentials` for all of its ports and connections. To renew certificates, replace
the files; within `LOOK_S` new connections use the new certificate, and open connections stay. If
the files do not fit each other (only one of them was replaced so far), or are invalid, the process
continues with the old ones, logs this once, and looks again.

Connections use TLS 1.3; `allows_tls12` also accepts peers without TLS 1.3. The name or address in a
server's certificate must be the one to which the connection was opened.

`left_s` and `ExpiryWarning` tell servers when their own certificate ends: a metric, and a daily
warning in the last week. They need `cryptography`, which servers have.
"""

from __future__ import annotations

import logging
import re
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from qmq.errors import InvalidArgument, NotConnected, QmqError, TlsEnded, TlsFailed
from qmq.security.contexts import environment_of

if TYPE_CHECKING:
    import grpc


log = logging.getLogger("qmq.security")

LOOK_S: Final = 10.0
"""The files are checked at this interval. Certificates are renewed days before they expire, so this
is often enough.
"""
ALPN: Final = "qmq"
"""The protocol that data ports speak."""
RPC_ALPN: Final = "h2"
"""The protocol that control ports speak: HTTP/2, for gRPC."""
WEB_ALPN: Final = "http/1.1"
"""The protocol that the console and the HTTP gateway speak."""
CA_VARIABLE: Final = "QMQ_TLS_CA"
CERT_VARIABLE: Final = "QMQ_TLS_CERT"
KEY_VARIABLE: Final = "QMQ_TLS_KEY"


@dataclass(frozen=True, slots=True)
class Tls:
    """Where a process finds its certificates: PEM files.

    ca: the certificates of those who sign for the other side. cert, key: this process's own
    certificate, with the chain behind it, and its private key without a password. A server needs
    them;
        a client needs them where servers ask clients for a certificate.
    requires_clients: whether a server takes only clients that show a certificate which `ca` signed.
    allows_tls12: whether TLS 1.2 is spoken besides 1.3.
    """

    ca: Path | str
    cert: Path | str | None = None
    key: Path | str | None = None
    requires_clients: bool = True
    allows_tls12: bool = False

    def __post_init__(self) -> None:
        if (self.cert is None) is not (self.key is None):
            raise InvalidArgument("a certificate and its key go together: give both, or neither")

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Tls | None:
        """The files of QMQ_TLS_CA, QMQ_TLS_CERT and QMQ_TLS_KEY, or of the context; None without
        QMQ_TLS_CA. Raises InvalidArgument.
        """
        environment = environment_of() if environment is None else environment
        ca, cert, key = (
            environment.get(name) for name in (CA_VARIABLE, CERT_VARIABLE, KEY_VARIABLE)
        )
        if not ca:
            if cert or key:
                raise InvalidArgument(
                    f"{CERT_VARIABLE} and {KEY_VARIABLE} need {CA_VARIABLE}: the CA that "
                    "signs the servers' certificates"
                )
            return None
        return cls(Path(ca), Path(cert) if cert else None, Path(key) if key else None)


class Pem(NamedTuple):
    """The content of the files. `version` counts its changes."""

    version: int
    ca: bytes
    cert: bytes | None
    key: bytes | None


Signature = tuple[tuple[int, int, int], ...]
"""(inode, size, modification time in nanoseconds) of each file.
A replaced file has another signature.
"""


class Credentials:
    """The certificates of a process. `monotonic_s` is a clock for `LOOK_S`.

    Raises InvalidArgument if the files cannot be read, or are not what they should be.
    """

    def __init__(self, files: Tls, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        self.files = files
        self._monotonic_s = monotonic_s
        self._signature = self._sign()
        self._pem = self._read(1)
        self._looked_s = monotonic_s()
        self._rejected: Signature | None = None
        self._client_context: tuple[int, ssl.SSLContext] | None = None

    # --- what the files hold ----------------------------------------------------------------------

    @property
    def pem(self) -> Pem:
        """The content of the files as of the last check. A check that is due runs first."""
        if self._monotonic_s() - self._looked_s >= LOOK_S:
            self.look()
        return self._pem

    def look(self) -> None:
        """Check the files now. Unusable files change nothing, and are logged once."""
        self._looked_s = self._monotonic_s()
        try:
            signature = self._sign()
            if signature in (self._signature, self._rejected):
                return
            self._rejected = signature
            self._pem = self._read(self._pem.version + 1)
        except InvalidArgument as cause:
            log.error("new certificates cannot be used, the old ones stay in use: %s", cause)
            return
        self._signature, self._rejected = signature, None
        log.info("new certificates are in use")

    def _paths(self) -> tuple[Path, ...]:
        return tuple(
            Path(path)
            for path in (self.files.ca, self.files.cert, self.files.key)
            if path is not None
        )

    def _sign(self) -> Signature:
        try:
            found = [path.stat() for path in self._paths()]
        except OSError as cause:
            raise InvalidArgument(f"a certificate cannot be read: {cause}") from cause
        return tuple((each.st_ino, each.st_size, each.st_mtime_ns) for each in found)

    def _read(self, version: int) -> Pem:
        try:
            contents = [
                None if path is None else Path(path).read_bytes()
                for path in (self.files.ca, self.files.cert, self.files.key)
            ]
            pem = Pem(version, contents[0] or b"", contents[1], contents[2])
            self._fill(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), pem)
        except (OSError, ValueError) as cause:  # ssl.SSLError is an OSError
            names = ", ".join(map(str, self._paths()))
            raise InvalidArgument(
                f"these certificates and keys do not belong together: {names} ({cause})"
            ) from cause
        return pem

    # --- contexts for ports and for the data plane ------------------------------------------------

    def _fill(self, context: ssl.SSLContext, pem: Pem, alpn: str = ALPN) -> ssl.SSLContext:
        context.minimum_version = (
            ssl.TLSVersion.TLSv1_2 if self.files.allows_tls12 else ssl.TLSVersion.TLSv1_3
        )
        context.set_alpn_protocols([alpn])
        context.load_verify_locations(cadata=pem.ca.decode("ascii"))
        if self.files.cert is not None and self.files.key is not None:
            context.load_cert_chain(self.files.cert, self.files.key)
        return context

    def server_context(self, alpn: str = ALPN) -> ssl.SSLContext:
        """The context for listening, from the files' current content. Raises InvalidArgument
        without a certificate.
        """
        if self.files.cert is None:
            raise InvalidArgument(
                "a server needs a certificate and a key: --tls-cert and --tls-key"
            )
        context = self._fill(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), self.pem, alpn)
        context.verify_mode = (
            ssl.CERT_REQUIRED if self.files.requires_clients else ssl.CERT_OPTIONAL
        )
        return context

    def client_context(self) -> ssl.SSLContext:
        """The context for connecting, from the files' current content."""
        pem = self.pem
        if self._client_context is None or self._client_context[0] != pem.version:
            self._client_context = (
                pem.version,
                self._fill(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), pem),
            )
        return self._client_context[1]

    # --- credentials for gRPC ---------------------------------------------------------------------

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """The credentials for a gRPC channel, from the files' current content."""
        import grpc

        pem = self.pem
        return grpc.ssl_channel_credentials(pem.ca, pem.key, pem.cert)

    @property
    def version(self) -> int:
        """The number of changes of the files.
        The owner of a channel replaces the channel after a change.
        """
        return self.pem.version


class ServedCertificate:
    """The certificate of a web server, which asks its clients for none. TLS 1.3; a new connection
    uses the files' content as the last `look` found it.
    """

    def __init__(self, cert: Path, key: Path) -> None:
        """Raises InvalidArgument if the files cannot be used."""
        self._cert, self._key = cert, key
        self._read = self._seen = self._content()
        self._version = 1
        try:
            self._context = self._loaded()
        except (OSError, ssl.SSLError) as cause:
            raise InvalidArgument(
                f"{cert} and {key} are no certificate with its key: {cause}"
            ) from cause

    @classmethod
    def of(cls, cert: Path | None, key: Path | None) -> ServedCertificate | None:
        """None without files. Raises InvalidArgument."""
        return None if cert is None or key is None else cls(cert, key)

    def _content(self) -> tuple[bytes, bytes] | None:
        try:
            return self._cert.read_bytes(), self._key.read_bytes()
        except OSError:
            return None

    def _loaded(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_cert_chain(self._cert, self._key)
        return context

    @property
    def version(self) -> int:
        """The number of changes of the files, which need a new context."""
        return self._version

    def server_context(self, alpn: str = WEB_ALPN) -> ssl.SSLContext:
        """The context for listening."""
        self._context.set_alpn_protocols([alpn])
        return self._context

    def look(self) -> None:
        """Use the files if they changed. Files that cannot be used, as when only one of them was
        replaced so far, are logged once.
        """
        found = self._content()
        if found is None or found in (self._read, self._seen):
            return
        self._seen = found
        try:
            self._context = self._loaded()
        except (OSError, ssl.SSLError) as cause:
            log.warning(
                "%s and %s changed and cannot be used, the old certificate stays: %s",
                self._cert,
                self._key,
                cause,
            )
            return
        self._read = found
        self._version += 1
        log.info("connections use the new certificate in %s", self._cert)


def tls_failed(address: str, reason: object) -> TlsFailed:
    """The error for a connection that failed because of TLS, with what to do about this reason."""
    kind = TlsFailed if _IS_CERTAIN.search(str(reason)) else TlsEnded
    return kind(f"no TLS with {address}: {reason}. {_what_to_do(str(reason))}")


def _what_to_do(reason: str) -> str:
    return next((advice for sign, advice in _ADVICE if sign.search(reason)), _ASK_ALL)


_ADVICE: Final = (
    (
        re.compile("has expired|not yet valid"),
        (
            "The server's certificate is not valid now: replace it (`qmq cert server`), or "
            "correct this machine's clock"
        ),
    ),
    (
        re.compile("Hostname Verification|mismatch"),
        "The server's certificate is not for this address: use a name that it has (servers: "
        "--advertise), or make one with this address (`qmq cert server NAME --host HOST`)",
    ),
    (
        re.compile("certificate purpose"),
        "The server shows the certificate of a client: give it one of `qmq cert server`",
    ),
    (
        re.compile("CERTIFICATE_VERIFY_FAILED"),
        f"{CA_VARIABLE} must name the CA that signed the server's certificate",
    ),
)
_IS_CERTAIN: Final = re.compile(
    "CERTIFICATE|VERSION|ALERT|PACKET|HTTP_REQUEST|Hostname Verification"
)
"""What a reason says if TLS itself has failed, and not only the connection under it."""
_ASK_ALL: Final = (
    f"Does {CA_VARIABLE} name the CA that signed the server's certificate, "
    "is the server's name in that certificate, and does the server speak TLS?"
)


def ended_unheard(address: str, files: Tls | None) -> QmqError:
    """The error for a server that ended a connection before it said anything.

    With TLS 1.3 a server sees its client's certificate after the client's part of the handshake, so
    a client whose certificate is refused sees an end without a reason.
    """
    if files is None:
        return NotConnected(
            f"{address} ended the connection before its greeting. Does it ask for TLS "
            f"({CA_VARIABLE})?"
        )
    if files.cert is None:
        advice = (
            f"does it take only clients with a certificate? {CERT_VARIABLE} and {KEY_VARIABLE} "
            "name one"
        )
    else:
        advice = (
            f"does it refuse the certificate {files.cert}? A CA that the server trusts must have "
            "signed it, and it must be valid now"
        )
    return TlsEnded(f"{address} ended the connection behind the handshake of TLS: {advice}")


WARNING: Final = timedelta(days=7)
AGAIN: Final = timedelta(days=1)


def _end(cert: bytes) -> datetime:
    from qmq.security.certificates import (
        ends_at,
    )  # `cryptography` takes 40 ms to import: do it only with TLS

    return ends_at(cert)


def now() -> datetime:
    """The machine's wall clock. A certificate's expiry depends on this clock, even if the process
    uses another one.
    """
    return datetime.now(UTC)


def left_s(credentials: Credentials, now: datetime) -> float | None:
    """Seconds until the process's own certificate ends; None without one."""
    cert = credentials.pem.cert
    return None if cert is None else (_end(cert) - now).total_seconds()


class ExpiryWarning:
    """Logs a warning, once a day."""

    def __init__(self, credentials: Credentials, now: Callable[[], datetime] = now) -> None:
        self._credentials, self._now = credentials, now
        self._said: datetime | None = None

    def look(self) -> None:
        """Log the warning if it is due. Callers call this regularly."""
        pem, now = self._credentials.pem, self._now()
        if pem.cert is None or (self._said is not None and now - self._said < AGAIN):
            return
        end = _end(pem.cert)
        if end - now < WARNING:
            self._said = now
            log.warning(
                "%s ends at %s: replace it and its key; no restart is needed",
                self._credentials.files.cert,
                end.isoformat(),
            )
