"""The records of access control in the coordination store (docs/ACCESS.md).

    /qmq/access/mode
        ModeRecord: whether rules are enforced
        removed by nobody
    /qmq/access/rules/ID
        AccessRule
        removed by the operator
    /qmq/access/roles/NAME
        RoleRecord: the members of a role
        removed by the operator
    /qmq/access/tokens/ID
        TokenRecord: the digest of a token, never the token
        removed by the operator
    /qmq/access/quotas/ID
        Quota
        removed by the operator
    /qmq/access/server-token
        the token that servers show each other, as text; the first server that finds none makes it
        removed by the operator

All other values are JSON. Operations of a newer release are ignored, since this release does not
perform them. While rules are enforced, any other unreadable value closes the cluster to all but
servers and administrators, because the unreadable value may be a rule that denies.
"""

from __future__ import annotations

import json
import logging
import secrets
from dataclasses import dataclass
from typing import Any, Final

from qmq.errors import InvalidArgument, QmqError
from qmq.model import check_name
from qmq.security.access import AccessState
from qmq.security.access_rules import AccessMode, AccessRule, Operation, ResourceKind
from qmq.security.principal import Principal
from qmq.security.quotas import Quota
from qmq.security.tokens import TokenRecord
from qmq_coordination.coordination_store import CoordinationStore, KeyValue, Put, absent

log = logging.getLogger("qmq.coordination")

ACCESS: Final = "/qmq/access/"
MODE: Final = ACCESS + "mode"
SERVER_TOKEN: Final = ACCESS + "server-token"
RULES: Final = ACCESS + "rules/"
ROLES: Final = ACCESS + "roles/"
TOKENS: Final = ACCESS + "tokens/"
QUOTAS: Final = ACCESS + "quotas/"
_KNOWN: Final = frozenset(each.value for each in Operation)


@dataclass(frozen=True, slots=True)
class ModeRecord:
    """The mode of access control: who set it, and when, in milliseconds since 1970."""

    mode: AccessMode
    by: str = ""
    at_ms: int = 0


@dataclass(frozen=True, slots=True)
class RoleRecord:
    """A role's members, as principals."""

    name: str
    members: frozenset[str]


def encode_mode(record: ModeRecord) -> bytes:
    return _json(mode=record.mode.value, by=record.by, at_ms=record.at_ms)


def decode_mode(data: bytes) -> ModeRecord:
    """Decode a mode. Raises ValueError, KeyError, TypeError."""
    found = json.loads(data)
    return ModeRecord(AccessMode(found["mode"]), found.get("by", ""), found.get("at_ms", 0))


def encode_rule(rule: AccessRule) -> bytes:
    return _json(
        effect="deny" if rule.is_deny else "allow",
        principal=rule.principal,
        operations=sorted(each.value for each in rule.operations),
        kind=rule.kind.value,
        pattern=rule.pattern,
        by=rule.by,
        at_ms=rule.at_ms,
    )


def decode_rule(rule_id: str, data: bytes) -> AccessRule | None:
    """Decode a rule; None for a rule about operations that this release does not know. Raises
    ValueError, KeyError, TypeError, QmqError.
    """
    found: dict[str, Any] = json.loads(data)
    known = frozenset(Operation(each) for each in found["operations"] if each in _KNOWN)
    if found["operations"] and not known:
        return None
    if found["effect"] not in ("allow", "deny"):
        raise InvalidArgument(f"the effect of a rule is allow or deny, not {found['effect']!r}")
    is_deny, kind = found["effect"] == "deny", ResourceKind(found["kind"])
    at = found.get("by", ""), found.get("at_ms", 0)
    return AccessRule(
        rule_id, is_deny, found["principal"], known, kind, found["pattern"], *at
    ).check()


def encode_role(record: RoleRecord) -> bytes:
    return _json(members=sorted(record.members))


def decode_role(name: str, data: bytes) -> RoleRecord:
    """Decode a role. Raises ValueError, KeyError, TypeError, QmqError."""
    return RoleRecord(
        name, frozenset(str(Principal.parse(each)) for each in json.loads(data)["members"])
    )


def encode_token(record: TokenRecord) -> bytes:
    return _json(
        principal=str(record.principal),
        digest=record.digest,
        ends_ms=record.ends_ms,
        by=record.by,
        at_ms=record.at_ms,
    )


def decode_token(token_id: str, data: bytes) -> TokenRecord:
    """Decode a token's record. Raises ValueError, KeyError, TypeError, QmqError."""
    found = json.loads(data)
    return TokenRecord(
        token_id,
        Principal.parse(found["principal"]),
        found["digest"],
        found.get("ends_ms", 0),
        found.get("by", ""),
        found.get("at_ms", 0),
    )


def encode_quota(quota: Quota) -> bytes:
    return _json(
        principal=quota.principal, **quota.limits(), **({"is_team": True} if quota.is_team else {})
    )


def decode_quota(quota_id: str, data: bytes) -> Quota:
    """Decode a quota. Raises ValueError, KeyError, TypeError, QmqError."""
    found = json.loads(data)
    return Quota.of(
        quota_id, found.pop("principal"), found, is_team=found.pop("is_team", False) is True
    )


def rule_key(rule_id: str) -> str:
    return RULES + check_name("rule", rule_id)


def role_key(name: str) -> str:
    return ROLES + check_name("role", name)


def token_key(token_id: str) -> str:
    return TOKENS + check_name("token", token_id)


def quota_key(quota_id: str) -> str:
    return QUOTAS + check_name("quota", quota_id)


def read_access(state: AccessState, key: str, item: KeyValue | None) -> None:
    """Apply a change of a key to the rules. `item` is None if the key was deleted."""
    state.version += 1
    state.unreadable.discard(key)
    try:
        _read(state, key, None if item is None else item.value)
    except (ValueError, TypeError, KeyError, AttributeError, QmqError):
        log.exception(
            (
                "the access record at %s in the coordination store cannot be read: all requests "
                "are refused until it is corrected"
            ),
            key,
        )
        state.unreadable.add(key)
        if key == MODE:
            state.mode = AccessMode.ENFORCE


async def ensure_server_token(store: CoordinationStore) -> None:
    """Create the token that servers show each other, if there is none. Raises CoordinationError."""
    token = "qmqs_" + secrets.token_urlsafe(32)
    await store.txn([absent(SERVER_TOKEN)], [Put(SERVER_TOKEN, token.encode())])


def _read(state: AccessState, key: str, value: bytes | None) -> None:
    if key == MODE:
        state.mode = AccessMode.OFF if value is None else decode_mode(value).mode
    elif key == SERVER_TOKEN:
        state.server_token = "" if value is None else value.decode("ascii")
    elif key.startswith(RULES):
        name = key[len(RULES) :]
        _keep(state.rules, name, None if value is None else decode_rule(name, value))
    elif key.startswith(ROLES):
        name = key[len(ROLES) :]
        _keep(state.roles, name, None if value is None else decode_role(name, value).members)
    elif key.startswith(TOKENS):
        name = key[len(TOKENS) :]
        _keep(state.tokens, name, None if value is None else decode_token(name, value))
    elif key.startswith(QUOTAS):
        name = key[len(QUOTAS) :]
        _keep(state.quotas, name, None if value is None else decode_quota(name, value))


def _keep(where: dict[str, Any], name: str, value: object | None) -> None:
    if value is None:
        where.pop(name, None)
    else:
        where[name] = value


def _json(**values: object) -> bytes:
    return json.dumps(values, sort_keys=True).encode()
