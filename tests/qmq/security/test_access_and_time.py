"""Rights that end with time: rules that are too old, and expired tokens. The clock is the
test's.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from support import ManualClock, eventually

from qmq.broker.broker import Broker
from qmq.broker.config import BrokerConfig
from qmq.broker.control import ProcessParts
from qmq.client.connection.connection import Connection, connect
from qmq.errors import AccessDenied, NotAuthenticated, NotConnected
from qmq.log.log_config import LogConfig
from qmq.log.recovery import open_store
from qmq.model import SubjectConfig
from qmq.node.broker_assembly import StandaloneBroker
from qmq.process.event_loop import Clock
from qmq.rpc.tls_network import network_of
from qmq.security.access import (
    STALE_MS,
    AccessConfig,
    AccessControl,
    AccessState,
    Caller,
    JwtConfig,
    Verify,
)
from qmq.security.access_rules import AccessMode, AccessRule, Operation, ResourceKind, on_subject
from qmq.security.jwt_tokens import LEEWAY_S, JwtVerifier
from qmq.security.principal import Principal
from qmq.security.tokens import new_token
from qmq.wire import frame_payloads as wire
from qmq.wire.batch import encode
from qmq.wire.batch_columns import Columns
from qmq.wire.frame import FrameKind

ORDERS = Principal("app", "orders")
ADMIN = Principal("op", "admin")


@dataclass
class RulesAsHeard:
    """The rules from a coordination store, and their age."""

    access: AccessState = field(default_factory=AccessState)
    revision: int = 1
    silent_ms: int = 0

    def allow(self, principal: Principal) -> None:
        for kind in (ResourceKind.SUBJECT, ResourceKind.GROUP):
            rule = AccessRule(
                f"{principal.name}-{kind.value}", False, str(principal), frozenset(), kind
            )
            self.access.rules[rule.id] = rule
        self.access.version += 1

    def token(self, principal: Principal, ends_ms: int = 0) -> str:
        made = new_token(principal, by="", now_ms=0, ends_ms=ends_ms)
        self.access.tokens[made.record.id] = made.record
        return made.token


class ClosedPort:
    """A broker's data port that enforces rules."""

    def __init__(self, running: StandaloneBroker, heard: RulesAsHeard, clock: ManualClock) -> None:
        self.data, self.heard, self.clock = running.data, heard, clock
        self._numbers = iter(range(1_000))

    async def connect(self, token: Callable[[], str] | str) -> Connection:
        return await connect(
            f"127.0.0.1:{self.data.port}", "test", network_of(None, token), reauth_s=0.0
        )

    async def send(self, connection: Connection) -> None:
        """Send one message to `orders`. Raises the error of the answer."""
        envelope, region = encode(
            b"orders",
            Columns([b"x"]),
            producer_id=next(self._numbers),
            batch_sequence=0,
            create_time_ms=1,
        )
        await connection.call(FrameKind.PRODUCE, envelope + region, timeout_s=10)


@asynccontextmanager
async def closed_port(
    folder: Path, verify: Callable[[Clock], Verify | None] = lambda _: None
) -> AsyncIterator[ClosedPort]:
    clock, heard = ManualClock(), RulesAsHeard(AccessState(mode=AccessMode.ENFORCE))
    heard.allow(ORDERS)
    access = AccessControl(
        heard,
        AccessConfig(frozenset({str(ADMIN)})),
        verify=verify(clock),
        now_ms=clock.time_ms,
    )
    store = open_store(folder, LogConfig(), clock)
    running = StandaloneBroker(
        lambda parts: Broker(
            store,
            SubjectConfig,
            clock,
            BrokerConfig(),
            asyncio.get_running_loop(),
            make_parts=parts,
        ),
        parts=ProcessParts(access=access),
        tick_s=0.0005,
    )
    await running.data.start("127.0.0.1", 0)
    running.maintenance.start()
    try:
        yield ClosedPort(running, heard, clock)
    finally:
        await running.stop()
        store.close()


async def ended(connection: Connection) -> str:
    """Why the broker ended a connection."""
    await asyncio.wait_for(connection.ended.wait(), 20)
    with pytest.raises(NotConnected) as cause:
        await connection.call(FrameKind.PULL, b"", timeout_s=1)
    return str(cause.value)


async def test_a_broker_that_is_cut_off_refuses_producers_when_its_rules_are_too_old(
    tmp_path: Path,
) -> None:
    async with closed_port(tmp_path) as port:
        orders, admin = (
            await port.connect(port.heard.token(ORDERS)),
            await port.connect(port.heard.token(ADMIN)),
        )
        await port.send(orders)
        port.heard.silent_ms = STALE_MS
        port.data.end_expired()
        await port.send(orders)
        port.heard.silent_ms = STALE_MS + 1
        port.data.end_expired()
        with pytest.raises(AccessDenied, match="coordination store has been away"):
            await port.send(orders)
        await port.send(admin)
        port.heard.silent_ms = 0
        port.data.end_expired()
        await port.send(orders)


async def test_a_broker_that_is_cut_off_ends_consumption_under_way(tmp_path: Path) -> None:
    async with closed_port(tmp_path) as port:
        consumer = await port.connect(port.heard.token(ORDERS))
        attach = wire.Attach("orders", 0, "g", "c", "i", -1, "earliest", 60_000, [], [])
        await consumer.call(FrameKind.ATTACH, attach.pack(), timeout_s=10)
        port.heard.silent_ms = STALE_MS + 1
        assert "coordination store has been away" in await ended(consumer), (
            "the broker looks at the clock by itself"
        )
        with pytest.raises(AccessDenied):
            await (await port.connect(port.heard.token(ORDERS))).call(
                FrameKind.ATTACH, attach.pack(), timeout_s=10
            )


async def test_a_token_that_comes_to_its_end_ends_its_connection(tmp_path: Path) -> None:
    async with closed_port(tmp_path) as port:
        end_ms = port.clock.time_ms() + 60_000
        token = port.heard.token(ORDERS, end_ms)
        connection, other = await port.connect(token), await port.connect(port.heard.token(ORDERS))
        await port.send(connection)
        port.clock.now_ms = end_ms
        assert "the token has expired" in await ended(connection)
        await port.send(other)
        with pytest.raises(NotAuthenticated, match="expired"):
            await port.connect(token)


async def test_a_connection_that_showed_a_newer_token_outlives_the_first(tmp_path: Path) -> None:
    async with closed_port(tmp_path) as port:
        end_ms = port.clock.time_ms() + 60_000
        shown = [port.heard.token(ORDERS, end_ms)]
        connection = await port.connect(lambda: shown[0])
        shown[0] = port.heard.token(ORDERS, end_ms + 60_000)
        (held,) = port.data.open_connections
        await eventually(lambda: held.access.caller.ends_ms == end_ms + 60_000)
        port.clock.now_ms = end_ms
        port.data.end_expired()
        await port.send(connection)
        port.clock.now_ms = end_ms + 60_000
        assert "the token has expired" in await ended(connection)


async def test_a_providers_token_is_renewed_on_an_open_connection_and_cut_at_its_end(
    tmp_path: Path,
) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    keys = {
        "keys": [
            {
                **json.loads(jwt.algorithms.ECAlgorithm.to_jwk(key.public_key())),
                "kid": "k",
                "use": "sig",
            }
        ]
    }

    def verify(clock: Clock) -> Verify:
        provider = JwtConfig("https://id.example", "https://id.example/jwks")
        return JwtVerifier(
            provider, fetch=lambda: json.dumps(keys).encode(), now_ms=clock.time_ms
        ).verify

    def token(ends_s: int) -> str:
        claims = {"iss": "https://id.example", "aud": "qmq", "sub": ORDERS.name, "exp": ends_s}
        return jwt.encode(claims, key, algorithm="ES256", headers={"kid": "k"})

    async with closed_port(tmp_path, verify) as port:
        end_s = port.clock.time_ms() // 1000 + 60
        shown = [token(end_s)]
        connection = await port.connect(lambda: shown[0])
        shown[0] = token(end_s + 60)
        (held,) = port.data.open_connections
        await eventually(lambda: held.access.caller.ends_ms == (end_s + 60 + LEEWAY_S) * 1000)
        port.clock.now_ms = (end_s + LEEWAY_S) * 1000
        port.data.end_expired()
        await port.send(connection)
        port.clock.now_ms = (end_s + 60 + LEEWAY_S) * 1000
        assert "the token has expired" in await ended(connection)


async def test_a_newer_token_of_another_principal_is_refused_and_recorded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with closed_port(tmp_path) as port:
        connection = await port.connect(port.heard.token(ORDERS))
        with pytest.raises(AccessDenied, match="app:orders's"):
            await connection.call(
                FrameKind.REAUTH, wire.Reauth(port.heard.token(ADMIN)).pack(), timeout_s=10
            )
        await port.send(connection)
    (record,) = [
        json.loads(each.getMessage())
        for each in caplog.records
        if each.name == "qmq.audit" and each.levelno == logging.WARNING
    ]
    assert (record["action"], record["principal"], record["on"], record["request"]) == (
        "REAUTH",
        "app:orders",
        "op:admin",
        "2",
    )


def test_decisions_made_before_the_rules_name_their_reason() -> None:
    heard = RulesAsHeard(AccessState(mode=AccessMode.ENFORCE))
    access = AccessControl(
        heard,
        AccessConfig(frozenset({str(ADMIN)}), audit_subject="audit"),
        now_ms=lambda: 0,
    )
    heard.allow(ORDERS)

    def by(principal: Principal, subject: str = "s") -> tuple[bool, str]:
        found = access.decide(principal, on_subject(Operation.PRODUCE, subject))
        return found.is_allowed, found.rule.id if found.rule is not None else found.by

    assert by(Principal("node", "b0")) == (True, "a server")
    assert by(ADMIN) == (True, "--admins")
    assert by(ORDERS) == (True, "orders-subject")
    assert by(ORDERS, "audit") == (False, "only servers write the audit log")
    heard.silent_ms = STALE_MS + 1
    assert by(ORDERS) == (False, "the coordination store is away")
    heard.access.unreadable.add("/qmq/access/rules/x")
    assert by(ORDERS) == (False, "unreadable: /qmq/access/rules/x")


def test_neither_a_rule_nor_administrators_make_a_replica() -> None:
    heard = RulesAsHeard(AccessState(mode=AccessMode.ENFORCE))
    access = AccessControl(heard, AccessConfig(frozenset({str(ADMIN)})), now_ms=lambda: 0)
    for principal in (ADMIN, ORDERS):
        with pytest.raises(AccessDenied, match="no server"):
            access.require_replica(Caller(principal, "certificate", "10.0.0.7:1", request="1"))
    access.require_replica(Caller(Principal("node", "b0")))
    assert access.audit.refusals == 2
