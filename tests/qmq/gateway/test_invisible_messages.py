"""The pure core of invisible messages, with and without a time limit."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qmq.gateway.receipts import InvisibleMessages, ReceiptHandle
from qmq.gateway.status import Refused

GATEWAY = b"gateway1"


def table(gateway: bytes = GATEWAY) -> InvisibleMessages[str]:
    numbers = count()
    return InvisibleMessages(gateway, lambda size: next(numbers).to_bytes(size, "big"))


def add(
    held: InvisibleMessages[str],
    *,
    invisible_ms: int = 100,
    renews_until_ms: int = 0,
    client: str = "c",
) -> str:
    found = held.add(
        "m", "s", "g", client, now_ms=0, invisible_ms=invisible_ms, renews_until_ms=renews_until_ms
    )
    return str(held.handle(found))


def test_a_handle_finds_its_message_until_its_time_is_over() -> None:
    held = table()
    handle = add(held)
    assert held.find(handle, "s", "g", 99).message == "m"
    with pytest.raises(Refused):
        held.find(handle, "s", "g", 100)
    assert [each.message for each in held.remove_over(100, lambda _: True)] == ["m"]
    assert len(held) == 0


def test_a_renewed_message_stays_while_its_client_is_alive_and_no_longer_than_told() -> None:
    held = table()
    add(held, renews_until_ms=250)
    assert held.remove_over(100, lambda _: True) == []
    assert held.remove_over(200, lambda _: True) == []
    assert len(held.remove_over(300, lambda _: True)) == 1
    add(held, renews_until_ms=250)
    assert len(held.remove_over(100, lambda _: False)) == 1


def test_a_handle_of_another_gateway_finds_no_message() -> None:
    handle = add(table(b"gateway2"))
    held = table()
    add(held)
    with pytest.raises(Refused):
        held.find(handle, "s", "g", 0)


@given(st.text(max_size=80))
def test_any_text_is_refused_as_a_handle_and_raises_nothing_else(text: str) -> None:
    held = table()
    add(held)
    with pytest.raises(Refused):
        held.find(text, "s", "g", 0)


@given(
    st.binary(min_size=8, max_size=8),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**32 - 1),
    st.binary(min_size=8, max_size=8),
)
def test_a_handle_says_what_it_was_made_of(
    gateway: bytes, number: int, change: int, secret: bytes
) -> None:
    handle = ReceiptHandle(gateway, number, change, secret)
    assert ReceiptHandle.parse(str(handle)) == handle
