"""The clients that a gateway knows are bounded, by number and by what each one takes."""

from __future__ import annotations

import pytest
from support import hostile

from qmq.gateway import clients
from qmq.gateway.clients import CLIENT_ID_CHARS_MAX, ClientSessions, TelemetryStream
from qmq.gateway.status import LANGUAGE_CHARS_MAX, LANGUAGES_MAX, CallCounters, Refused
from qmq.proto.rocketmq import definition_pb2 as api


async def _unread(_: object) -> None:
    raise AssertionError("nothing is written")


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> ClientSessions:
    monkeypatch.setattr(clients, "SESSIONS_MAX", 3)
    return ClientSessions(lambda: 0)


def test_young_sessions_are_bounded_and_the_one_that_was_silent_for_longest_goes(
    few: ClientSessions,
) -> None:
    for client in ("a", "b", "c", "a", "d"):
        few.touch(client)
    assert len(few) == 3
    assert [few.is_alive(each) for each in "abcd"] == [True, False, True, True]


def test_a_client_with_a_stream_keeps_its_place(few: ClientSessions) -> None:
    for client in "abc":
        few.touch(client).streams.append(TelemetryStream(_unread, lambda _: None, lambda: None))
    with pytest.raises(Refused, match="3 clients"):
        few.touch("d")
    assert all(map(few.is_alive, "abc"))


def test_a_long_client_id_is_refused(few: ClientSessions) -> None:
    few.touch("x" * CLIENT_ID_CHARS_MAX)
    with pytest.raises(Refused, match="at most 255"):
        few.touch("x" * (CLIENT_ID_CHARS_MAX + 1))


def test_the_languages_that_clients_name_are_bounded_by_number_and_by_length() -> None:
    counters = CallCounters()
    for language in ("JAVA", "x" * 8_000, *hostile.CONTROLS, *map(str, range(LANGUAGES_MAX * 2))):
        counters.note("SendMessage", language, api.OK)
    named = {each.language for each in counters.counts}
    assert "JAVA" in named
    assert len(named) <= LANGUAGES_MAX + 1
    assert all(each.isprintable() and len(each) <= LANGUAGE_CHARS_MAX for each in named)
