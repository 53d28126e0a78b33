"""`qmq acl`, `qmq role`, `qmq user`, `qmq quota` and `qmq whoami`:
who may do what (docs/ACCESS.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from qmq.cli.arguments import assignments, parse_delays
from qmq.cli.output import SERVER, Json, Server, ask, fail, show, time_text
from qmq.errors import InvalidArgument

if TYPE_CHECKING:
    from qmq.proto.v1 import access_pb2 as pb

rules = typer.Typer(
    no_args_is_help=True, help="Access rules: who may do what, and whether the rules are enforced."
)
roles = typer.Typer(no_args_is_help=True, help="Roles: sets of principals that a rule can name.")
quotas = typer.Typer(no_args_is_help=True, help="Quotas: how much a principal may use.")
users = typer.Typer(no_args_is_help=True, help="Tokens of applications and people.")

Principal = Annotated[
    str,
    typer.Argument(help="app:NAME, op:NAME, a prefix such as 'app:billing*', role:NAME, or '*'."),
]
Exactly = Annotated[str, typer.Argument(help="app:NAME or op:NAME.")]
Operations = Annotated[
    str,
    typer.Argument(
        help=(
            "Comma-separated: produce, consume, browse, describe, create, delete, configure, "
            "reshard, operate, administer; '*' for all."
        )
    ),
]
Kind = Annotated[str, typer.Argument(help="subject, group, namespace or cluster.")]
Pattern = Annotated[
    str,
    typer.Argument(
        help="A name, a prefix before one '*', or '*'; for a namespace its prefix: 'payments.'."
    ),
]
Namespace = Annotated[
    str,
    typer.Option(
        "--namespace",
        help="Only entries below this prefix; the namespace's administrators may list them.",
    ),
]
RuleId = Annotated[
    str, typer.Option("--id", help="The rule's name; default: made from the rule's content.")
]

_RULE_COLUMNS = ("rule", "effect", "principal", "operations", "resource", "pattern", "by", "at")


def _row(rule: pb.AccessRule) -> tuple[str, ...]:
    effect, operations = "deny" if rule.is_deny else "allow", ",".join(rule.operations) or "*"
    return (
        rule.id,
        effect,
        rule.principal,
        operations,
        rule.kind,
        rule.pattern,
        rule.by,
        time_text(rule.at_ms),
    )


@rules.command("list")
def list_rules(namespace: Namespace = "", as_json: Json = False, server: Server = SERVER) -> None:
    """List the rules, the roles they name, and the mode."""

    found = ask(server, lambda mq: mq.access.rules(namespace))
    show(
        f"rules (mode: {found.mode})",
        _RULE_COLUMNS,
        [_row(rule) for rule in found.rules],
        as_json=as_json,
    )


@rules.command("allow")
def allow(
    principal: Principal,
    operations: Operations,
    kind: Kind,
    pattern: Pattern = "*",
    rule_id: RuleId = "",
    as_json: Json = False,
    server: Server = SERVER,
) -> None:
    """Allow operations. A consumer needs `consume` on the subject and on the group."""
    _put(principal, operations, kind, pattern, rule_id, as_json, server, is_deny=False)


@rules.command("deny")
def deny(
    principal: Principal,
    operations: Operations,
    kind: Kind,
    pattern: Pattern = "*",
    rule_id: RuleId = "",
    as_json: Json = False,
    server: Server = SERVER,
) -> None:
    """Deny operations. A deny rule takes precedence over every allow rule."""
    _put(principal, operations, kind, pattern, rule_id, as_json, server, is_deny=True)


def _put(
    principal: str,
    operations: str,
    kind: str,
    pattern: str,
    rule_id: str,
    as_json: bool,
    server: str,
    *,
    is_deny: bool,
) -> None:
    named = (
        []
        if operations == "*"
        else [each.strip() for each in operations.split(",") if each.strip()]
    )

    rule = ask(
        server,
        lambda mq: mq.access.put_rule(
            principal, named, kind, pattern, is_deny=is_deny, rule_id=rule_id
        ),
    )
    show("rule", _RULE_COLUMNS, [_row(rule)], as_json=as_json)


@rules.command("remove")
def remove(
    rule_id: Annotated[str, typer.Argument(help="The rule's name, as `qmq acl list` shows it.")],
    as_json: Json = False,
    server: Server = SERVER,
) -> None:
    """Remove a rule."""

    ask(server, lambda mq: mq.access.delete_rule(rule_id))
    if as_json:
        show("removed", ("rule",), [(rule_id,)], as_json=True)


@rules.command("test")
def tell_decision(
    principal: Exactly,
    operation: Annotated[str, typer.Argument(help="One operation.")],
    kind: Kind,
    name: Annotated[
        str, typer.Argument(help="The resource's name; leave it out for the cluster.")
    ] = "",
    as_json: Json = False,
    server: Server = SERVER,
) -> None:
    """Tell whether the rules allow an operation, and which rule decides.
    Exit code 1 if it is denied.
    """

    found = ask(server, lambda mq: mq.access.test(principal, operation, kind, name))
    answer = "allowed" if found.is_allowed else "denied"
    row = (
        principal,
        operation,
        f"{kind} {name}".strip(),
        answer,
        found.rule.id or found.by or "no rule",
        ",".join(found.roles),
    )
    show(
        "decision",
        ("principal", "operation", "resource", "answer", "decided by", "roles"),
        [row],
        as_json=as_json,
    )
    if not found.is_allowed:
        raise typer.Exit(1)


@rules.command("mode")
def mode(
    new: Annotated[
        str, typer.Argument(help="off, watch (record what would be refused) or enforce.")
    ],
    as_json: Json = False,
    server: Server = SERVER,
) -> None:
    """Set whether the rules are enforced."""

    before = ask(server, lambda mq: mq.access.set_mode(new))
    if as_json:
        show("mode", ("from", "to"), [(before, new)], as_json=True)
        return
    typer.echo(f"mode: {before} -> {new}")


# --- roles ----------------------------------------------------------------------------------------


@roles.command("list")
def list_roles(namespace: Namespace = "", as_json: Json = False, server: Server = SERVER) -> None:
    """List roles and their members."""

    found = ask(server, lambda mq: mq.access.rules(namespace))
    rows = [(role.name, member) for role in found.roles for member in role.members]
    show("roles", ("role", "member"), rows, as_json=as_json)


@roles.command("add")
def add_to_role(
    role: str,
    principals: Annotated[list[str], typer.Argument(help="app:NAME or op:NAME.")],
    as_json: Json = False,
    server: Server = SERVER,
) -> None:
    """Add principals to a role. The first principal creates the role."""
    _change_role(role, principals, [], as_json, server)


@roles.command("remove")
def remove_from_role(
    role: str,
    principals: Annotated[list[str], typer.Argument(help="app:NAME or op:NAME.")],
    as_json: Json = False,
    server: Server = SERVER,
) -> None:
    """Remove principals from a role. Removing the last one deletes the role."""
    _change_role(role, [], principals, as_json, server)


def _change_role(name: str, add: list[str], take: list[str], as_json: bool, server: str) -> None:
    members = list(
        ask(server, lambda mq: mq.access.change_role(name, add=add, remove=take)).members
    )
    if as_json:
        show("role", ("role", "members"), [(name, members)], as_json=True)
        return
    typer.echo(f"{name}: {', '.join(members) or 'no members'}")


# --- quotas ---------------------------------------------------------------------------------------

_QUOTA_COLUMNS = ("quota", "principal", "limit", "value", "set_by")


def _quota_rows(quota: pb.AccessQuota) -> list[tuple[str, str, str, int, str]]:
    set_by = "team" if quota.is_team else "cluster"
    return [
        (quota.id, quota.principal, name, value, set_by)
        for name, value in sorted(quota.limits.items())
        if value
    ]


@quotas.command("list")
def list_quotas(namespace: Namespace = "", as_json: Json = False, server: Server = SERVER) -> None:
    """List all quotas."""

    found = ask(server, lambda mq: mq.access.quotas(namespace))
    show(
        "quotas",
        _QUOTA_COLUMNS,
        [row for quota in found for row in _quota_rows(quota)],
        as_json=as_json,
    )


_LIMITS = dict.fromkeys(
    (
        "produce_bytes_per_s",
        "produce_messages_per_s",
        "fetch_bytes_per_s",
        "fetch_messages_per_s",
        "inflight_bytes",
        "connections",
        "requests_per_s",
        "subjects",
        "groups",
        "delayed_messages",
    ),
    int,
)


@quotas.command("set")
def set_quota(
    principal: Principal,
    limits: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="LIMIT=VALUE...", help="As `qmq quota list` names them; 0: no limit."
        ),
    ] = None,
    as_json: Json = False,
    server: Server = SERVER,
) -> None:
    """Set the limits of a principal, of a role, of 'subject:PATTERN' (each subject) or of
    'namespace:PREFIX' (its subjects together).

    At each broker: produce_bytes_per_s, produce_messages_per_s, fetch_bytes_per_s,
    fetch_messages_per_s, connections, and inflight_bytes, which are sent and not yet answered. At
    each metaserver: requests_per_s. How many subjects a principal may create: subjects; for
    subject:PATTERN how many may match it. How many groups may consume the subjects that a principal
    created: groups; for subject:PATTERN each subject. How many messages of these subjects may wait
    in each delay group: delayed_messages.

    Limits that are not given are removed. Who administers a namespace sets quotas for its subjects,
    applications and narrower namespaces; they hold beside the cluster's, and the smaller limit
    counts.
    """
    try:
        given = {name: int(value) for name, value in assignments(limits or (), _LIMITS).items()}
    except InvalidArgument as failure:
        fail(failure)
    if not any(given.values()):
        fail(
            InvalidArgument(
                "give at least one limit, such as produce_bytes_per_s=1000000; `qmq quota "
                "remove` removes a quota"
            )
        )

    show(
        "quota",
        _QUOTA_COLUMNS,
        _quota_rows(ask(server, lambda mq: mq.access.put_quota(principal, given))),
        as_json=as_json,
    )


@quotas.command("remove")
def remove_quota(
    quota_id: Annotated[
        str, typer.Argument(help="The quota's name, as `qmq quota list` shows it.")
    ],
    as_json: Json = False,
    server: Server = SERVER,
) -> None:
    """Remove a quota."""

    ask(server, lambda mq: mq.access.delete_quota(quota_id))
    if as_json:
        show("removed", ("quota",), [(quota_id,)], as_json=True)


# --- tokens ---------------------------------------------------------------------------------------


@users.command("token")
def token(
    principal: Exactly,
    ends_in: Annotated[
        str,
        typer.Option("--for", help="How long the token is valid: 90d, 12h; default: without end."),
    ] = "",
    as_json: Json = False,
    server: Server = SERVER,
) -> None:
    """Make a token and print it. The token is shown only once: store it in a file of mode 600 and
    set QMQ_TOKEN_FILE to that file.
    """
    import time

    ends_ms = time.time_ns() // 1_000_000 + sum(parse_delays(ends_in)) if ends_in else 0

    made = ask(server, lambda mq: mq.access.create_token(principal, ends_ms=ends_ms))
    if as_json:
        row = (made.token, made.info.id, made.info.principal, made.info.ends_ms)
        show("token", ("token", "id", "principal", "ends ms"), [row], as_json=True)
        return
    typer.echo(made.token)


@users.command("list")
def list_tokens(namespace: Namespace = "", as_json: Json = False, server: Server = SERVER) -> None:
    """List tokens: ids and principals, never the secrets."""

    rows = [
        (
            each.id,
            each.principal,
            time_text(each.ends_ms) if each.ends_ms else "never",
            each.by,
            time_text(each.at_ms),
        )
        for each in ask(server, lambda mq: mq.access.tokens(namespace))
    ]
    show("tokens", ("id", "principal", "ends", "by", "at"), rows, as_json=as_json)


@users.command("revoke")
def revoke(
    whose: Annotated[
        str,
        typer.Argument(
            help="app:NAME or op:NAME for all tokens of a principal, or one token's id."
        ),
    ],
    as_json: Json = False,
    server: Server = SERVER,
) -> None:
    """Revoke tokens. Connections that use them are closed within a second."""

    revoked = ask(
        server,
        lambda mq: mq.access.delete_tokens(**{"principal" if ":" in whose else "token_id": whose}),
    )
    if as_json:
        show("revoked", ("token id",), [(each,) for each in revoked], as_json=True)
        return
    typer.echo(f"revoked: {', '.join(revoked)}")


def whoami(as_json: Json = False, server: Server = SERVER) -> None:
    """Show which principal the cluster sees, and how it was authenticated."""

    found = ask(server, lambda mq: mq.access.whoami())
    ends = time_text(found.ends_ms) if found.ends_ms else ""
    row = (
        found.principal,
        found.how,
        ",".join(found.roles),
        "yes" if found.is_admin else "no",
        found.mode,
        ends,
    )
    show(
        "you",
        ("principal", "known by", "roles", "administers", "mode", "ends"),
        [row],
        as_json=as_json,
    )
