"""What a connection may do, by its principal's rights, and how much, by quotas and the broker's
memory.

The permission that each frame requires:

    HELLO, REAUTH, WELCOME ...                none: these frames authenticate
    PRODUCE, PRODUCE_FAST, PRODUCE_FLUSHED    produce on the subject of each batch; and no other
                                              principal has its producer id
    FIND                                      produce on the subject: it tells a producer which of
                                              its batches are stored
    ATTACH, LANE_ATTACH                       consume on the subject and on the group
    FETCH                                     browse on the subject
    PULL, SETTLE, BEGUN, HEARTBEAT, DETACH,
    LANE_PULL, LANE_SETTLE                    none: they belong to an attached session
    REPLICA_HELLO, REPLICA                    to be a replica (`accepts_replica`)

Decisions are cached until the rules change. A connection whose sessions are no longer allowed then
ends with the reason; the client gets the same error when it attaches again.

When the broker does not read from a connection, the client's bytes wait at the client
(`ConnectionFlow`):

    reading stops while                                                     until
    too many bytes of this connection's PRODUCE are unanswered              half are answered
    others share this round of the event loop (`RoundBudget`)               its next turn
    the principal has too many bytes in flight, over all its connections    half are answered
    the principal is over a rate of its quota (`Throttle`)                  the pause has ended
    the client does not read its answers                                    it reads

*Quotas* are in the coordination store (`qmq/security/quotas.py`). A principal without a quota costs
one dict lookup for each frame.

*Rounds.* Everything that arrives in one round is written together, and all answers wait for that
write. Ten producers of 1 MiB batches bring 10 MiB a round; on a disk that takes 100 MB/s a
heartbeat then waits for 100 ms. So a round takes about `ROUND_BYTES_MAX`: a connection that exceeds
it is not read from until its turn comes again, in the order in which connections exceeded it.
Frames of at most `SMALL_BYTES` never wait.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from typing import Final

from qmq import limits
from qmq.broker.maintenance import ProducerOwners
from qmq.errors import AccessDenied, Overloaded, ProtocolViolation, QmqError, QuotaExceeded
from qmq.log.store import Intake
from qmq.model import base_group
from qmq.rpc.network import uid_of_peer
from qmq.security.access import Caller, OpenAccess
from qmq.security.access_rules import Need, Operation, on_group, on_subject
from qmq.security.principal import UNIX_PEER, CertificateNames, Principal
from qmq.security.quotas import Quota, RateMeter
from qmq.text import joined
from qmq.wire.frame_stream import FrameStream

SUBJECTS_MAX: Final = 10_000
"""Cached decisions of a connection; when there are more, the cache is emptied."""


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
        """Whether every subject is allowed,
        because access is not checked under the rules of `_version`.
        """
        self.has_quotas = False
        """Whether there was any quota at the last `is_open`, which looks again when the rules have
        changed.
        """
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
        """Take a newer token, which must be the same principal's.
        Raises NotAuthenticated, AccessDenied.
        """
        self.caller = self._access.renew(self.caller._replace(request=str(self.request_id)), token)

    def accepts_replica(self) -> None:
        """Raises AccessDenied unless the peer may act as a replica: with TLS it needs a server's
        certificate.

        The group's secret proves that it belongs to the group (ADR 0017), with TLS and without.
        """
        if self._is_encrypted:
            self._access.require_replica(self.caller._replace(request=str(self.request_id)))

    def may_be_replica(self, replica: str) -> bool:
        """Whether the peer's certificate is for the replica of this name, in every mode of the
        rules. Always true without TLS.
        """
        return not self._is_encrypted or self._names.names_server(replica)

    def refused(self, action: str, on: str, failure: QmqError) -> None:
        """Record a refusal in the audit log that no rule decided."""
        self._access.refused(
            self.caller._replace(request=str(self.request_id)), action, on, failure.message
        )

    # --- what it may do ---------------------------------------------------------------------------

    def is_open(self) -> bool:
        """Whether every subject and producer is allowed, because access is not checked. Called for
        each PRODUCE.
        """
        version = self._access.version
        if self._version != version or len(self._subjects) > SUBJECTS_MAX:
            self._subjects.clear()
            self._version, self._is_open = version, not self._access.is_on
            self.has_quotas = self._access.has_quotas
        return self._is_open

    def require_produce(self, subject: bytes) -> None:
        """Called for each batch unless `is_open`: at most one lookup in a set.
        Raises AccessDenied, NotAuthenticated.
        """
        if subject not in self._subjects:
            self._require(
                "PRODUCE", on_subject(Operation.PRODUCE, subject.decode("utf-8", "replace"))
            )
            self._subjects.add(subject)

    def require_producers(self, batches: list[Intake]) -> None:
        """Check, for each PRODUCE while rules are enforced, that the producer id is not another
        principal's. Raises AccessDenied.
        """
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

    def recheck(self) -> None:
        """The rules changed, or time has passed. Raises AccessDenied, NotAuthenticated: then the
        connection must end.
        """
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


PAUSE_S_MAX: Final = 5.0
"""The longest single pause: a heartbeat must pass in time,
and an operator may have raised the quota.
"""
ROUND_BYTES_MAX: Final = 4 * limits.MIB
"""Few enough bytes for a slow disk to write in 40 ms, and enough for an efficient write."""
SMALL_BYTES: Final = 64 * limits.KIB

GroupsOf = Callable[[Collection[str]], set[tuple[str, str]]]
"""(subject, group) of all groups that consume these subjects at this broker."""


class ConnectionFlow:
    """The flow control of one connection. `access` knows its principal. Without `budget` and
    `throttle` only unanswered bytes count.
    """

    __slots__ = (
        "_access",
        "_budget",
        "_call_later",
        "_counted",
        "_is_over_quota",
        "_is_waiting_for_turn",
        "_stream",
        "_throttle",
        "_throttled",
        "_unanswered",
        "_unanswered_max",
        "unanswered_bytes",
    )

    def __init__(
        self,
        stream: FrameStream,
        access: ConnectionAccess,
        call_later: Callable[[float, Callable[[], None]], asyncio.TimerHandle],
        unanswered_bytes_max: int,
        budget: RoundBudget | None = None,
        throttle: Throttle | None = None,
    ) -> None:
        self._stream, self._access, self._call_later = stream, access, call_later
        self._unanswered_max = unanswered_bytes_max
        self._budget, self._throttle = budget, throttle
        self._unanswered: dict[int, int] = {}
        """The bytes of each unanswered request."""
        self.unanswered_bytes = 0
        self._counted: set[int] = set()
        """Requests whose bytes count against the principal's quota."""
        self._is_waiting_for_turn = False
        self._is_over_quota = False
        self._throttled: asyncio.TimerHandle | None = None

    # --- what comes and goes ----------------------------------------------------------------------

    def admit(self) -> None:
        """Handle the client's HELLO. Raises Overloaded."""
        if self._throttle is not None:
            self._throttle.admit(self._access.caller.principal)

    def admit_group(self, subject: str, group: str, groups_of: GroupsOf) -> None:
        """A group begins to consume a subject. Raises QuotaExceeded."""
        if self._throttle is not None and self._throttle.has_quotas:
            self._throttle.admit_group(subject, group, groups_of)

    def began(self, request_id: int, size: int) -> None:
        """A PRODUCE of `size` bytes has arrived. Raises ProtocolViolation."""
        if request_id in self._unanswered:
            raise ProtocolViolation(f"request {request_id} is not answered yet")
        self._unanswered[request_id] = size
        self.unanswered_bytes += size
        if self.unanswered_bytes > self._unanswered_max:
            self._stream.pause_reading()
        if self._budget is not None:
            self._budget.took(self, size)

    def produced(self, request_id: int, size: int, batches: Sequence[Intake]) -> None:
        """The batches of a PRODUCE were accepted. Called while there is any quota."""
        if self._throttle is not None:
            principal = self._access.caller.principal
            self._pause_reading(self._throttle.produced(principal, batches))
            self._counted.add(request_id)
            if self._throttle.took(principal, size, self):
                self._is_over_quota = True
                self._stream.pause_reading()

    def answered(self, request_id: int) -> None:
        """A PRODUCE, or any other request, was answered."""
        size = self._unanswered.pop(request_id, 0)
        self.unanswered_bytes -= size
        if request_id in self._counted and self._throttle is not None:
            self._counted.discard(request_id)
            self._throttle.answered(self._access.caller.principal, size)
        if size and self._stream.is_held:
            self._read_on(self._unanswered_max // 2)

    def fetched(self, subject: str, messages: int, size: int) -> None:
        """Messages of `size` bytes were sent to the client. Called while there is any quota."""
        if self._throttle is not None:
            self._pause_reading(
                self._throttle.fetched(self._access.caller.principal, subject, messages, size)
            )

    def ended(self, *, was_admitted: bool) -> None:
        """The connection has ended."""
        if self._throttled is not None:
            self._throttled.cancel()
        if self._throttle is not None and was_admitted:
            for request_id in self._counted:
                self._throttle.answered(self._access.caller.principal, self._unanswered[request_id])
            self._counted.clear()
            self._throttle.ended(self._access.caller.principal)

    # --- reading ----------------------------------------------------------------------------------

    def wait_for_turn(self) -> None:
        self._is_waiting_for_turn = True
        self._stream.pause_reading()

    def take_turn(self) -> None:
        self._is_waiting_for_turn = False
        self._read_on(self._unanswered_max)

    def read_on(self) -> None:
        """The principal's bytes in flight, over all its connections, are below its quota again."""
        self._is_over_quota = False
        self._read_on(self._unanswered_max)

    def writable(self) -> None:
        """The client reads its answers again."""
        self._read_on(self._unanswered_max)

    def _pause_reading(self, pause_s: float) -> None:
        """The principal has exceeded its quota: do not read from this connection for a while."""
        if pause_s and self._throttled is None:
            self._stream.pause_reading()
            self._throttled = self._call_later(pause_s, self._pause_ended)

    def _pause_ended(self) -> None:
        self._throttled = None
        self._read_on(self._unanswered_max)

    def _read_on(self, unanswered_max: int) -> None:
        """Read from the connection again, if nothing prevents it."""
        is_held = (
            self._is_waiting_for_turn
            or self._is_over_quota
            or self._throttled is not None
            or not self._stream.is_writable
        )
        if not is_held and self.unanswered_bytes <= unanswered_max:
            self._stream.resume_reading()


class Throttle:
    """The usage at one broker. `now_s` is a monotonic clock."""

    def __init__(self, access: OpenAccess, now_s: Callable[[], float]) -> None:
        self._access, self._now_s = access, now_s
        self._meters: dict[tuple[Principal | str, str], RateMeter] = {}
        self.connections: Counter[Principal] = Counter()
        self._inflight: Counter[Principal] = Counter()
        self._held: dict[Principal, dict[ConnectionFlow, None]] = {}
        self.paused_s = 0.0
        """How long connections were not read from, added up."""

    @property
    def inflight_bytes(self) -> int:
        """Bytes of all batches that wait for their answers, while there is any quota."""
        return self._inflight.total()

    @property
    def has_quotas(self) -> bool:
        """Whether there is any quota."""
        return self._access.has_quotas

    def admit(self, principal: Principal) -> None:
        """Count a connection of this principal at its HELLO. Raises Overloaded; the connection then
        does not count.
        """
        quota = self._access.quota(principal)
        if quota is not None and 0 < quota.connections <= self.connections[principal]:
            raise Overloaded(
                f"{principal} has {quota.connections} connections here, the limit of its "
                f"quota {quota.id!r}"
            )
        self.connections[principal] += 1

    def ended(self, principal: Principal) -> None:
        """A connection that was admitted has ended."""
        self.connections[principal] -= 1
        if not self.connections[principal]:
            del self.connections[principal]
            for name in ("bytes in", "messages in", "bytes out", "messages out"):
                self._meters.pop((principal, name), None)

    def admit_group(self, subject: str, group: str, groups_of: GroupsOf) -> None:
        """A group begins to consume a subject. Raises QuotaExceeded."""
        quota, created = self._access.subject_quota(subject), self._access.created_with(subject)
        by_subject, by_creator = (
            0 if quota is None else quota.groups,
            0 if created is None else created.quota.groups,
        )
        if not by_subject and not by_creator:
            return
        known = groups_of({subject} if created is None else created.subjects)
        if (subject, base_group(group)) in known:
            return
        count = sum([each == subject for each, _ in known])
        if quota is not None and 0 < by_subject <= count:
            raise QuotaExceeded(
                f"subject {subject!r} has {count} groups, the limit of its quota {quota.id!r}"
            )
        if created is not None and 0 < by_creator <= len(known):
            raise QuotaExceeded(
                f"the subjects that {created.principal} created have {len(known)} groups, "
                f"the limit of its quota {created.quota.id!r}"
            )

    # --- bytes in flight --------------------------------------------------------------------------

    def took(self, principal: Principal, size: int, reader: ConnectionFlow) -> bool:
        """Count an unanswered batch. Returns whether its connection must stop reading until others
        are answered.
        """
        self._inflight[principal] += size
        quota = self._access.quota(principal)
        if quota is None or not 0 < quota.inflight_bytes < self._inflight[principal]:
            return False
        self._held.setdefault(principal, {})[reader] = None
        return True

    def answered(self, principal: Principal, size: int) -> None:
        """A batch was answered, or its connection has ended."""
        self._inflight[principal] -= size
        if self._inflight[principal] <= 0:
            del self._inflight[principal]
        quota = self._access.quota(principal)
        if principal in self._held and (
            quota is None or self._inflight[principal] <= quota.inflight_bytes // 2
        ):
            for reader in self._held.pop(principal):
                reader.read_on()

    # --- rates ------------------------------------------------------------------------------------

    def produced(self, principal: Principal, batches: Sequence[Intake]) -> float:
        """Count a PRODUCE. Returns for how many seconds its connection must not be read from."""
        size, messages = (
            sum([len(each.region) for each in batches]),
            sum([each.header.count for each in batches]),
        )
        owed_s = self._taken(principal, self._access.quota(principal), size, messages)
        for each in batches:
            subject = each.queue.id.subject
            owed_s = max(
                owed_s,
                self._taken(
                    subject,
                    self._access.subject_quota(subject),
                    len(each.region),
                    each.header.count,
                ),
            )
            for together in self._access.namespace_quotas(subject):
                who = f"{together.principal} {together.id}"
                owed_s = max(
                    owed_s, self._taken(who, together, len(each.region), each.header.count)
                )
        return self._pause(owed_s)

    def _taken(self, who: Principal | str, quota: Quota | None, size: int, messages: int) -> float:
        if quota is None:
            return 0.0
        by_bytes = self._take(who, "bytes in", quota.produce_bytes_per_s, size)
        return max(by_bytes, self._take(who, "messages in", quota.produce_messages_per_s, messages))

    def fetched(self, principal: Principal, subject: str, messages: int, size: int) -> float:
        """Count messages that were sent to a consumer. Returns for how many seconds its connection
        must not be read from.
        """
        by_principal = self._given(principal, self._access.quota(principal), size, messages)
        return self._pause(
            max(
                by_principal,
                self._given(subject, self._access.subject_quota(subject), size, messages),
            )
        )

    def _given(self, who: Principal | str, quota: Quota | None, size: int, messages: int) -> float:
        if quota is None:
            return 0.0
        by_bytes = self._take(who, "bytes out", quota.fetch_bytes_per_s, size)
        return max(by_bytes, self._take(who, "messages out", quota.fetch_messages_per_s, messages))

    def _pause(self, pause_s: float) -> float:
        found = min(pause_s, PAUSE_S_MAX)
        self.paused_s += found
        return found

    def _take(self, who: Principal | str, name: str, rate: int, amount: int) -> float:
        if not rate:
            return 0.0
        meter = self._meters.get((who, name))
        if meter is None or meter.rate != rate:
            meter = self._meters[who, name] = RateMeter(rate, self._now_s())
        return meter.take(amount, self._now_s())


class RoundBudget:
    """Shares each round among the connections. `call_soon` calls in the next round of the event
    loop. `turns` counts the broker's turns: what came before the last one is written, and no longer
    counted. So a small batch needs no call in the next round.
    """

    def __init__(
        self,
        call_soon: Callable[[Callable[[], None]], object],
        turns: Callable[[], int],
        bytes_max: int = ROUND_BYTES_MAX,
        small_bytes: int = SMALL_BYTES,
    ) -> None:
        self._call_soon, self._turns, self._bytes_max, self._small_bytes = (
            call_soon,
            turns,
            bytes_max,
            small_bytes,
        )
        self._bytes = self._turn = 0
        self._is_planned = False
        self._waiting: deque[tuple[ConnectionFlow, int]] = deque()
        """The waiting connections, with the bytes they brought last."""

    def took(self, connection: ConnectionFlow, count: int) -> None:
        """A connection has received `count` bytes in this round."""
        if not self._is_planned:
            turn = self._turns()
            if self._turn != turn:
                self._bytes, self._turn = 0, turn
        self._bytes += count
        if count <= self._small_bytes:
            return
        if self._bytes > self._bytes_max:
            connection.wait_for_turn()
            self._waiting.append((connection, count))
        if not self._is_planned:
            self._is_planned = True
            self._call_soon(self._next_round)

    def _next_round(self) -> None:
        self._is_planned = False
        self._bytes = expected = 0
        while self._waiting and expected < self._bytes_max:
            connection, count = self._waiting.popleft()
            expected += count
            connection.take_turn()
        if self._waiting:
            self._is_planned = True
            self._call_soon(self._next_round)
