"""Authorises each call of a gRPC server: an interceptor.

`operations.py` says what a request needs. The caller is identified by the call's token, or else by the connection's certificate. Changes
and refusals go to the audit log.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from typing import Any, Final

import grpc
from google.protobuf import text_format

from qmq.errors import AccessDenied, Overloaded, QmqError
from qmq.rpc.bodies import RequestBodies, late_stream, late_unary
from qmq.rpc.channel import abort
from qmq.rpc.operations import RPC_RULES, RpcRule
from qmq.security.access import AccessControl, Caller
from qmq.security.access_rules import Need, Operation, on_cluster, on_subject
from qmq.security.audit import AuditLog
from qmq.security.principal import ANONYMOUS, Principal, RpcPeer, RpcPeers, peer_address
from qmq.security.quotas import RateMeter

CALLER: Final[ContextVar[Caller]] = ContextVar("caller", default=Caller())  # noqa: B039 - a Caller does not change
"""The caller of the current call."""
WAIT_S_MAX: Final = 2.0
"""The longest wait of a call for its principal's quota; beyond that the call is refused."""
METERS_MAX: Final = 10_000
REQUEST_ID: Final = "x-request-id"
"""The metadata key with which a caller names its call; the audit log contains the name."""
REQUEST_ID_CHARS_MAX: Final = 64
_BEARER: Final = "Bearer "

KnowsSubject = Callable[[str], bool]
SubjectOfDelayed = Callable[[str], Awaitable[str]]
"""Maps the id of a delayed message to its subject. Raises QmqError."""


class RpcGuard(grpc.aio.ServerInterceptor):
    """`knows_subject` and `subject_of_delayed` are a metaserver's. `local_uid`: the only user that can open the server's socket in the
    file system, None where others can.
    """

    def __init__(
        self,
        access: AccessControl,
        knows_subject: KnowsSubject = lambda _: True,
        subject_of_delayed: SubjectOfDelayed | None = None,
        local_uid: Callable[[], int | None] = lambda: None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._access = access
        self._local_uid = local_uid
        self._knows_subject, self._subject_of_delayed = knows_subject, subject_of_delayed
        self._now_s = now_s
        self._meters: dict[Principal, RateMeter] = {}
        self._bodies = RequestBodies()
        self.peers: RpcPeers = {}
        """The peer of each connection that a relay accepted."""

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = str(handler_call_details.method)
        if handler.unary_unary is not None:
            return late_unary(handler, self._unary(method, handler.unary_unary))
        return late_stream(handler, self._stream(method, handler.unary_stream))

    def _unary(self, method: str, serve: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any], Awaitable[Any]]:
        async def guarded(context: Any) -> Any:
            try:
                caller, rule, request = await self._admit(method, context)
            except QmqError as failure:
                await abort(context, failure, method)
            answer = await self._served(method, request, context, caller, rule, serve)
            if rule.is_lean:
                rule.lean(answer)
            return self._kept(caller, rule, answer) if rule.keeps is not None else answer

        return guarded

    def _stream(self, method: str, serve: Callable[[Any, Any], AsyncIterator[Any]]) -> Callable[[Any], AsyncIterator[Any]]:
        async def guarded(context: Any) -> AsyncIterator[Any]:
            try:
                caller, rule, request = await self._admit(method, context)
            except QmqError as failure:
                await abort(context, failure, method)
            async for each in serve(request, context):
                try:
                    self._access.check(caller)
                except QmqError as failure:
                    await abort(context, failure, method)
                if rule.keeps is None:
                    yield each
                    continue
                whole = type(each)()
                whole.CopyFrom(each)  # other callers get the same answer
                kept = self._kept(caller, rule, whole)
                if kept.ByteSize() or not each.ByteSize():
                    yield kept

        return guarded

    # --- before --------------------------------------------------------------------------------------------------------

    async def _admit(self, method: str, context: Any) -> tuple[Caller, RpcRule, Any]:
        """Who calls, what that needs, and then the request."""
        caller = self._identify(context)._replace(request=_request_id(context))
        CALLER.set(caller)
        rule = RPC_RULES.get(method)
        request = await self._bodies.read(context, caller.address if caller.principal == ANONYMOUS else "")
        if rule is None or rule.servers_only:
            peer = self._peer(context)
            self._access.require_server(caller, _short(method), peer.names if peer is not None and peer.is_encrypted else None)
            return caller, rule or RpcRule(), request
        if self._access.is_on and not caller.principal.is_server:
            needs = await self._needs(method, request, rule)
            other = rule.enough(request, needs[0]) if rule.enough is not None else None
            if other is None or self._may(caller, needs[0]) or not self._may(caller, other):
                self._access.require(caller, _short(method), *needs)
            elif self._access.is_enforced:
                rule = rule._replace(is_lean=True)
        await self._slow_down(caller.principal)
        return caller, rule, request

    def _may(self, caller: Caller, need: Need) -> bool:
        self._access.check(caller)
        return self._access.decide(caller.principal, need).is_allowed

    async def _slow_down(self, principal: Principal) -> None:
        """Delay a principal that exceeds its request quota. Raises Overloaded if the wait would be too long."""
        quota = self._access.quota(principal)
        if quota is None or not quota.requests_per_s:
            return
        meter = self._meters.get(principal)
        if meter is None or meter.rate != quota.requests_per_s:
            if len(self._meters) >= METERS_MAX:
                self._meters.clear()
            meter = self._meters[principal] = RateMeter(quota.requests_per_s, self._now_s())
        owed_s = meter.owes(self._now_s())
        if owed_s > WAIT_S_MAX:
            failure = Overloaded(f"{principal} asks more often than its quota {quota.id!r} allows ({quota.requests_per_s} requests/s)")
            failure.retry_after_ms = int(owed_s * 1000)
            raise failure
        await asyncio.sleep(meter.take(1, self._now_s()))

    def _identify(self, context: Any) -> Caller:
        metadata = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
        shown = metadata.get("authorization", "")
        token = shown[len(_BEARER) :] if shown.startswith(_BEARER) else ""
        address, peer = peer_address(context.peer(), self.peers), self._peer(context)
        if peer is not None:
            return self._access.identify(peer.names, token, address)
        uid = self._local_uid() if address == "unix" else None
        return self._access.identify(None, token, address, uid)

    def _peer(self, context: Any) -> RpcPeer | None:
        """The peer of a relayed connection."""
        return self.peers.get(context.peer().rpartition("/")[2])

    def refused(self, address: str, why: str) -> None:
        """Record that TLS refused a peer. Equal refusals are counted, because a stranger can repeat them without limit."""
        self._access.refused(Caller(address=address), "TLS handshake", why)

    async def _needs(self, method: str, request: Any, rule: RpcRule) -> tuple[Need, ...]:
        needs = rule.needs(request)
        if rule.needs_now is not None:
            needs = (*needs, *rule.needs_now(request, self._access.state))
        if method.endswith("/Locate") and request.create_if_missing and not self._knows_subject(request.subject):
            needs = (*needs, on_subject(Operation.CREATE, request.subject))
        if rule.by_delayed_id is not None and self._subject_of_delayed is not None:
            try:
                needs = (*needs, on_subject(rule.by_delayed_id, await self._subject_of_delayed(request.id)))
            except QmqError:
                needs = (*needs, on_cluster(Operation.DESCRIBE))  # Callers without permission must not learn whether the message exists.
        return needs

    # --- behind --------------------------------------------------------------------------------------------------------

    async def _served(
        self, method: str, request: Any, context: Any, caller: Caller, rule: RpcRule, serve: Callable[[Any, Any], Awaitable[Any]]
    ) -> Any:
        if not rule.is_change:
            return await serve(request, context)
        on, details = _on(rule, request), text_format.MessageToString(request, as_one_line=True, as_utf8=True)
        try:
            answer = await serve(request, context)
        except BaseException:
            audited(self._access.audit, caller, _short(method), on, "failed", details=details, error=str(context.details() or ""))
            raise
        audited(self._access.audit, caller, _short(method), on, "done", details=details)
        return answer

    def _kept(self, caller: Caller, rule: RpcRule, answer: Any) -> Any:
        """The answer without the items that the caller may not see."""
        assert rule.keeps is not None
        if not self._access.is_enforced or caller.principal.is_server:
            return answer
        field, needs = rule.keeps
        decide = self._access.decide
        if decide(caller.principal, on_cluster(Operation.DESCRIBE)).is_allowed:
            return answer
        items = list(getattr(answer, field))
        kept = [each for each in items if all(decide(caller.principal, need).is_allowed for need in needs(each))]
        answer.ClearField(field)
        getattr(answer, field).extend(kept)
        return answer


def audited(audit: AuditLog, caller: Caller, action: str, on: str, result: str, **more: object) -> None:
    """Write an administrative act to the audit log."""
    audit.write(
        principal=str(caller.principal),
        how=caller.how,
        address=caller.address,
        request=caller.request,
        action=action,
        on=on,
        result=result,
        **more,
    )


def _on(rule: RpcRule, request: Any) -> str:
    """The resource of a change."""
    needs = rule.needs(request)
    named = ", ".join(f"{each.kind.value} {each.name}".strip() for each in needs)
    return named or str(getattr(request, "id", ""))


def _request_id(context: Any) -> str:
    """The id that the caller gave the call, or else a new one."""
    named = next((value for key, value in context.invocation_metadata() or () if key == REQUEST_ID), "")
    is_sane = isinstance(named, str) and 0 < len(named) <= REQUEST_ID_CHARS_MAX and named.isprintable()
    return named if is_sane else secrets.token_hex(8)


def _short(method: str) -> str:
    return method.rpartition("/")[2]


def require_caller() -> Caller:
    """The caller of the current call. Raises AccessDenied outside a call."""
    caller = CALLER.get()
    if not caller.address:
        raise AccessDenied("this can be used only within a call")
    return caller
