"""What the commands that run a role share: where etcd is, where to listen, how to store, how to log."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from qmq.cli.times import delays_text, parse_delays
from qmq.errors import InvalidArgument
from qmq.model import GroupSettings, check_name

if TYPE_CHECKING:
    from qmq.log.log_config import LogConfig
    from qmq.node.etcd_options import EtcdOptions
    from qmq.security.access_control import AccessConfig
    from qmq.security.tls import Tls

Etcd = Annotated[str, typer.Option("--etcd", envvar="QMQ_ETCD", help="etcd's members: HOST:PORT,HOST:PORT.")]
EtcdUser = Annotated[str | None, typer.Option("--etcd-user", envvar="QMQ_ETCD_USER", help="etcd's user.")]
EtcdPassword = Annotated[
    str | None, typer.Option("--etcd-password", envvar="QMQ_ETCD_PASSWORD", help="Its password; the variable keeps it out of sight.")
]
EtcdCa = Annotated[Path | None, typer.Option("--etcd-ca", envvar="QMQ_ETCD_CA", help="PEM file: who signs etcd's certificates.")]
EtcdCert = Annotated[Path | None, typer.Option("--etcd-cert", envvar="QMQ_ETCD_CERT", help="PEM file: our certificate for etcd.")]
EtcdKey = Annotated[Path | None, typer.Option("--etcd-key", envvar="QMQ_ETCD_KEY", help="PEM file: our certificate's key.")]
TlsCa = Annotated[
    Path | None,
    typer.Option("--tls-ca", envvar="QMQ_TLS_CA", help="PEM file: who signs certificates of clients and servers; turns TLS on."),
]
TlsCert = Annotated[Path | None, typer.Option("--tls-cert", envvar="QMQ_TLS_CERT", help="PEM file: this server's certificate.")]
TlsKey = Annotated[Path | None, typer.Option("--tls-key", envvar="QMQ_TLS_KEY", help="PEM file: that certificate's key.")]
TlsClients = Annotated[
    str, typer.Option("--tls-clients", envvar="QMQ_TLS_CLIENTS", help="'required' or 'optional': whether clients must show a certificate.")
]
TlsPrincipal = Annotated[
    str,
    typer.Option("--tls-principal", envvar="QMQ_TLS_PRINCIPAL", help="What of a certificate names its principal: uri, dns, email or cn."),
]
Admins = Annotated[
    str, typer.Option("--admins", envvar="QMQ_ADMINS", help="Principals that may do everything, comma-separated: op:alice,op:bob.")
]
AccessStaleS = Annotated[
    int,
    typer.Option(
        "--access-stale-s", envvar="QMQ_ACCESS_STALE_S", min=1, help="How long the last rules hold while the coordination store is away."
    ),
]
AuditFile = Annotated[
    Path | None, typer.Option("--audit-log", envvar="QMQ_AUDIT_LOG", help="File for the audit log; without it, part of the ordinary log.")
]
AuditSubjectName = Annotated[
    str, typer.Option("--audit-subject", envvar="QMQ_AUDIT_SUBJECT", help="Subject that the audit log goes to, too; none without.")
]
JwtIssuer = Annotated[
    str, typer.Option("--jwt-issuer", envvar="QMQ_JWT_ISSUER", help="The identity provider whose tokens are taken: their `iss`.")
]
JwtKeys = Annotated[
    str,
    typer.Option("--jwt-keys", envvar="QMQ_JWT_KEYS", help="Its public keys: a file (JWKS or PEM), or the https:// address of its JWKS."),
]
JwtAudience = Annotated[str, typer.Option("--jwt-audience", envvar="QMQ_JWT_AUDIENCE", help="What its tokens must say in `aud`.")]
JwtClaim = Annotated[str, typer.Option("--jwt-claim", envvar="QMQ_JWT_CLAIM", help="Which claim names the principal.")]
ACCESS_STALE_S: Final = 300
Host = Annotated[str, typer.Option("--host", envvar="QMQ_HOST", help="Address to listen on.")]
Insecure = Annotated[
    bool,
    typer.Option("--insecure", envvar="QMQ_INSECURE", help="Listen beyond this machine without access control: on a private network."),
]
Replica = Annotated[str, typer.Option("--replica", envvar="QMQ_REPLICA", help="This replica's name; it keeps it as long as its data.")]
Replicas = Annotated[
    str,
    typer.Option("--replicas", envvar="QMQ_REPLICAS", help="The group's first replicas, comma-separated; counts only when it is founded."),
]
ReplicaData = Annotated[Path, typer.Option("--data", envvar="QMQ_DATA", help="The replica's data folder; made if absent.")]
DataPort = Annotated[int, typer.Option("--data-port", envvar="QMQ_DATA_PORT", help="The data port; 0 for a free one.")]
ControlPort = Annotated[int, typer.Option("--control-port", envvar="QMQ_CONTROL_PORT", help="The control port; 0 for a free one.")]
Advertise = Annotated[
    str, typer.Option("--advertise", envvar="QMQ_ADVERTISE", help="The host name that clients and replicas are told; --host without it.")
]
FlushWhen = Annotated[str, typer.Option("--flush", envvar="QMQ_FLUSH", help="'async' or 'sync': when the disk must have a message.")]
FlushIntervalMs = Annotated[
    int, typer.Option("--flush-interval-ms", envvar="QMQ_FLUSH_INTERVAL_MS", help="With async: flush at most so often.")
]
SegmentMib = Annotated[int, typer.Option("--segment-mib", envvar="QMQ_SEGMENT_MIB", help="Size of a segment of the message log.")]
RetentionMib = Annotated[
    int | None,
    typer.Option("--retention-mib", envvar="QMQ_RETENTION_MIB", help="The message log's size beyond which old segments go."),
]
DiskFreeMib = Annotated[
    int, typer.Option("--disk-free-mib", envvar="QMQ_DISK_FREE_MIB", help="Free space below which messages are refused.")
]
MetricsPort = Annotated[
    int | None,
    typer.Option("--metrics-port", envvar="QMQ_METRICS_PORT", help="Show metrics for Prometheus at /metrics on this port; 0: a free one."),
]
AttemptsMax = Annotated[
    int, typer.Option("--attempts-max", envvar="QMQ_ATTEMPTS_MAX", help="Attempts before a dead-letter queue, unless a group has others.")
]
RetryDelays = Annotated[
    str,
    typer.Option("--retry-delays", envvar="QMQ_RETRY_DELAYS", help="Rests between attempts: 1s,5s,1m; unless a group has others."),
]
ATTEMPTS_MAX: Final = GroupSettings().attempts_max
RETRY_DELAYS: Final = delays_text(GroupSettings().retry_delays_ms)
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Log what happens.")]


def names_of(text: str, option: str) -> tuple[str, ...]:
    """A comma-separated option. Raises InvalidArgument if it is empty."""
    found = tuple(part.strip() for part in text.split(",") if part.strip())
    if not found:
        raise InvalidArgument(f"{option} is missing: give it as an option, or by its variable")
    return found


def etcd_options(etcd: str, user: str | None, password: str | None, ca: Path | None, cert: Path | None, key: Path | None) -> EtcdOptions:
    """How to reach etcd. Raises InvalidArgument."""
    from qmq.node.etcd_options import EtcdOptions

    for path in (ca, cert, key):
        if path is not None and not path.is_file():
            raise InvalidArgument(f"{path} is no file: etcd's certificates are PEM files")
    return EtcdOptions(names_of(etcd, "--etcd (QMQ_ETCD)"), user, password, ca, cert, key)


def tls_of(ca: Path | None, cert: Path | None, key: Path | None, clients: str) -> Tls | None:
    """A server's certificates; None: no TLS. Raises InvalidArgument."""
    from qmq.security.tls import Tls

    if clients not in ("required", "optional"):
        raise InvalidArgument(f"--tls-clients is 'required' or 'optional', not {clients!r}")
    if ca is None and cert is None and key is None:
        return None
    if ca is None or cert is None or key is None:
        raise InvalidArgument("TLS needs --tls-ca, --tls-cert and --tls-key together: `qmq cert` makes the files")
    return Tls(ca, cert, key, requires_clients=clients == "required")


def access_of(
    admins: str,
    tls_principal: str,
    access_stale_s: int,
    audit_subject: str,
    jwt_issuer: str,
    jwt_keys: str,
    jwt_audience: str,
    jwt_claim: str,
) -> AccessConfig:
    """Access control as the options say it. Raises InvalidArgument, InvalidName."""
    from qmq.security.access_control import AccessConfig, JwtConfig
    from qmq.security.principal import Principal, PrincipalField, PrincipalRule

    try:
        named_by = PrincipalField(tls_principal)
    except ValueError:
        raise InvalidArgument(f"--tls-principal is uri, dns, email or cn, not {tls_principal!r}") from None
    names = frozenset(str(Principal.parse(each.strip())) for each in admins.split(",") if each.strip())
    if bool(jwt_issuer) is not bool(jwt_keys):
        raise InvalidArgument("--jwt-issuer and --jwt-keys go together: who signs the tokens, and with which keys")
    provider = JwtConfig(jwt_issuer, jwt_keys, jwt_audience, jwt_claim) if jwt_issuer else None
    return AccessConfig(
        names, PrincipalRule(named_by), access_stale_s * 1000, provider, check_name("subject", audit_subject) if audit_subject else ""
    )


def set_up_logging(verbose: bool, audit_log: Path | None = None) -> None:
    """How a role's process logs. Raises InvalidArgument for an audit log that cannot be written."""
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, format="%(asctime)s %(name)s %(message)s")
    if audit_log is not None:
        from qmq.security.audit import write_audit_to

        write_audit_to(audit_log)


def require_flush(flush: str) -> None:
    """Raises typer.BadParameter."""
    if flush not in ("async", "sync"):
        raise typer.BadParameter(f"flush is 'async' or 'sync', not {flush!r}")


def retries_of(attempts_max: int, retry_delays: str) -> GroupSettings:
    """How messages are tried again, as the options say it. Raises InvalidArgument."""
    return GroupSettings(attempts_max, parse_delays(retry_delays)).check()


def log_config(
    flush: str,
    flush_interval_ms: int,
    segment_mib: int,
    retention_hours: float,
    retention_mib: int | None,
    disk_free_mib: int,
) -> LogConfig:
    """Storage as the options say it. Raises InvalidArgument."""
    from qmq.log.log_config import Flush, LogConfig

    return LogConfig(
        segment_bytes=segment_mib << 20,
        flush=Flush(flush),
        flush_interval_ms=flush_interval_ms,
        retention_ms=int(retention_hours * 3_600_000),
        retention_bytes=None if retention_mib is None else retention_mib << 20,
        disk_free_bytes_min=disk_free_mib << 20,
    )
