"""The principal of a connection, and what it is allowed to do.

The permission that each frame requires:

    HELLO, REAUTH, WELCOME ...                    none: these frames authenticate
    PRODUCE, PRODUCE_FAST, PRODUCE_FLUSHED        produce on the subject of each batch; and no other principal has its producer id
    FIND                                          produce on the subject: it tells a producer which of its batches are stored
    ATTACH, LANE_ATTACH                           consume on the subject and on the group
    FETCH                                         browse on the subject
    PULL, SETTLE, BEGUN, HEARTBEAT, DETACH, LANE_PULL, LANE_SETTLE     none: they belong to an attached session
    REPLICA_HELLO, REPLICA                        to be a replica (`accepts_replica`)

Decisions are cached until the rules change. A connection whose sessions are no longer allowed then ends with the reason; the client gets
the same error when it attaches again.
"""

from __future__ import annotations

import asyncio
from typing import Final

from qmq.broker.maintenance import ProducerOwners
from qmq.errors import AccessDenied, QmqError
from qmq.log.store import Intake
from qmq.rpc.network import uid_of_peer
from qmq.security.access import Caller, OpenAccess
from qmq.security.access_rules import Need, Operation, on_group, on_subject
from qmq.security.principal import UNIX_PEER, CertificateNames
from qmq.text import joined
from qmq.wire.frame import FrameKind

SUBJECTS_MAX: Final = 10_000
"""Cached decisions of a connection; when there are more, the cache is emptied."""

_OPEN: Final = (FrameKind.HELLO, FrameKind.REAUTH)
_OF_SESSION: Final = (
    FrameKind.PULL,
    FrameKind.SETTLE,
    FrameKind.BEGUN,
    FrameKind.HEARTBEAT,
    FrameKind.DETACH,
    FrameKind.LANE_PULL,
    FrameKind.LANE_SETTLE,
)
_BETWEEN_REPLICAS: Final = (FrameKind.REPLICA_HELLO, FrameKind.REPLICA)

FRAME_OPERATIONS: Final[dict[int, tuple[Operation, ...]]] = {
    **dict.fromkeys((*_OPEN, *_OF_SESSION, *_BETWEEN_REPLICAS), ()),
    FrameKind.PRODUCE: (Operation.PRODUCE,),
    FrameKind.PRODUCE_FAST: (Operation.PRODUCE,),
    FrameKind.PRODUCE_FLUSHED: (Operation.PRODUCE,),
    FrameKind.FIND: (Operation.PRODUCE,),
    FrameKind.ATTACH: (Operation.CONSUME,),
    FrameKind.LANE_ATTACH: (Operation.CONSUME,),
    FrameKind.FETCH: (Operation.BROWSE,),
}
"""The operations that each kind of frame needs. A kind that is not listed is refused."""


class ConnectionAccess:
    def __init__(self, access: OpenAccess, owners: ProducerOwners) -> None:
        self._access, self._owners = access, owners
        self.caller = Caller()
        self.request_id = 0
        """Of the frame that is being handled."""
        self._is_encrypted = False
        self._names = CertificateNames()
        self._subjects: set[bytes] = set()
        self._version = -1
        self._is_open = False
        """Whether every subject is allowed, because access is not checked under the rules of `_version`."""
        self._consumes: set[tuple[str, str]] = set()

    def greet(self, transport: asyncio.BaseTransport | None, token: str = "") -> None:
        """Authenticate the peer. Raises NotAuthenticated."""
        if transport is None:
            return
        self._is_encrypted = transport.get_extra_info("sslcontext") is not None
        peer, name = transport.get_extra_info("peercert"), transport.get_extra_info("peername")
        address = joined(name[0], name[1]) if isinstance(name, tuple) else UNIX_PEER
        uid = uid_of_peer(transport.get_extra_info("socket"))
        self._names = CertificateNames.of_peer(peer)
        self.caller = self._access.identify(self._names if peer else None, token, address, uid)

    def renew(self, token: str) -> None:
        """Take a newer token, which must be the same principal's. Raises NotAuthenticated, AccessDenied."""
        self.caller = self._access.renew(self.caller._replace(request=str(self.request_id)), token)

    def accepts_replica(self) -> None:
        """Raises AccessDenied unless the peer may act as a replica: with TLS it needs a server's certificate.

        The group's secret proves that it belongs to the group (ADR 0017), with TLS and without.
        """
        if self._is_encrypted:
            self._access.require_replica(self.caller._replace(request=str(self.request_id)))

    def may_be_replica(self, replica: str) -> bool:
        """Whether the peer's certificate is for the replica of this name, in every mode of the rules. Always true without TLS."""
        return not self._is_encrypted or self._names.names_server(replica)

    def refused(self, action: str, on: str, failure: QmqError) -> None:
        """Record a refusal in the audit log that no rule decided."""
        self._access.refused(self.caller._replace(request=str(self.request_id)), action, on, failure.message)

    # --- what it may do ------------------------------------------------------------------------------------------------

    def require_produce(self, subject: bytes) -> None:
        """Called for each batch in every mode: at most one lookup in a set. Raises AccessDenied, NotAuthenticated."""
        if self._version != self._access.version or len(self._subjects) > SUBJECTS_MAX:
            self._subjects.clear()
            self._version, self._is_open = self._access.version, not self._access.is_on
        if not self._is_open and subject not in self._subjects:
            self._require("PRODUCE", on_subject(Operation.PRODUCE, subject.decode("utf-8", "replace")))
            self._subjects.add(subject)

    def require_producers(self, batches: list[Intake]) -> None:
        """Check, for each PRODUCE while rules are enforced, that the producer id is not another principal's. Raises AccessDenied."""
        principal = self.caller.principal
        if principal.is_server:
            return
        for batch in batches:
            try:
                self._owners.claim(batch.header.producer_id, principal)
            except AccessDenied as failure:
                self.refused("PRODUCE", f"subject {batch.queue.id.subject}", failure)
                raise

    def require_consume(self, subject: str, group: str) -> None:
        """Called once for each session, and again when the rules change."""
        self._require("ATTACH", *_consuming(subject, group))
        self._consumes.add((subject, group))

    def require_browse(self, subject: str) -> None:
        self._require("FETCH", on_subject(Operation.BROWSE, subject))

    def require_find(self, subject: str) -> None:
        self._require("FIND", on_subject(Operation.PRODUCE, subject))

    def _require(self, action: str, *needs: Need) -> None:
        if self._access.is_on:
            self._access.require(self.caller._replace(request=str(self.request_id)), action, *needs)

    def look_again(self) -> None:
        """The rules changed, or time has passed. Raises AccessDenied, NotAuthenticated: then the connection must end."""
        self._subjects.clear()
        self._is_open = not self._access.is_on
        if self._is_open:
            return
        self._access.check(self.caller)
        for subject, group in self._consumes:
            self._access.require(self.caller, "ATTACH", *_consuming(subject, group))

    @property
    def has_ended(self) -> bool:
        """Whether the client's token has expired."""
        return self._access.has_ended(self.caller)


def _consuming(subject: str, group: str) -> tuple[Need, Need]:
    return on_subject(Operation.CONSUME, subject), on_group(Operation.CONSUME, group)
