"""Access control of a server that follows the coordination store, for all roles."""

from __future__ import annotations

from qmq_coordination.view import ClusterView, ViewChange

from qmq.errors import InvalidArgument
from qmq.process.event_loop import Clock, SystemClock
from qmq.rpc.network import Network, TokenNetwork
from qmq.security.access import AccessConfig, AccessControl, Verifier
from qmq.security.audit import AuditLog


def follow_access(
    view: ClusterView, config: AccessConfig | None = None, audit: AuditLog | None = None, clock: Clock | None = None
) -> AccessControl:
    """Access control by a view, notified of each change. Raises InvalidArgument."""
    verifier = None if config is None else _verifier(config)
    access = AccessControl(view, config, audit=audit, verifier=verifier, now_ms=(clock or SystemClock()).time_ms)

    def changed(change: ViewChange) -> None:
        if change.access:
            access.changed()

    view.on_change(changed)
    return access


def _verifier(config: AccessConfig) -> Verifier | None:
    if config.jwt is None:
        return None
    try:
        from qmq.security.jwt_tokens import JwtVerifier
    except ImportError as cause:
        raise InvalidArgument("tokens of an identity provider need PyJWT: pip install 'qmq[oidc]'") from cause
    return JwtVerifier(config.jwt)


def server_network(network: Network, view: ClusterView) -> Network:
    """A server's network, which sends the cluster's token to other servers."""
    return TokenNetwork(network, lambda: view.access.server_token, is_required=False)
