"""Options of the commands that run a server. Each field of these dataclasses becomes an option.

    ReplicaPlace      which replica of which group this is, where its data is, where it listens
    EtcdFlags         how to reach etcd
    TlsFlags          certificates
    GuardFlags        TLS and access control
    StorageFlags      how the logs are stored
    MetricsFlags      where metrics are served
    ProcessFlags      metrics, logging

A command's class inherits from the classes it needs; the options of the last base come first in
`--help`. An option has the name and the default of its field. A field with a `Variable` is no
option: few servers need it, and only the environment gives it. `taking` makes the command.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import MISSING, dataclass, fields
from math import inf
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Final,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

import typer

from qmq import limits
from qmq.cli.arguments import (
    HOUR_MS,
    HOURS_MAX,
    MIB_MAX,
    delays_text,
    parse_delays,
    port_option,
    require_utf8,
)
from qmq.cli.output import fail, run
from qmq.errors import InvalidArgument, QmqError
from qmq.model import GroupSettings, check_name
from qmq.text import joined

if TYPE_CHECKING:
    from qmq.log.log_config import LogConfig
    from qmq.node.process import Environment, EtcdOptions
    from qmq.node.replica.context import ReplicaConfig
    from qmq.node.replica.node import ReplicaNode
    from qmq.security.access import AccessConfig
    from qmq.security.tls import Tls

_O = TypeVar("_O")
_BOOLEANS: Final = {
    "1": True,
    "true": True,
    "yes": True,
    "on": True,
    "0": False,
    "false": False,
    "no": False,
    "off": False,
}


@dataclass(frozen=True, slots=True)
class Variable:
    """A setting of a server that only a variable of the environment gives.
    `help` says what it means.
    """

    name: str
    help: str
    at_least: float | None = None
    at_most: float = inf

    def parse(self, text: str, kind: Any) -> Any:
        """The value as the field's type, or, of a union, its first type.
        Raises typer.BadParameter.
        """
        wanted = get_args(kind)[0] if get_args(kind) else kind
        try:
            found = _BOOLEANS[text.lower()] if wanted is bool else wanted(text)
        except (KeyError, ValueError):
            what = {bool: "'1' or '0'", int: "a whole number", float: "a number"}.get(
                wanted, "a path"
            )
            raise typer.BadParameter(f"the variable {self.name} is {what}, not {text!r}") from None
        if isinstance(found, str):
            require_utf8(f"the variable {self.name}", found)
        if self.at_least is not None and not self.at_least <= found <= self.at_most:  # or NaN
            most = "" if self.at_most == inf else f" and at most {self.at_most}"
            raise typer.BadParameter(
                f"the variable {self.name} is at least {self.at_least:g}{most}, not {text}"
            )
        return found


_C = TypeVar("_C", bound="ReplicaConfig")

Etcd = Annotated[
    str, typer.Option("--etcd", envvar="QMQ_ETCD", help="etcd's members: HOST:PORT,HOST:PORT.")
]
EtcdCa = Annotated[
    Path | None,
    typer.Option(
        "--etcd-ca", envvar="QMQ_ETCD_CA", help="PEM file: the authority of etcd's certificates."
    ),
]
EtcdCert = Annotated[
    Path | None,
    typer.Option(
        "--etcd-cert",
        envvar="QMQ_ETCD_CERT",
        help="PEM file: this server's client certificate for etcd.",
    ),
]
EtcdKey = Annotated[
    Path | None,
    typer.Option("--etcd-key", envvar="QMQ_ETCD_KEY", help="PEM file: that certificate's key."),
]
Host = Annotated[str, typer.Option(envvar="QMQ_HOST", help="Address to listen on.")]

ATTEMPTS_MAX: Final = GroupSettings().attempts_max
RETRY_DELAYS: Final = delays_text(GroupSettings().retry_delays_ms)


def taking(
    options: type[_O],
) -> Callable[[Callable[[typer.Context, _O], None]], Callable[..., None]]:
    """Turn a function that takes one value of a dataclass into a command with an
    option for each field.
    """
    context_of = inspect.Parameter(
        "context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context
    )
    parameters = [context_of, *parameters_of(options)]
    more = tuple(each.name for each in variables_of(options).values())

    def made(function: Callable[[typer.Context, _O], None]) -> Callable[..., None]:
        def command(context: typer.Context, **given: Any) -> None:
            function(context, options(**given, **given_by_variables(options, os.environ)))

        command.__name__, command.__doc__ = function.__name__, function.__doc__
        if more:
            command.__doc__ = (
                f"{inspect.cleandoc(function.__doc__ or '')}\n\nMore settings are variables of "
                f"the environment: {', '.join(more)}."
            )
        command.more_variables = more  # type: ignore[attr-defined]  # `qmq config` knows them by it
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {each.name: each.annotation for each in parameters}
        return command

    return made


def parameters_of(options: type) -> list[inspect.Parameter]:
    """A parameter for each field of a dataclass, annotated for typer."""
    hints, kind = get_type_hints(options, include_extras=True), inspect.Parameter.KEYWORD_ONLY
    bare = (
        {each.name for each in fields(options.WITHOUT_VARIABLES)}
        if hasattr(options, "WITHOUT_VARIABLES")
        else set()
    )
    return [
        inspect.Parameter(
            each.name,
            kind,
            default=inspect.Parameter.empty if each.default is MISSING else each.default,
            annotation=_without_variable(hints[each.name])
            if each.name in bare
            else hints[each.name],
        )
        for each in fields(options)
        if not isinstance(hints[each.name].__metadata__[0], Variable)
    ]


def variables_of(options: type) -> dict[str, Variable]:
    """The settings of a dataclass that only variables give, by field."""
    found = {
        name: hint.__metadata__[0]
        for name, hint in get_type_hints(options, include_extras=True).items()
        if get_origin(hint) is Annotated
    }
    return {
        each.name: found[each.name]
        for each in fields(options)
        if isinstance(found.get(each.name), Variable)
    }


def given_by_variables(options: type, environment: Mapping[str, str]) -> dict[str, Any]:
    """The values of these settings, without those that the environment does not give.
    Raises typer.BadParameter.
    """
    hints = get_type_hints(options)
    given = {
        name: variable
        for name, variable in variables_of(options).items()
        if environment.get(variable.name)
    }
    return {
        name: variable.parse(environment[variable.name], hints[name])
        for name, variable in given.items()
    }


def _without_variable(hint: Any) -> Any:
    option = copy(hint.__metadata__[0])
    option.envvar = None
    return Annotated[hint.__origin__, option]


# --- options --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReplicaPlace:
    group: Annotated[
        str, typer.Option(envvar="QMQ_GROUP", help="The broker group of this replica.")
    ] = ""
    replica: Annotated[
        str,
        typer.Option(
            envvar="QMQ_REPLICA",
            help="This replica's name; it must stay the same as long as the data is kept.",
        ),
    ] = ""
    replicas: Annotated[
        str,
        typer.Option(
            envvar="QMQ_REPLICAS",
            help="The initial replicas, comma-separated; used only when the group is created.",
        ),
    ] = ""
    data: Annotated[
        Path, typer.Option(envvar="QMQ_DATA", help="The replica's data folder; created if missing.")
    ] = Path("qmq-data")
    host: Host = "127.0.0.1"
    data_port: Annotated[int, port_option("The data port", "QMQ_DATA_PORT")] = 20881
    control_port: Annotated[int, port_option("The control port", "QMQ_CONTROL_PORT")] = 20882
    advertise: Annotated[
        str,
        typer.Option(
            envvar="QMQ_ADVERTISE",
            help="The host name advertised to clients and replicas; default: --host.",
        ),
    ] = ""


@dataclass(frozen=True)
class EtcdFlags:
    etcd: Etcd = ""
    etcd_user: Annotated[str | None, Variable("QMQ_ETCD_USER", "etcd's user.")] = None
    etcd_password: Annotated[str | None, Variable("QMQ_ETCD_PASSWORD", "etcd's password.")] = None
    etcd_ca: EtcdCa = None
    etcd_cert: EtcdCert = None
    etcd_key: EtcdKey = None

    def etcd_options(self) -> EtcdOptions:
        """How to reach etcd. Raises InvalidArgument."""
        return etcd_options(
            self.etcd,
            self.etcd_user,
            self.etcd_password,
            self.etcd_ca,
            self.etcd_cert,
            self.etcd_key,
        )


@dataclass(frozen=True)
class TlsFlags:
    """The certificate of a server, also for a command that does a server's work."""

    tls_ca: Annotated[
        Path | None,
        typer.Option(
            envvar="QMQ_TLS_CA",
            help="PEM file: the authority of clients' and servers' certificates; turns TLS on.",
        ),
    ] = None
    tls_cert: Annotated[
        Path | None, typer.Option(envvar="QMQ_TLS_CERT", help="PEM file: the server's certificate.")
    ] = None
    tls_key: Annotated[
        Path | None, typer.Option(envvar="QMQ_TLS_KEY", help="PEM file: that certificate's key.")
    ] = None


@dataclass(frozen=True)
class GuardFlags(TlsFlags):
    tls_clients: Annotated[
        str,
        Variable(
            "QMQ_TLS_CLIENTS", "'required' or 'optional': whether clients must show a certificate."
        ),
    ] = "required"
    tls_principal: Annotated[
        str,
        Variable(
            "QMQ_TLS_PRINCIPAL",
            "The certificate field that names the principal: uri, dns, email or cn.",
        ),
    ] = "uri"
    admins: Annotated[
        str,
        typer.Option(
            envvar="QMQ_ADMINS",
            help="Principals with all rights, comma-separated: op:alice,op:bob.",
        ),
    ] = ""
    audit_log: Annotated[
        Path | None,
        typer.Option(
            envvar="QMQ_AUDIT_LOG", help="File for the audit log; default: the ordinary log."
        ),
    ] = None
    audit_subject: Annotated[
        str,
        Variable("QMQ_AUDIT_SUBJECT", "Subject that gets a copy of the audit log; default: none."),
    ] = ""
    jwt_issuer: Annotated[
        str,
        Variable("QMQ_JWT_ISSUER", "The identity provider whose tokens are accepted: their `iss`."),
    ] = ""
    jwt_keys: Annotated[
        str,
        Variable(
            "QMQ_JWT_KEYS",
            "Its public keys: a file (JWKS or PEM), or the https:// address of its JWKS.",
        ),
    ] = ""
    jwt_audience: Annotated[
        str, Variable("QMQ_JWT_AUDIENCE", "The `aud` that tokens must have.")
    ] = "qmq"
    jwt_claim: Annotated[str, Variable("QMQ_JWT_CLAIM", "The claim that names the principal.")] = (
        "sub"
    )
    jwt_email_domain: Annotated[
        str,
        Variable(
            "QMQ_JWT_EMAIL_DOMAIN",
            (
                "The domain whose email addresses in that claim name principals, by the part "
                "before the @."
            ),
        ),
    ] = ""

    def tls(self) -> Tls | None:
        """The server's certificates, or None without TLS. Raises InvalidArgument."""
        from qmq.security.tls import Tls

        ca, cert, key = self.tls_ca, self.tls_cert, self.tls_key
        if self.tls_clients not in ("required", "optional"):
            raise InvalidArgument(
                f"QMQ_TLS_CLIENTS must be 'required' or 'optional', not {self.tls_clients!r}"
            )
        if ca is None and cert is None and key is None:
            return None
        if ca is None or cert is None or key is None:
            raise InvalidArgument(
                "TLS needs --tls-ca, --tls-cert and --tls-key together: `qmq cert` makes the files"
            )
        return Tls(ca, cert, key, requires_clients=self.tls_clients == "required")

    def access(self) -> AccessConfig:
        """The access control settings. Raises InvalidArgument, InvalidName."""
        from qmq.security.access import AccessConfig, JwtConfig
        from qmq.security.principal import Principal, PrincipalField, PrincipalRule

        try:
            named_by = PrincipalField(self.tls_principal)
        except ValueError:
            raise InvalidArgument(
                f"QMQ_TLS_PRINCIPAL must be uri, dns, email or cn, not {self.tls_principal!r}"
            ) from None
        names = frozenset(
            str(Principal.parse(each.strip())) for each in self.admins.split(",") if each.strip()
        )
        if bool(self.jwt_issuer) is not bool(self.jwt_keys):
            raise InvalidArgument("QMQ_JWT_ISSUER and QMQ_JWT_KEYS must be given together")
        provider = (
            JwtConfig(
                self.jwt_issuer,
                self.jwt_keys,
                self.jwt_audience,
                self.jwt_claim,
                self.jwt_email_domain,
            )
            if self.jwt_issuer
            else None
        )
        subject = check_name("subject", self.audit_subject) if self.audit_subject else ""
        return AccessConfig(names, PrincipalRule(named_by), provider, subject)


@dataclass(frozen=True)
class StorageFlags:
    flush: Annotated[
        str,
        typer.Option(
            envvar="QMQ_FLUSH",
            help="'sync': flush before acknowledging; 'async': flush in the background.",
        ),
    ] = "async"
    flush_interval_ms: Annotated[
        int,
        Variable(
            "QMQ_FLUSH_INTERVAL_MS",
            "With async: the shortest interval between flushes.",
            at_least=0,
            at_most=HOUR_MS,
        ),
    ] = limits.FLUSH_INTERVAL_MS
    segment_mib: Annotated[
        int,
        Variable(
            "QMQ_SEGMENT_MIB", "Size of a segment of the message log.", at_least=1, at_most=MIB_MAX
        ),
    ] = 1024
    retention_hours: Annotated[
        float,
        typer.Option(
            min=0,
            max=HOURS_MAX,
            envvar="QMQ_RETENTION_HOURS",
            help="How long messages are kept.",
        ),
    ] = 168.0
    retention_mib: Annotated[
        int | None,
        typer.Option(
            min=limits.BATCH_BYTES_MAX // limits.MIB,
            max=MIB_MAX,
            envvar="QMQ_RETENTION_MIB",
            help="Delete old segments when the message log exceeds this size.",
        ),
    ] = None
    disk_free_mib: Annotated[
        int,
        Variable(
            "QMQ_DISK_FREE_MIB",
            "Refuse messages when less disk space than this is free.",
            at_least=0,
            at_most=MIB_MAX,
        ),
    ] = 64

    def log_config(self) -> LogConfig:
        """The storage settings. Raises typer.BadParameter."""
        from qmq.log.log_config import Flush, LogConfig

        if self.flush not in ("async", "sync"):
            raise typer.BadParameter(f"--flush must be 'async' or 'sync', not {self.flush!r}")
        return LogConfig(
            segment_bytes=self.segment_mib << 20,
            flush=Flush(self.flush),
            flush_interval_ms=self.flush_interval_ms,
            retention_ms=int(self.retention_hours * HOUR_MS),
            retention_bytes=None if self.retention_mib is None else self.retention_mib << 20,
            disk_free_bytes_min=self.disk_free_mib << 20,
        )


@dataclass(frozen=True)
class RetryFlags:
    attempts_max: Annotated[
        int,
        typer.Option(
            min=0,
            max=limits.ATTEMPTS_MAX,
            envvar="QMQ_ATTEMPTS_MAX",
            help="Attempts before a message becomes a dead letter; groups can override it.",
        ),
    ] = ATTEMPTS_MAX
    retry_delays: Annotated[
        str,
        typer.Option(
            envvar="QMQ_RETRY_DELAYS",
            help="Delays between attempts: 1s,5s,1m; groups can override them.",
        ),
    ] = RETRY_DELAYS

    def retries(self) -> GroupSettings:
        """The retry policy. Raises InvalidArgument."""
        return retries_of(self.attempts_max, self.retry_delays)


@dataclass(frozen=True)
class MetricsFlags:
    metrics_port: Annotated[
        int | None,
        port_option("Serve Prometheus metrics at /metrics on this port", "QMQ_METRICS_PORT"),
    ] = None
    metrics_host: Annotated[
        str,
        Variable(
            "QMQ_METRICS_HOST",
            (
                "Address of the metrics port; without it, this machine only. A server with TLS "
                "uses it at other addresses."
            ),
        ),
    ] = ""

    @property
    def open_metrics_host(self) -> str:
        """Where the metrics port listens by `QMQ_METRICS_HOST`; empty if there is no such port."""
        return "" if self.metrics_port is None else self.metrics_host


@dataclass(frozen=True)
class ProcessFlags(MetricsFlags):
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure",
            envvar="QMQ_INSECURE",
            help="Listen on a public address without access control; for private networks.",
        ),
    ] = False
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what happens.")] = False


@dataclass(frozen=True)
class ReplicaOptions(ProcessFlags, StorageFlags, GuardFlags, EtcdFlags, ReplicaPlace):
    """Options shared by `qmq broker` and `qmq delay`."""

    def processes(self) -> Sequence[ReplicaOptions]:
        """Those of each process that the server runs as. Raises InvalidArgument."""
        return [self]

    def control_address(self) -> str:
        """Where this machine reaches the replica's control port."""
        from qmq.node.process import EVERYWHERE

        return joined(
            self.advertise or ("localhost" if self.host in EVERYWHERE else self.host),
            self.control_port,
        )

    def shared_config(self, kind: str) -> dict[str, Any]:
        """The shared part of both configurations; `kind`: the kind of group. Raises
        InvalidArgument, InvalidName, typer.BadParameter.
        """
        log = self.log_config()
        if not self.group or not self.replica:
            raise InvalidArgument(
                "name this replica and its group: --group (QMQ_GROUP) and --replica (QMQ_REPLICA)"
            )
        return {
            "group": check_name(kind, self.group),
            "replica": check_name("replica", self.replica),
            "replicas": names_of(self.replicas or self.replica, "--replicas (QMQ_REPLICAS)"),
            "data": self.data,
            "host": self.host,
            "data_port": self.data_port,
            "control_port": self.control_port,
            "advertise": self.advertise or self.host,
            "etcd": self.etcd_options(),
            "log": log,
            "metrics_port": self.metrics_port,
            "metrics_host": self.metrics_host,
            "access": self.access(),
        }


# --- running --------------------------------------------------------------------------------------


def serve_replica(
    options: ReplicaOptions,
    configure: Callable[[], _C],
    node: Callable[[_C, Environment], ReplicaNode],
    role: str = "broker",
) -> None:
    """Run one replica until a signal stops it. Prints errors of its options to standard error."""
    from qmq.node.process import environment_with, require_guarded, require_reachable
    from qmq.node.replica.node import run_replica

    try:
        set_up_logging(options.verbose, options.audit_log)
        config, tls = configure(), options.tls()
        require_guarded(
            options.host, options.insecure, config.etcd, tls, metrics_host=options.open_metrics_host
        )
        require_reachable(options.host, options.advertise)
        environment = environment_with(tls)
        run(run_replica(lambda: node(config, environment), role))
    except (OSError, QmqError) as failure:
        fail(failure)


def names_of(text: str, option: str) -> tuple[str, ...]:
    """The names of a comma-separated option. Raises InvalidArgument if there are none."""
    found = tuple(part.strip() for part in text.split(",") if part.strip())
    if not found:
        raise InvalidArgument(f"{option} is missing: give the option or set its variable")
    return found


def etcd_options(
    etcd: str,
    user: str | None,
    password: str | None,
    ca: Path | None,
    cert: Path | None,
    key: Path | None,
) -> EtcdOptions:
    """How to reach etcd. Raises InvalidArgument."""
    from qmq.node.process import EtcdOptions

    for path in (ca, cert, key):
        if path is not None and not path.is_file():
            raise InvalidArgument(f"{path} is not a file: etcd's certificates are PEM files")
    return EtcdOptions(names_of(etcd, "--etcd (QMQ_ETCD)"), user, password, ca, cert, key)


def set_up_logging(verbose: bool, audit_log: Path | None = None) -> None:
    """Set up logging of a server's process.
    Raises InvalidArgument for an audit log that cannot be written.
    """
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING,
        format="%(asctime)s %(name)s %(message)s",
    )
    if audit_log is not None:
        from qmq.security.audit import write_audit_to

        write_audit_to(audit_log)


def retries_of(attempts_max: int, retry_delays: str) -> GroupSettings:
    """The retry policy given by the options. Raises InvalidArgument."""
    return GroupSettings(attempts_max, parse_delays(retry_delays)).check()
