"""When a failure to connect is a mistake, and what a client logs while it waits."""

from __future__ import annotations

import logging

import pytest

from qmq.client.connection.connection import ClientTiming, ReachPatience
from qmq.console import page
from qmq.errors import (
    NameUnresolved,
    NotConnected,
    QmqError,
    TlsEnded,
    TlsFailed,
    TlsRefused,
    UnknownHost,
)
from qmq.gateway import status
from qmq.integrations.http import site
from qmq.proto.rocketmq import definition_pb2
from qmq.sql.outbox_sender import is_final

PATIENCE_S = ClientTiming().mistake_s
MISTAKES = {NameUnresolved: UnknownHost, TlsFailed: TlsRefused}


class Tries:
    """A client that tries at times set by hand."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.patience = ReachPatience(lambda: self.now_s, PATIENCE_S)

    def fails(
        self, kind: type[QmqError], address: str = "a:1", all_addresses: tuple[str, ...] = ("a:1",)
    ) -> type[QmqError]:
        """A try that fails at once: the kind of error that the caller gets."""
        failure = kind("it fails")
        self.patience.tries(address)
        self.patience.failed(address, failure)
        return type(self.patience.error_for(failure, all_addresses))


@pytest.mark.parametrize("kind", MISTAKES)
def test_a_mistake_is_told_when_the_patience_is_over(kind: type[QmqError]) -> None:
    tries = Tries()
    assert tries.fails(kind) is kind
    tries.now_s += PATIENCE_S - 0.1
    assert tries.fails(kind) is kind
    tries.now_s += 0.1
    assert tries.fails(kind) is MISTAKES[kind]


@pytest.mark.parametrize("kind", MISTAKES)
def test_a_mistake_at_one_of_two_addresses_is_none_yet(kind: type[QmqError]) -> None:
    tries, both = Tries(), ("a:1", "b:1")
    assert tries.fails(kind, "a:1", both) is kind
    tries.now_s += 10 * PATIENCE_S
    assert tries.fails(kind, "a:1", both) is kind, "the other one was not tried"
    assert tries.fails(kind, "b:1", both) is kind
    tries.now_s += PATIENCE_S
    assert tries.fails(kind, "b:1", both) is MISTAKES[kind]


@pytest.mark.parametrize("kind", MISTAKES)
def test_a_server_that_is_away_begins_the_patience_again(kind: type[QmqError]) -> None:
    tries = Tries()
    tries.fails(kind)
    tries.now_s += PATIENCE_S
    assert tries.fails(NotConnected) is NotConnected
    assert tries.fails(kind) is kind
    tries.now_s += PATIENCE_S
    assert tries.fails(kind) is MISTAKES[kind]


@pytest.mark.parametrize("kind", [*MISTAKES, NotConnected])
def test_who_reached_a_server_waits_on_and_logs_each_address_once(
    kind: type[QmqError], caplog: pytest.LogCaptureFixture
) -> None:
    tries = Tries()
    tries.patience.reached("b:1")
    for _ in range(5):
        assert tries.fails(kind) is kind
        tries.now_s += PATIENCE_S
    assert [each.levelno for each in caplog.records] == [logging.WARNING]
    tries.patience.reached("a:1")
    for _ in range(5):
        assert tries.fails(kind) is kind
        tries.now_s += PATIENCE_S
    assert len(caplog.records) == 2, "it was there again in between"


@pytest.mark.parametrize("kind", [TlsEnded, NotConnected])
def test_what_may_be_an_outage_is_logged_and_waited_for(
    kind: type[QmqError], caplog: pytest.LogCaptureFixture
) -> None:
    tries = Tries()
    for _ in range(20):
        assert tries.fails(kind) is kind
        tries.now_s += PATIENCE_S
    assert len(caplog.records) == 1


@pytest.mark.parametrize("kind", MISTAKES.values())
def test_a_service_that_reaches_no_server_blames_no_request_for_it(kind: type[QmqError]) -> None:
    failure = kind("a certificate is not trusted")
    assert not is_final(failure), "the row of an outbox waits"
    assert status.status_of_failure(failure).code == definition_pb2.PROXY_TIMEOUT
    assert page.status_of_failure(failure) == 503
    assert site.refusal(failure).status_code == 503
