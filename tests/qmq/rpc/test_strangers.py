"""Strangers at a port share places and bytes; the address that takes most pays. Any order of events
keeps the bounds.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qmq.rpc.server import peer_host
from qmq.rpc.strangers import BYTES_PER_S, PROOFS_PER_S, StrangerBounds, Strangers, network_of
from qmq.security.principal import peer_address


class Port:
    """A port that remembers whom it ended."""

    def __init__(self, places: int = 4, bytes_max: int = 1000, time_s: float = 20) -> None:
        self.now_s = 0.0
        self.ended: list[str] = []
        self.strangers = Strangers(StrangerBounds(places, bytes_max, time_s), lambda: self.now_s)

    def came(self, who: str) -> None:
        """The address is the part before the dot."""
        self.strangers.came(who, who.partition(".")[0], lambda: self.ended.append(who))


def test_one_address_pushes_out_only_itself() -> None:
    port = Port(places=4)
    port.came("honest.1")
    for number in range(100):
        port.came(f"many.{number}")
    assert len(port.strangers) == 4
    assert port.ended == [f"many.{number}" for number in range(97)]


def test_a_newcomer_finds_a_place_however_many_one_address_has() -> None:
    port = Port(places=4)
    for number in range(4):
        port.came(f"many.{number}")
    port.came("honest.1")
    assert port.ended == ["many.0"]


def test_the_address_with_the_most_bytes_pays_for_bytes() -> None:
    port = Port(bytes_max=1000)
    for who in ("honest.1", "many.0", "many.1", "many.2"):
        port.came(who)
    port.strangers.received("honest.1", 300)
    port.strangers.received("many.1", 350)
    port.strangers.received("many.2", 360)
    assert port.ended == ["many.1"], "many.0 has sent nothing, so its end would free nothing"
    assert port.strangers.bytes == 660


def test_time_is_over_unless_bytes_arrive() -> None:
    port = Port(bytes_max=100 * BYTES_PER_S, time_s=20)
    port.came("silent.1")
    port.came("slow.1")
    port.strangers.received("slow.1", 10 * BYTES_PER_S)
    port.now_s = 19.9
    port.strangers.end_late()
    assert port.ended == []
    port.now_s = 20
    port.strangers.end_late()
    assert port.ended == ["silent.1"]
    port.now_s = 30
    port.strangers.end_late()
    assert port.ended == ["silent.1", "slow.1"]


def test_attempts_of_one_address_are_slowed_down_and_others_are_not() -> None:
    port = Port()
    allowed = sum(not port.strangers.owes_s("many") for _ in range(10 * PROOFS_PER_S))
    assert PROOFS_PER_S <= allowed <= PROOFS_PER_S + 1
    assert port.strangers.owes_s("many") > 0
    assert not port.strangers.owes_s("honest")
    port.now_s += 1
    assert not port.strangers.owes_s("many")


def test_ipv6_counts_by_the_network_of_64_bits() -> None:
    assert (
        network_of("2001:db8::1") == network_of("2001:db8::ffff:2") != network_of("2001:db8:0:1::1")
    )
    assert network_of("::ffff:10.0.0.1") == network_of("10.0.0.1")
    assert network_of("fe80::1%eth0") == network_of("fe80::2%eth1")
    assert network_of("unix") == "unix"


_WHO = st.sampled_from([f"{address}.{number}" for address in "abc" for number in range(4)])
_EVENT = st.tuples(st.sampled_from(["came", "received", "left", "late"]), _WHO, st.integers(0, 700))


@given(st.lists(_EVENT, max_size=60))
def test_any_order_of_events_keeps_the_bounds_and_ends_each_once(
    events: list[tuple[str, str, int]],
) -> None:
    port = Port(places=5, bytes_max=1000, time_s=3)
    present: dict[str, int] = {}
    for what, who, amount in events:
        before = len(port.ended)
        if what == "came":
            port.came(who)
            present.setdefault(who, 0)
        elif what == "received":
            port.strangers.received(who, amount)
            if who in present:
                present[who] += amount
        elif what == "left":
            port.strangers.left(who)
            present.pop(who, None)
        else:
            port.now_s += amount / 100
            port.strangers.end_late()
        for gone in port.ended[before:]:
            del present[gone]  # ended while it was there, and once
        assert len(port.strangers) == len(present) <= 5
        assert port.strangers.bytes == sum(present.values()) <= 1000


@pytest.mark.parametrize(
    ("peer", "address", "network"),
    [
        ("ipv4:192.0.2.7:5", "192.0.2.7:5", "192.0.2.7"),
        ("ipv6:%5B2001:db8::7%5D:5", "[2001:db8::7]:5", "2001:db8::"),
        ("ipv6:%5B2001:db8::8%5D:6", "[2001:db8::8]:6", "2001:db8::"),
        ("unix:", "unix", "unix"),
        ("unix:/run/qmq/1", "unix", "unix"),
    ],
)
def test_a_peer_of_grpc_counts_for_its_network(peer: str, address: str, network: str) -> None:
    assert peer_address(peer, {}) == address
    assert network_of(peer_host(address)) == network
